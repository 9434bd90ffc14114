"""Buffer of all groups between admission and their batch: one record per slot, behind one lock.

    admitted ─▶ requested ─▶ received ─▶ scored ─▶ consumed
                   ▲  └──────────┴─────────┤
                   └── retried ◀───────────┴──▶ passed over: `no_signal`, or `failed` too often

    loop thread    admit, receive, retry       worker thread    record_scores
    main thread    pop_batch: the next groups in slot order, or what the batch waits for

The ledger mirrors the states, except `requested`, which a restart forgets: there, the row is still `admitted`.
Invariant: a change of state is in the ledger in the same critical section, and `received` before its group is
acknowledged or scored. A group that is handed out is therefore `scored` in the ledger.
"""

import heapq
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import msgspec

from learner.config import LearnerRun
from learner.environments.episode import AnyGroup
from learner.prompts.curriculum import Curriculum, PassRates
from learner.prompts.prompts import Prompts
from learner.rewards.workers import GroupRewards
from learner.rollouts.bottleneck import Cause, WaitTimes
from learner.rollouts.group_requests import GroupRequest
from learner.rollouts.ledger import Ledger
from learner.rollouts.ledger_storage import slot_of
from learner.rollouts.rollout_group import RolloutGroup, recalled, received, rewards_of
from learner.rollouts.selection import Selection
from learner.rollouts.slot_order import AutoStaleness, SlotOrder, num_slots_allowed
from protocol.errors import DataError

log = logging.getLogger(__name__)

SlotState = Literal["admitted", "requested", "received", "scored"]
MAX_GIVEN_UP = 20
"""Number of prompts in a row that are given up before the run ends. What breaks every prompt would otherwise use up the
data without training."""


class Slot(msgspec.Struct, eq=False, kw_only=True):
    """Record of a slot that is neither consumed nor passed over."""

    state: SlotState
    request: GroupRequest
    """Request of the current attempt. Its `assigned_to` is the server that has it."""
    group: RolloutGroup | None = None
    """Group, once it is scored."""
    num_failures: int = 0


class ScoredGroup(NamedTuple):
    """Group with its prompt and rewards."""

    group: RolloutGroup
    prompt_id: int
    rewards: GroupRewards


