"""Buffer of all groups between admission and their batch, behind one lock.

    loop thread      admit ─▶ arrived ─▶ scoring ─▶ scored (worker thread): ready or resampled   fail: skipped
    main thread      take: the next groups in slot order, or what the batch waits for

Slots, curriculum, selection and waits are used only here and are not thread-safe.
Invariant: every change to them is in the ledger in the same commit, while the lock is held. A group that is
handed out is therefore `scored` in the ledger.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from learner.config import LearnerRun
from learner.prompts.curriculum import Curriculum, PassRates
from learner.prompts.prompts import Prompts
from learner.rewards.workers import GroupRewards
from learner.rollouts.auto_staleness import AutoStaleness
from learner.rollouts.bottleneck import Part, Waits
from learner.rollouts.group_requests import GroupRequest
from learner.rollouts.ledger import Ledger
from learner.rollouts.pending_groups import PendingGroups
from learner.rollouts.rollout_group import RolloutGroup, rewards_of
from learner.rollouts.selection import Selection
from learner.rollouts.slots import Slots, num_places_allowed


class Scored(NamedTuple):
    """Group with its prompt and rewards."""

    group: RolloutGroup
    prompt_id: int
    rewards: GroupRewards


class GroupQueue:
    """Thread-safe buffer of one run's groups, restored from its ledger."""

    def __init__(self, run: LearnerRun, prompts: Prompts, ledger: Ledger, kept: PassRates | None = None) -> None:
        """Restore the buffer from the ledger.

        `kept`: pass rates of the checkpoint. Without them the pass rates are recounted from all rows.
        """
        config = self._config = run.learner
        self._ledger = ledger
        self._changed = threading.Condition()
        """Guard of all fields below. Notified when a group changes its state."""
        self._slots = Slots(ledger.next_slot(), ledger.next_slot_to_consume(), ledger.passed_over())
        reward = config.curriculum.reward or config.reward.names[0]
        self._curriculum = Curriculum(config.curriculum, reward, prompts, run.seed, ledger.next_position())
        if self._curriculum.is_on:
            for row in ledger.scored_rows(self._curriculum.restore(kept)):
                self._curriculum.note(row.slot, row.prompt_id, rewards_of(row).by_function)
        self._curriculum.count(self._slots.next_to_take)
        self._selection = Selection(config, self._slots, self._curriculum)
        self._waits = Waits()
        self._lookahead = AutoStaleness(config)
        self._max_running = math.inf
        """Number of groups that the servers can generate at once."""
        self._taken_at = time.monotonic()
        self._scoring: set[int] = set()
        self.batch_metrics: dict[str, float] = {}
        """Metrics of the last batch, including what it waited for."""

    # --- called in the loop thread --------------------------------------------------------------------------

    def put_back(self, group: RolloutGroup) -> None:
        """Make a group ready that was scored before a resume."""
        with self._changed:
            self._slots.ready[group.slot] = group

    def admit(self, outstanding: PendingGroups, version: int) -> list[GroupRequest]:
        """Admit the groups that the staleness rule allows under `version`.

        Returns the requests that a resume held back, followed by those of new slots.
        """
        num_places = num_places_allowed(
            version=version,
            max_staleness=self._lookahead.versions,
            groups_per_step=self._config.groups_per_step,
            total_groups=self._config.steps * self._config.groups_per_step,
        )
        new: list[GroupRequest] = []
        with self._changed, self._ledger.batch():
            for slot in range(self._slots.next_to_admit, self._slots.next_to_admit + self._slots.num_new(num_places)):
                new.append(outstanding.ask(slot, 0, self._curriculum.ask(), version))
                self._slots.next_to_admit = slot + 1
            due = outstanding.due(num_places, self._slots.place)
            self._changed.notify_all()
        return due + new

    def note_capacity(self, max_concurrent_sequences: int) -> None:
        """Record how many completions the ready servers can generate at once."""
        with self._changed:
            self._max_running = max_concurrent_sequences / self._config.sampling.num_completions

    def note_arrival(self, round_trip_s: float, server_s: float) -> None:
        """Record a group's round trip and the server's share of it, in seconds."""
        with self._changed:
            self._waits.note_arrival(round_trip_s, server_s)

    def scoring(self, slot: int) -> None:
        with self._changed:
            self._scoring.add(slot)
            self._changed.notify_all()

    def unscorable(self, slot: int, rewards: GroupRewards) -> None:
        """Record that a slot's group could not be scored; the slot waits for a retry."""
        with self._changed:
            self._selection.count(rewards)
            self._scoring.discard(slot)

    def scored(self, scored: list[Scored]) -> None:
        """Make groups ready, or skip the slots of groups without signal.

        Runs in a worker thread, because it commits. Resampling is decided here, so that the replacement
        starts at once. Score and drop are one commit, so a resume does not decide again and consumes the same
        groups.
        """
        with self._changed:
            with self._ledger.batch():
                for group, prompt_id, rewards in scored:
                    self._ledger.score(group.group_id, rewards.to_json(), rewards.mean)
                    self._curriculum.note(group.slot, prompt_id, rewards.by_function)
                    self._selection.count(rewards)
                    if not self._selection.admits(group):
                        self._ledger.drop(group.group_id, "no_signal")
            self._scoring -= {group.slot for group, *_ in scored}
            self._changed.notify_all()

    def fail(self, slot: int) -> None:
        """Skip a slot whose prompt was given up."""
        with self._changed:
            self._slots.pass_over(slot, "failed")
            self._changed.notify_all()

    # --- called in the main thread --------------------------------------------------------------------------

    def take(
        self, version: int, timeout_s: float, *, is_connected: bool, on_stale: Callable[[RolloutGroup], Any]
    ) -> list[RolloutGroup] | None:
        """Return the next step's groups in slot order, or None after `timeout_s`.

        After a failed weight sync or a resume, groups may be too old for `version`. They go to `on_stale` to
        be requested again, and their slots wait.
        """
        num_groups, deadline = self._config.groups_per_step, time.monotonic() + timeout_s
        with self._changed:
            while True:
                slots = self._slots.head(num_groups)
                stale = self._pop_stale(slots or (), version)
                if slots is not None and not stale:
                    groups = self._selection.take(slots)
                    self._note_taken()
                    return groups
                for group in stale:
                    on_stale(group)
                part, now = self._current_wait(is_connected), time.monotonic()
                has_changed = self._changed.wait(max(0.0, deadline - now))
                self._waits.add(part, time.monotonic() - now)
                if not has_changed:
                    return None

    def pass_rates(self) -> PassRates | None:
        """Return the curriculum's pass rates after the last batch."""
        with self._changed:
            return self._curriculum.pass_rates(self._slots.next_to_take)

    def current_wait(self, *, is_connected: bool) -> tuple[Part, int]:
        """Return what the next batch waits for, and how many groups are being scored."""
        with self._changed:
            return self._current_wait(is_connected), len(self._scoring)

    def _note_taken(self) -> None:
        self.batch_metrics = self._selection.batch_metrics | self._waits.metrics()
        self.batch_metrics["staleness/allowed"] = float(self._lookahead.versions)
        step_s, self._taken_at = time.monotonic() - self._taken_at, time.monotonic()
        self._lookahead.note(
            waited_share=self._waits.for_groups_s / step_s,
            has_room=self._num_running() < self._max_running,
            has_spare=self._slots.head(self._config.groups_per_step) is not None,
        )
        self._waits = Waits()

    def _num_running(self) -> int:
        """Return the number of groups pending at the servers."""
        return self._slots.num_missing - len(self._scoring)

    def _current_wait(self, is_connected: bool) -> Part:
        if not is_connected:
            return "link"
        missing = [slot for slot in self._slots.next(self._config.groups_per_step) if slot not in self._slots.ready]
        if any(slot < self._slots.next_to_admit and slot not in self._scoring for slot in missing):
            return "server"
        return "reward" if any(slot in self._scoring for slot in missing) else "push"

    def _pop_stale(self, slots: Iterable[int], version: int) -> list[RolloutGroup]:
        oldest_allowed = version - self._config.staleness_bound
        stale = [slot for slot in slots if self._slots.ready[slot].oldest_version < oldest_allowed]
        return [self._slots.ready.pop(slot) for slot in stale]
