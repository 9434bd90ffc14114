"""Repeated pushes into a server full of running sequences, and the expected logprob of each sampled token.

Every token has a version, from its completion's label, and an age: the number of pushes since the start of its
sequence's KV cache.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np

from protocol.messages import Ack, Completion, Group, PushDone
from tests.inference_server.drifting_policy import DriftingPolicy
from tests.inference_server.real_server import TOLERANCE
from tests.inference_server.scripted_learner import ScriptedLearner

NUM_GROUPS = 64
NUM_COMPLETIONS = 8
FLAGS = ("--server.max-concurrent-sequences", "64")
"""Few enough that groups wait in the engine, so that a finished group leaves no gap."""
BUCKET_BYTES = 32 << 10
"""About one layer."""
SCORED = [2 + index * 7 % 30 for index in range(60)]


class Load:
    """Groups in flight with different lengths, so that they end at different times."""

    def __init__(self, learner: ScriptedLearner, prompt: list[int]) -> None:
        self._learner, self._prompt = learner, prompt
        self._num_asked = 0
        self.completions: list[Completion] = []

    async def ask(self) -> None:
        max_tokens = 20 + 7 * self._num_asked % 21
        await self._learner.generate(
            f"load {self._num_asked}", self._prompt, num_completions=NUM_COMPLETIONS, max_tokens=max_tokens
        )
        self._num_asked += 1

    async def take(self) -> None:
        group = await self._learner.receive(Group)
        await self._learner.send(Ack(group_ids=[group.group_id]))
        self.completions += group.completions


async def push(
    learner: ScriptedLearner, policy: DriftingPolicy, version: int, bucket_bytes: int = BUCKET_BYTES, *,
    again: bool = False, wire: Literal["dense", "delta"] = "dense",
) -> PushDone:  # fmt: skip
    """Push a version of the policy in a new session, or in the current one with `again`."""
    tensors = policy.sent(version, again=again)
    if again:
        outcome, checksum = await learner.push_again(version, tensors)
    else:
        outcome, checksum = await learner.push(version, tensors, bucket_bytes, wire, policy.adapter)
    assert isinstance(outcome, PushDone), outcome.message
    assert (outcome.version, outcome.checksum) == (version, checksum)
    return outcome


async def assert_serves(learner: ScriptedLearner, policy: DriftingPolicy, version: int, num_replicas: int = 1) -> None:
    """Check that every replica reports the version and scores with exactly its weights."""
    expected, other = (policy.logprobs(each, [SCORED])[0] for each in (version, version + 1))
    for replica in range(num_replicas):
        scores = await learner.score(SCORED, replica=replica)
        assert (scores.error, scores.policy_version) == (None, version), replica
        np.testing.assert_allclose(scores.logprobs, expected, atol=TOLERANCE, err_msg=f"replica {replica}")
        assert np.abs(scores.logprobs - other).max() > 100 * TOLERANCE


async def push_under_load(
    learner: ScriptedLearner, policy: DriftingPolicy, prompt: list[int], num_pushes: int, num_groups: int = NUM_GROUPS
) -> list[Completion]:
    """Push versions 0 to `num_pushes`, all but the first under load. Return the sampled completions."""
    load = Load(learner, prompt)
    for version in range(num_pushes + 1):
        await push(learner, policy, version, again=version > 0)
        if version == 0:
            for _ in range(num_groups):
                await load.ask()
        # One more group each time, and one for each group that ended during the push.
        num_ended = 1 + sum(isinstance(message, Group) for message in learner.unread)
        for _ in range(num_ended):
            await load.take()
            await load.ask()
    for _ in range(num_groups):
        await load.take()
    return load.completions


def num_pushes_that_cut(completions: list[Completion]) -> int:
    """Return the number of pushes during a running sequence."""
    return len({version for completion in completions for version, _ in completion.versions[1:]})


class Tokens(msgspec.Struct, frozen=True):
    """Errors and ages, with one entry per sampled token."""

    age_N: np.ndarray
    error_N: np.ndarray
    """|Δ logprob| to the forward pass with the version of the label."""
    neighbour_error_N: np.ndarray
    """|Δ logprob| with the previous version, or the next for the first: the error of a label that is off by one."""


def judge(policy: DriftingPolicy, prompt: list[int], completions: list[Completion]) -> Tokens:
    """Compare the behavior logprobs with forward passes, one per version."""
    wanted: dict[int, set[int]] = defaultdict(set)
    for index, completion in enumerate(completions):
        for version, _ in completion.versions:
            wanted[version].add(index)
            wanted[neighbour(version)].add(index)
    truth: dict[tuple[int, int], np.ndarray] = {}
    for version, indices in wanted.items():
        sequences = [prompt + completions[index].token_ids.tolist() for index in indices]
        for index, logprobs in zip(indices, policy.logprobs(version, sequences), strict=True):
            truth[version, index] = logprobs[len(prompt) - 1 :]
    ages, errors, neighbour_errors = [], [], []
    for index, completion in enumerate(completions):
        for version, at in spans(completion):
            ages.append(np.full(at.stop - at.start, version - completion.versions[0][0]))
            errors.append(np.abs(completion.behavior_logprobs - truth[version, index])[at])
            neighbour_errors.append(np.abs(completion.behavior_logprobs - truth[neighbour(version), index])[at])
    return Tokens(np.concatenate(ages), np.concatenate(errors), np.concatenate(neighbour_errors))


def neighbour(version: int) -> int:
    return version - 1 if version else 1


def spans(completion: Completion) -> Iterator[tuple[int, slice]]:
    start = 0
    for version, num_tokens in completion.versions:
        yield version, slice(start, start + num_tokens)
        start += num_tokens
