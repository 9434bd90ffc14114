"""The curriculum: which prompt the next slot asks. Between the endless sequence of prompts and admission.

Without one, slot n asks the prompt at position n. With one, a slot takes the next position whose prompt survives thinning:
a prompt that is mostly solved or mostly failed is kept with a small probability only. The sequence itself stays as it is,
so every position is asked once or skipped once.

Invariant: a prompt's pass rate is made of the slots below the next one to be consumed, in their order, whatever the order
in which they were scored; and the draw depends on seed and position alone. So the pass rates of a checkpoint and the ledger's
rows behind it are all that a resume needs, and at max_staleness = 0 the same run asks the same prompts (above it, how far
admission is ahead depends on time).
"""

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from learner.config import CurriculumConfig
from learner.prompts.prompts import Prompts
from protocol.errors import DataError, RewardError


class PassRates(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps of a curriculum."""

    reward: str
    """The function whose they are."""
    next_slot: int
    """They are made of the slots below it."""
    by_prompt: dict[int, float]


class Curriculum:
    """The next position of the sequence of prompts, and the pass rates. queue.py holds its lock around every call."""

    def __init__(self, config: CurriculumConfig, reward: str, prompts: Prompts, seed: int, next_position: int) -> None:
        """`reward`: the function whose mean over a group is its pass rate."""
        self._config, self._reward, self._prompts, self._seed = config, reward, prompts, seed
        self.next_position = next_position
        self._noted: dict[int, tuple[int, float]] = {}
        """By slot: prompt and pass rate of groups that are scored and not counted yet."""
        self._pass_rates: dict[int, float] = {}
        """By prompt."""

    @property
    def is_on(self) -> bool:
        return self._config.kind != "none"

    def pass_rates(self, next_slot: int) -> PassRates | None:
        """Return a copy of what to keep after `count(next_slot)`; None without a curriculum."""
        if not self.is_on:
            return None
        return PassRates(reward=self._reward, next_slot=next_slot, by_prompt=dict(self._pass_rates))

    def restore(self, kept: PassRates | None) -> int:
        """Take up what was kept; return the first slot whose group has still to be noted. 0: of another function, or nothing."""
        if kept is None or kept.reward != self._reward:
            return 0
        self._pass_rates = dict(kept.by_prompt)
        return kept.next_slot

    def ask(self) -> int:
        """Return the position that the next slot asks. Raises DataError if no prompt is left to ask."""
        num_dropped_in_a_row = 0
        # Epochs are shuffled anew, so twice their length is what surely holds a whole one.
        while num_dropped_in_a_row < 2 * len(self._prompts):
            position = self.next_position
            self.next_position += 1
            weight = self._config.weight(self._pass_rates.get(self._prompts.row_at(position)))
            if weight >= 1 or (weight > 0 and np.random.default_rng([self._seed, position]).random() < weight):
                return position
            num_dropped_in_a_row = num_dropped_in_a_row + 1 if weight == 0 else 0
        easy, hard = self._num_easy(), self._num_hard()
        raise DataError(
            f"the curriculum skipped a whole data epoch: of {len(self._prompts)} prompts {easy} are too easy and {hard} too hard "
            "to be asked again; add prompts, raise learner.curriculum.easy_weight or hard_weight above 0, or move drop_above "
            "and drop_below"
        )

    def note(self, slot: int, prompt_id: int, rewards_by_function: Mapping[str, Sequence[float | None]]) -> None:
        """Keep the pass rate of a slot's group until the slot is counted. Raises RewardError for one outside 0 to 1."""
        rewards = [reward for reward in rewards_by_function[self._reward] if reward is not None] if self.is_on else []
        if not rewards:
            return
        pass_rate = math.fsum(rewards) / len(rewards)
        if not 0 <= pass_rate <= 1:
            raise RewardError(
                f"reward function {self._reward} has a mean of {pass_rate:g} over the group of slot {slot}; the curriculum needs "
                "pass rates from 0 to 1: name a function with such rewards in learner.curriculum.reward (weight 0 only watches)"
            )
        self._noted[slot] = (prompt_id, pass_rate)

    def count(self, next_slot_to_take: int) -> None:
        """Let the groups of all slots below this one change their prompts' pass rates."""
        for slot in sorted(slot for slot in self._noted if slot < next_slot_to_take):
            prompt_id, pass_rate = self._noted.pop(slot)
            before = self._pass_rates.get(prompt_id, pass_rate)
            self._pass_rates[prompt_id] = self._config.decay * before + (1 - self._config.decay) * pass_rate

    def metrics(self, num_slots: int) -> dict[str, float]:
        """Return how many positions `num_slots` slots have skipped, and how many prompts are easy and hard now."""
        if not self.is_on:
            return {}
        return {
            "curriculum/skipped": float(self.next_position - num_slots),
            "curriculum/easy": float(self._num_easy()),
            "curriculum/hard": float(self._num_hard()),
        }

    def _num_easy(self) -> int:
        return sum(pass_rate > self._config.easy_above for pass_rate in self._pass_rates.values())

    def _num_hard(self) -> int:
        return sum(pass_rate < self._config.hard_below for pass_rate in self._pass_rates.values())