class RolloutBuffer:
    """Thread-safe buffer of one run's groups. `restore` fills it from the ledger."""

    def __init__(self, run: LearnerRun, prompts: Prompts, ledger: Ledger, pass_rates: PassRates | None = None) -> None:
        """Restore the order of the slots and the curriculum.

        `pass_rates`: pass rates of the checkpoint. Without them the pass rates are recounted from all rows.
        """
        config = self._config = run.learner
        self._prompts, self._ledger = prompts, ledger
        self._changed = threading.Condition()
        """Guard of all fields below. Notified when a group changes its state."""
        self._slots: dict[int, Slot] = {}
        self._waiting: list[int] = []
        """Heap of the slots that were admitted and may wait for the staleness rule."""
        self._order = SlotOrder(ledger.next_slot(), ledger.next_slot_to_consume(), ledger.passed_over())
        reward = config.curriculum.reward or next(iter(config.reward.names), "")
        self._curriculum = Curriculum(config.curriculum, reward, prompts, run.seed, ledger.next_position())
        if self._curriculum.is_on:
            for row in ledger.scored_rows(self._curriculum.restore(pass_rates)):
                self._curriculum.record(row.slot, row.prompt_id, rewards_of(row).by_function)
        self._curriculum.count(self._order.next_to_take)
        self._selection = Selection(config)
        self._wait_times = WaitTimes()
        self._auto_staleness = AutoStaleness(config)
        self._num_given_up = 0
        """Number of prompts that were given up since the last group that was scored."""
        self._max_running = math.inf
        """Number of groups that the servers can generate at once."""
        self._taken_at = time.monotonic()
        self.batch_metrics: dict[str, float] = {}
        """Metrics of the last batch, including what it waited for."""

    # --- called in the loop thread --------------------------------------------------------------------------

    def restore(self, version: int) -> list[tuple[GroupRequest, AnyGroup]]:
        """Restore all slots from the ledger, and return the groups that are received but not scored.

        Requests that a server had wait for the staleness rule like new ones: after a restart, the server may
        have forgotten them.
        """
        unscored = []
        with self._changed:
            num_failures = self._ledger.num_failures()
            for row in self._ledger.outstanding():
                request = self._request(row.slot, row.attempt, row.position)
                slot = self._slots[row.slot] = Slot(
                    state=cast(SlotState, row.state), request=request, num_failures=num_failures.get(row.slot, 0)
                )
                if row.state == "admitted":
                    heapq.heappush(self._waiting, row.slot)
                elif row.state == "received":
                    unscored.append((request, received(self._ledger, row)))
                else:
                    slot.group = recalled(self._ledger, row, request.prompt)
            with self._ledger.batch():
                for row in self._ledger.retries_due():
                    slot = self._admit(row.slot, row.attempt + 1, row.position, version)
                    slot.num_failures = num_failures.get(row.slot, 0)
                    heapq.heappush(self._waiting, row.slot)
        return unscored

    def admit(self, version: int) -> list[GroupRequest]:
        """Admit the groups that the staleness rule allows under `version`, and return the requests to send."""
        num_allowed = num_slots_allowed(
            version=version,
            max_staleness=self._auto_staleness.versions,
            groups_per_step=self._config.groups_per_step,
            total_groups=self._config.steps * self._config.groups_per_step,
        )
        with self._changed, self._ledger.batch():
            for slot in range(self._order.next_to_admit, self._order.next_to_admit + self._order.num_new(num_allowed)):
                self._admit(slot, 0, self._curriculum.ask(), version)
                self._order.next_to_admit = slot + 1
                heapq.heappush(self._waiting, slot)
            due = []
            while self._waiting and self._order.consumption_index(self._waiting[0]) < num_allowed:
                waiting = self._slots.get(heapq.heappop(self._waiting))
                if waiting is not None and waiting.state == "admitted":  # not if its group has arrived meanwhile
                    waiting.state = "requested"
                    due.append(waiting.request)
            self._changed.notify_all()
        return due

    def pending(self, group_id: str) -> GroupRequest | None:
        """Return a request whose group has not arrived, or None if no such group is expected."""
        with self._changed:
            slot = self._slot(group_id)
            return slot.request if slot is not None and slot.state in ("admitted", "requested") else None

    def receive(self, group_id: str) -> GroupRequest | None:
        """Record that a group arrived and return its request; None for a duplicate or an unknown group.

        The caller stores the group in the ledger, then scores it.
        """
        with self._changed:
            request = self.pending(group_id)
            if request is not None:
                self._slots[request.slot].state = "received"
                self._changed.notify_all()
            return request

    def retry(
        self, group_id: str, reason: str, version: int, *, rewards: GroupRewards | None = None
    ) -> GroupRequest | None:
        """Drop a failed group and return a new request for its prompt.

        Returns None if the slot failed too often and is passed over.

        Args:
            group_id: Group of the slot's current attempt.
            reason: Reason for the ledger.
            version: Policy version of the new admission.
            rewards: Rewards with the failed reward calls, if the group could not be scored.
        """
        with self._changed:
            slot = self._slot(group_id)
            assert slot is not None, group_id
            if rewards is not None:
                self._selection.count(rewards)
            slot.num_failures += 1
            return self._retry(slot, reason, version)

    def record_capacity(self, max_concurrent_sequences: int) -> None:
        """Record how many completions the ready servers can generate at once."""
        with self._changed:
            self._max_running = max_concurrent_sequences / self._config.sampling.group_size

    def record_arrival(self, round_trip_s: float, server_s: float) -> None:
        """Record a group's round trip and the server's share of it, in seconds."""
        with self._changed:
            self._wait_times.record_arrival(round_trip_s, server_s)

    # --- called in worker threads, because it commits -------------------------------------------------------

    def record_scores(self, scored: list[ScoredGroup]) -> None:
        """Make groups ready, or pass over the slots of groups without signal.

        Resampling is decided here, so that the replacement starts at once. Score and drop are one commit, so a
        resume does not decide again and consumes the same groups.
        """
        with self._changed:
            with self._ledger.batch():
                self._num_given_up = 0
                for group, prompt_id, rewards in scored:
                    self._ledger.score(group.group_id, rewards.to_json(), rewards.mean)
                    self._curriculum.record(group.slot, prompt_id, rewards.by_function)
                    self._selection.count(rewards)
                    num_replaced = self._order.num_replaced_with(group.slot, self._config.groups_per_step)
                    if self._selection.accepts(group, num_replaced):
                        slot = self._slots[group.slot]
                        slot.state, slot.group = "scored", group
                    else:
                        self._ledger.drop(group.group_id, "no_signal")
                        del self._slots[group.slot]
                        self._order.pass_over(group.slot, "no_signal")
            self._changed.notify_all()

    # --- called in the main thread --------------------------------------------------------------------------

    def pop_batch(
        self,
        version: int,
        timeout_s: float,
        *,
        is_connected: bool,
        published: int,
        on_stale: Callable[[GroupRequest | None], Any],
    ) -> list[RolloutGroup] | None:
        """Return the next step's groups in slot order, or None after `timeout_s`.

        After a failed weight sync or a resume, groups may be too old for `version`. Their slots wait for new
        ones, whose requests, admitted at the `published` version, go to `on_stale`.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                slots = self._next_if_scored()
                stale = [slot for slot in slots or () if self._is_stale(slot, version)]
                if slots is not None and not stale:
                    return self._consume(slots)
                for retry in self._retry_stale(stale, version, published):
                    on_stale(retry)
                part, now = self._cause(is_connected), time.monotonic()
                has_changed = self._changed.wait(max(0.0, deadline - now))
                self._wait_times.add(part, time.monotonic() - now)
                if not has_changed:
                    return None

    def pass_rates(self) -> PassRates | None:
        """Return the curriculum's pass rates after the last batch."""
        with self._changed:
            return self._curriculum.pass_rates(self._order.next_to_take)

    def waits_for(self, *, is_connected: bool) -> Cause:
        """Return what the next batch waits for."""
        with self._changed:
            return self._cause(is_connected)

    def scored(self) -> list[RolloutGroup]:
        """Return the groups that wait for their step, in slot order."""
        with self._changed:
            return [slot.group for _, slot in sorted(self._slots.items()) if slot.group is not None]

    def num(self, *states: SlotState) -> int:
        """Return the number of slots in these states."""
        with self._changed:
            return sum(slot.state in states for slot in self._slots.values())

    # --- with the lock held ---------------------------------------------------------------------------------

    def _slot(self, group_id: str) -> Slot | None:
        """Return the record of a slot whose current attempt has this id."""
        number = slot_of(group_id)
        slot = self._slots.get(number) if number is not None else None
        return slot if slot is not None and slot.request.group_id == group_id else None

    def _request(self, slot: int, attempt: int, position: int) -> GroupRequest:
        return GroupRequest(slot=slot, attempt=attempt, prompt=self._prompts.prompt_at(position))

    def _admit(self, slot: int, attempt: int, position: int, version: int) -> Slot:
        """Admit a slot's first or next attempt, in the ledger too."""
        request = self._request(slot, attempt, position)
        self._ledger.admit(
            slot=slot,
            attempt=attempt,
            position=position,
            epoch=self._prompts.epoch_of(position),
            prompt_id=request.prompt.prompt_id,
            version=version,
        )
        admitted = self._slots[slot] = Slot(state="admitted", request=request)
        return admitted

    def _retry(self, slot: Slot, reason: str, version: int) -> GroupRequest | None:
        number, group_id = slot.request.slot, slot.request.group_id
        if slot.num_failures >= self._config.max_group_attempts:
            self._num_given_up += 1
            if self._num_given_up == MAX_GIVEN_UP:  # before the drop, so that a resume tries this prompt again
                raise DataError(
                    f"{MAX_GIVEN_UP} prompts in a row failed {slot.num_failures} times each "
                    f"(learner.max_group_attempts), the last one in slot {number} ({reason}); the warnings before this "
                    "say why. Correct the environment, the agent or the reward function, then continue with --resume"
                )
            self._ledger.drop(group_id, "failed")
            log.error(
                "gave up the prompt of slot %d after %d failures (learner.max_group_attempts)",
                number,
                slot.num_failures,
            )
            del self._slots[number]
            self._order.pass_over(number, "failed")
            self._changed.notify_all()
            return None
        self._ledger.drop(group_id, reason)
        retried = self._admit(number, slot.request.attempt + 1, self._ledger.position_of(number), version)
        retried.state, retried.num_failures = "requested", slot.num_failures
        self._changed.notify_all()
        return retried.request

    def _retry_stale(self, stale: list[int], version: int, published: int) -> list[GroupRequest | None]:
        retries = []
        with self._ledger.batch():
            for slot in map(self._slots.__getitem__, stale):
                age = version - cast(RolloutGroup, slot.group).oldest_version
                log.warning("requesting group %s again (stale: %d versions behind)", slot.request.group_id, age)
                retries.append(self._retry(slot, "stale", published))
        return retries

    def _next_if_scored(self) -> list[int] | None:
        """Return the next step's slots if all of them are scored."""
        slots = self._order.next(self._config.groups_per_step)
        return slots if all(self._state(slot) == "scored" for slot in slots) else None

    def _state(self, number: int) -> SlotState | None:
        slot = self._slots.get(number)
        return slot.state if slot is not None else None

    def _is_stale(self, number: int, version: int) -> bool:
        group = self._slots[number].group
        return group is not None and group.oldest_version < version - self._config.staleness_bound

    def _consume(self, slots: list[int]) -> list[RolloutGroup]:
        groups = [cast(RolloutGroup, self._slots.pop(slot).group) for slot in slots]
        num_replaced = self._order.num_replaced_with(slots[-1], len(slots))
        self._order.advance(slots[-1] + 1)
        self._curriculum.count(self._order.next_to_take)
        self.batch_metrics = self._selection.metrics_of(groups, num_replaced) | self._wait_times.metrics()
        self.batch_metrics |= self._curriculum.metrics(self._order.next_to_admit)
        self.batch_metrics["staleness/allowed"] = float(self._auto_staleness.versions)
        step_s, self._taken_at = time.monotonic() - self._taken_at, time.monotonic()
        self._auto_staleness.update(
            waited_share=self._wait_times.for_groups_s / step_s,
            has_room=self.num("admitted", "requested") < self._max_running,
            has_spare=self._next_if_scored() is not None,
        )
        self._wait_times = WaitTimes()
        return groups

    def _cause(self, is_connected: bool) -> Cause:
        if not is_connected:
            return "link"
        states = {self._state(slot) for slot in self._order.next(self._config.groups_per_step)}
        if states & {"admitted", "requested"}:
            return "server"
        return "reward" if "received" in states else "weight_sync"
