"""Curriculum: choose the prompt that each slot uses.

Without a curriculum, slot n uses the prompt at position n. With a curriculum, a slot takes the next position
that survives thinning: mostly solved and mostly failed prompts are kept with a small probability only. The
sequence itself never changes, so every position is used once or skipped once.

Invariant: pass rates count the slots below the next one to consume, in slot order, whatever the scoring
order. Each draw depends only on seed and position. A resume therefore needs only the pass rates of a
checkpoint and the ledger rows after it. At max_staleness = 0, the same run uses the same prompts. Above 0,
how far admission runs ahead depends on timing.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from learner.config import CurriculumConfig
from learner.config.rewards import ROUNDING
from learner.prompts.prompts import Prompts
from protocol.errors import DataError, RewardError


class PassRates(msgspec.Struct, frozen=True, kw_only=True):
    """State of a curriculum in a checkpoint."""

    reward: str
    """Reward function that the pass rates are based on."""
    next_slot: int
    """First slot that the pass rates do not count."""
    by_prompt: dict[int, float]


class Curriculum:
    """Next position in the sequence of prompts, and the pass rates of the prompts.

    rollout_buffer.py holds its lock around every call.
    """

    def __init__(self, config: CurriculumConfig, reward: str, prompts: Prompts, seed: int, next_position: int) -> None:
        """Create a curriculum. A group's pass rate is the mean of `reward` over the group."""
        self._config, self._reward, self._prompts, self._seed = config, reward, prompts, seed
        self.next_position = next_position
        self._noted: dict[int, tuple[int, float]] = {}
        """Prompt and pass rate of each slot whose group is scored but not yet counted."""
        self._pass_rates: dict[int, float] = {}
        """Pass rate of each prompt."""

    @property
    def is_on(self) -> bool:
        return self._config.kind != "none"

    def pass_rates(self, next_slot: int) -> PassRates | None:
        """Return a copy of the state after `count(next_slot)`; None without a curriculum."""
        if not self.is_on:
            return None
        return PassRates(reward=self._reward, next_slot=next_slot, by_prompt=dict(self._pass_rates))

    def restore(self, kept: PassRates | None) -> int:
        """Restore a saved state and return the first slot that it does not count.

        Returns 0 without a saved state, or if it belongs to another reward function.
        """
        if kept is None or kept.reward != self._reward:
            return 0
        self._pass_rates = dict(kept.by_prompt)
        return kept.next_slot

    def ask(self) -> int:
        """Return the position for the next slot. Raises DataError if no prompt is left."""
        num_dropped_in_a_row = 0
        # Every epoch is shuffled anew, so only twice its length is certain to contain a whole epoch.
        while num_dropped_in_a_row < 2 * len(self._prompts):
            position = self.next_position
            self.next_position += 1
            weight = self._config.weight(self._pass_rates.get(self._prompts.row_at(position)))
            if weight >= 1 or (weight > 0 and np.random.default_rng([self._seed, position]).random() < weight):
                return position
            num_dropped_in_a_row = num_dropped_in_a_row + 1 if weight == 0 else 0
        easy, hard = self._num_easy(), self._num_hard()
        raise DataError(
            f"the curriculum skipped a whole data epoch: of {len(self._prompts)} prompts, {easy} are too easy and "
            f"{hard} too hard to be sampled again; raise learner.curriculum.easy_weight or hard_weight above 0, or "
            "change drop_above and drop_below, then continue with --resume"
        )

    def record(self, slot: int, prompt_id: int, rewards_by_function: Mapping[str, Sequence[float | None]]) -> None:
        """Record the pass rate of a slot's group until the slot is counted.

        Raises RewardError if the pass rate is outside 0 to 1.
        """
        rewards = [reward for reward in rewards_by_function[self._reward] if reward is not None] if self.is_on else []
        if not rewards:
            return
        pass_rate = math.fsum(rewards) / len(rewards)
        if not -ROUNDING <= pass_rate <= 1 + ROUNDING:
            raise RewardError(
                f"reward function {self._reward} has a mean of {pass_rate:g} over the group of slot {slot}, but the "
                "curriculum needs pass rates from 0 to 1; set learner.curriculum.reward to a function with such "
                "rewards (with weight 0, it does not affect training)"
            )
        self._noted[slot] = (prompt_id, min(max(pass_rate, 0.0), 1.0))

    def count(self, next_slot_to_take: int) -> None:
        """Add the groups of all slots below `next_slot_to_take` to the pass rates."""
        for slot in sorted(slot for slot in self._noted if slot < next_slot_to_take):
            prompt_id, pass_rate = self._noted.pop(slot)
            before = self._pass_rates.get(prompt_id, pass_rate)
            self._pass_rates[prompt_id] = self._config.decay * before + (1 - self._config.decay) * pass_rate

    def metrics(self, num_slots: int) -> dict[str, float]:
        """Return the numbers of skipped positions, easy prompts and hard prompts.

        `num_slots` is the number of slots so far.
        """
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
