"""Push after push into a server that is full of running sequences, and what each sampled token should have been.

Every token has a version, by its completion's label, and an age: the pushes that the first keys and values of its
sequence have lived through.
"""

from collections import defaultdict
from collections.abc import Iterator

import msgspec
import numpy as np

from protocol.messages import Ack, Completion, Group, PushDone
from tests.inference_server.drifting_policy import DriftingPolicy
from tests.inference_server.scripted_learner import ScriptedLearner

NUM_GROUPS = 64
NUM_COMPLETIONS = 8
FLAGS = ("--server.max-concurrent-sequences", "64")
"""Most of what is asked for waits inside the engine: a group that ends leaves no gap, however long a push takes."""
BUCKET_BYTES = 32 << 10
"""About a layer."""


class Load:
    """Groups in flight, whose lengths differ so that they do not all end at once."""

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


async def push_under_load(
    learner: ScriptedLearner, policy: DriftingPolicy, prompt: list[int], num_pushes: int, num_groups: int = NUM_GROUPS
) -> tuple[list[Completion], list[PushDone]]:
    """Push versions 0 to `num_pushes`, all but the first under load; return what was sampled and what the pushes took."""
    load, done = Load(learner, prompt), []
    for version in range(num_pushes + 1):
        if version == 0:
            outcome, checksum = await learner.push(version, policy.tensors(version), BUCKET_BYTES)
            for _ in range(num_groups):
                await load.ask()
        else:
            outcome, checksum = await learner.push_again(version, policy.tensors(version))
        assert isinstance(outcome, PushDone), outcome.message
        assert (outcome.version, outcome.checksum) == (version, checksum)
        done.append(outcome)
        # One more group each time, and whatever has ended during the push.
        num_ended = 1 + sum(isinstance(message, Group) for message in learner.unread)
        for _ in range(num_ended):
            await load.take()
            await load.ask()
    for _ in range(num_groups):
        await load.take()
    return load.completions, done


def num_pushes_that_cut(completions: list[Completion]) -> int:
    """Return how many pushes found a sequence running."""
    return len({version for completion in completions for version, _ in completion.versions[1:]})


class Tokens(msgspec.Struct, frozen=True):
    """One entry per sampled token."""

    age_N: np.ndarray
    error_N: np.ndarray
    """|Δ logprob| to the forward pass of all tokens before it under the version of its label."""
    neighbour_error_N: np.ndarray
    """The same under the version before, or after for the first: what a label that is off by one would give."""


def judge(policy: DriftingPolicy, prompt: list[int], completions: list[Completion]) -> Tokens:
    """Compare the behaviour logprobs with forward passes, one per version."""
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
            errors.append(np.abs(completion.behaviour_logprobs - truth[version, index])[at])
            neighbour_errors.append(np.abs(completion.behaviour_logprobs - truth[neighbour(version), index])[at])
    return Tokens(np.concatenate(ages), np.concatenate(errors), np.concatenate(neighbour_errors))


def neighbour(version: int) -> int:
    return version - 1 if version else 1


def spans(completion: Completion) -> Iterator[tuple[int, slice]]:
    start = 0
    for version, num_tokens in completion.versions:
        yield version, slice(start, start + num_tokens)
        start += num_tokens


def table_by_age(tokens: Tokens) -> str:
    """Return the mismatch by age, for people."""
    lines = ["pushes lived through | tokens | mean |Δ logprob| | largest"]
    for age in np.unique(tokens.age_N):
        error_n = tokens.error_N[tokens.age_N == age]
        lines.append(f"{age:20d} | {len(error_n):6d} | {error_n.mean():16.2e} | {error_n.max():.2e}")
    return "\n".join(lines)
