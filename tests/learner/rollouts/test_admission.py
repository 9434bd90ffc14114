"""The admission rule bounds staleness whatever the timing: whole runs played out with random orders, drops and resumes."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.config import DataConfig, LearnerConfig, RewardConfig
from learner.environments.episode import TokenSequence
from learner.rollouts.rollout_group import RolloutGroup
from learner.rollouts.selection import Selection
from learner.rollouts.slot_order import PassedOver, SlotOrder, num_places_allowed


def group(slot: int, version: int, *, signal: bool) -> RolloutGroup:
    completion = TokenSequence(
        token_ids=np.ones(1, np.int32), behaviour_logprobs=np.zeros(1, np.float32), versions=[(version, 1)], finish_reason="stop"
    )  # fmt: skip
    rewards = [0.0, 1.0] if signal else [1.0, 1.0]
    return RolloutGroup(
        group_id=f"{slot}.0", slot=slot, prompt_token_ids=np.ones(1, np.int32), completions=[completion] * 2,
        rewards_G=rewards, rewards_by_function={"f": rewards}, entered_version=version,
    )  # fmt: skip


class Play:
    """Rollouts without a server: the real rule, slots and selection; what comes when is up to the test."""

    def __init__(self, config: LearnerConfig) -> None:
        self.config, self.version, self.checkpoint = config, 0, 0
        self.running: list[int] = []
        self.unsent: list[int] = []
        self.sent_at: dict[int, int] = {}
        self.passed_over: dict[int, PassedOver] = {}
        self.consumed: list[list[RolloutGroup]] = []
        self.staleness: list[int] = []
        self.replaced: list[float] = []
        self.ready: dict[int, RolloutGroup] = {}
        self.restart(SlotOrder(0, 0, {}))

    def restart(self, slots: SlotOrder) -> None:
        self.slots, self.selection = slots, Selection(self.config)

    @property
    def num_allowed(self) -> int:
        config = self.config
        return num_places_allowed(
            version=self.version,
            max_staleness=config.max_staleness,
            groups_per_step=config.groups_per_step,
            total_groups=config.steps * config.groups_per_step,
        )

    def admit(self) -> None:
        for _ in range(self.slots.num_new(self.num_allowed)):
            self.unsent.append(self.slots.next_to_admit)
            self.slots.next_to_admit += 1
        for slot in [slot for slot in self.unsent if self.slots.consumption_index(slot) < self.num_allowed]:
            self.unsent.remove(slot)
            self.running.append(slot)
            self.sent_at[slot] = self.version

    def finish(self, slot: int, outcome: str) -> None:
        self.running.remove(slot)
        if outcome == "failed":
            self.slots.pass_over(slot, "failed")
            self.passed_over[slot] = "failed"
            return
        scored = group(slot, self.sent_at[slot], signal=outcome == "signal")
        if self.selection.accepts(scored, self.slots.num_replaced_with(slot, self.config.groups_per_step)):
            self.ready[slot] = scored
        else:
            self.slots.pass_over(slot, "no_signal")
            self.passed_over[slot] = "no_signal"

    def step(self) -> bool:
        head = self.slots.next(self.config.groups_per_step)
        if not self.ready.keys() >= set(head):
            return False
        num_replaced = self.slots.num_replaced_with(head[-1], len(head))
        self.slots.advance(head[-1] + 1)
        self.consumed.append([self.ready.pop(slot) for slot in head])
        metrics = self.selection.metrics_of(self.consumed[-1], num_replaced)
        self.staleness += [self.version - self.sent_at[slot] for slot in head]
        self.replaced.append(metrics["batch/replaced_groups"])
        self.version += 1
        return True

    def resume(self) -> None:
        """From the checkpoint: later batches are ready again, what was running has to be sent again."""
        back = [one for batch in self.consumed[self.checkpoint :] for one in batch]
        del self.consumed[self.checkpoint :]
        self.version = self.checkpoint
        next_to_take = self.consumed[-1][-1].slot + 1 if self.consumed else 0
        slots = SlotOrder(self.slots.next_to_admit, next_to_take, self.passed_over)
        self.ready |= {one.slot: one for one in back}
        self.unsent = sorted(self.unsent + self.running)
        self.running = []
        self.restart(slots)

    def check(self) -> None:
        config = self.config
        num_accepted = len(self.ready) + sum(len(batch) for batch in self.consumed)
        num_places = num_accepted + len(self.running) + len(self.unsent)
        assert num_places + len(self.passed_over) == self.slots.next_to_admit
        assert max(self.staleness, default=0) <= config.max_staleness
        places = [self.slots.consumption_index(slot) for slot in self.running]
        assert all(place < self.num_allowed for place in places)


@settings(deadline=None)
@given(
    max_staleness=st.integers(0, 4),
    groups_per_step=st.integers(1, 4),
    num_steps=st.integers(1, 8),
    max_resamples=st.integers(1, 3),
    with_resumes=st.booleans(),
    choices=st.lists(st.tuples(st.integers(0, 19), st.integers(0, 10**6)), max_size=300),
)
def test_the_bound_holds_and_nothing_stands_still_whatever_comes_when_and_whatever_is_dropped(
    max_staleness, groups_per_step, num_steps, max_resamples, with_resumes, choices
) -> None:
    play = Play(
        LearnerConfig(
            data=DataConfig(task="reverse"), reward=RewardConfig(functions=("f",)), steps=num_steps,
            groups_per_step=groups_per_step, max_staleness=max_staleness, dynamic_sampling=True,
            max_resamples=max_resamples,
        )
    )  # fmt: skip
    for event, choice in choices:
        play.admit()
        if not with_resumes:
            places = len(play.running) + len(play.ready) + sum(len(batch) for batch in play.consumed)
            assert places <= play.num_allowed, "running + accepted stays within the rule"
        if event < 4:
            play.step()
        elif event == 4 and with_resumes:
            play.resume()
        elif event == 5:
            play.checkpoint = play.version
        elif play.running:
            outcome = "failed" if event == 6 else "none" if event < 15 else "signal"
            play.finish(play.running[choice % len(play.running)], outcome)
        play.check()
    while play.version < num_steps:  # a run that goes on always ends
        play.admit()
        play.step() or play.finish(play.running[-1], "none")
        play.check()
    assert [len(batch) for batch in play.consumed] == [groups_per_step] * num_steps
    slots = [one.slot for batch in play.consumed for one in batch]
    assert slots == sorted(set(slots))


@settings(deadline=None)
@given(order=st.randoms(use_true_random=False), num_steps=st.integers(1, 5), max_staleness=st.integers(0, 3))
def test_in_a_run_without_any_signal_every_step_replaces_what_it_may_and_ends(order, num_steps, max_staleness) -> None:
    play = Play(
        LearnerConfig(
            data=DataConfig(task="reverse"), reward=RewardConfig(functions=("f",)), steps=num_steps, groups_per_step=3,
            max_staleness=max_staleness, dynamic_sampling=True, max_resamples=2,
        )
    )  # fmt: skip
    num_finished = 0
    while play.version < num_steps:
        play.admit()
        if not play.step():
            play.finish(order.choice(play.running), "none")
            num_finished += 1
    if max_staleness == 0:
        assert play.replaced == [6.0] * num_steps
        assert num_finished == (6 + 3) * num_steps
    assert num_finished <= (6 * (max_staleness + 1) + 3) * num_steps


def test_a_slot_sent_again_after_a_resume_waits_for_its_own_place_whatever_was_replaced_behind_it() -> None:
    play = Play(
        LearnerConfig(
            data=DataConfig(task="reverse"), reward=RewardConfig(functions=("f",)), steps=5, groups_per_step=2,
            max_staleness=1, dynamic_sampling=True,
        )
    )  # fmt: skip
    play.admit()
    for slot in (0, 1):
        play.finish(slot, "signal")
    assert play.step()
    play.admit()
    play.finish(5, "none")
    play.admit()
    assert sorted(play.running) == [2, 3, 4, 6]
    play.resume()
    play.admit()
    assert sorted(play.running) == [2, 3], "slot 4 is consumed at version 2, so it must not be sent at version 0"
    assert play.step()
    play.admit()
    assert sorted(play.running) == [2, 3, 4, 6]


def test_the_rule_lets_the_server_run_ahead_exactly_as_far_as_allowed() -> None:
    def allowed(version: int) -> int:
        return num_places_allowed(version=version, max_staleness=2, groups_per_step=4, total_groups=100)

    assert [allowed(version=0), allowed(version=3), allowed(version=50)] == [12, 24, 100]
    slots = SlotOrder(next_to_admit=12, next_to_take=0, passed_over={3: "failed", 7: "no_signal"})
    assert slots.num_new(12) == 2
    assert [slots.consumption_index(slot) for slot in (3, 4, 7, 8, 12)] == [3, 3, 6, 6, 10]


def test_replaced_groups_are_counted_for_the_step_that_replaces_them() -> None:
    slots = SlotOrder(
        next_to_admit=12, next_to_take=2, passed_over={2: "no_signal", 4: "failed", 5: "no_signal", 8: "no_signal"}
    )
    # Two groups a step: slots 3 and 6 make one, 7 and 9 the next.
    assert [slots.num_replaced_with(slot, 2) for slot in range(2, 12)] == [2, 2, 2, 2, 2, 1, 1, 1, 0, 0]
