"""Groups and scores: what is asked of the policy, and what it answers."""

from typing import Annotated, Literal

import msgspec
import numpy as np

from protocol.messages.parts import Message, Name, Part, Seconds, Size, Version, check_array

MAX_STOPS, MAX_STOP_LENGTH = 16, 256
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_LENGTH)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the completions of a group are sampled."""

    num_completions: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    """Completion i is sampled with seed + i."""
    stop_token_ids: tuple[int, ...] = ()
    stop: Annotated[tuple[StopString, ...], msgspec.Meta(max_length=MAX_STOPS)] = ()
    """A completion ends with the token that completes one of these texts, and keeps it."""


class Generate(Message):
    """Ask for one group. Sent again with the same id it is neither generated twice nor answered twice on one connection."""

    group_id: Name
    prompt_token_ids: np.ndarray
    sampling: Sampling
    deadline_s: Seconds
    """Longest time without a token once it has had its first. Time in which nothing may be generated does not count."""
    salt: Name = ""
    """Whose keys and values may be used again: the salt of the group with which an episode began, in each of its later turns.
    Empty: those of the policy that the server has now."""

    def __post_init__(self) -> None:
        check_array(self.prompt_token_ids, "int32", "prompt_token_ids")


class Completion(Part):
    """One completion with the logprobs of the policy that sampled it.

    Example: token_ids=[7, 3, 1], behaviour_logprobs=[-0.2, -1.1, -0.1], versions=[(4, 2), (5, 1)], finish_reason="stop":
    two tokens sampled by policy version 4, one by version 5.
    """

    token_ids: np.ndarray
    behaviour_logprobs: np.ndarray
    versions: list[tuple[Version, int]]
    finish_reason: Literal["stop", "length"]

    def __post_init__(self) -> None:
        check_array(self.token_ids, "int32", "token_ids")
        check_array(self.behaviour_logprobs, "float32", "behaviour_logprobs")
        num_tokens = len(self.token_ids)
        if len(self.behaviour_logprobs) != num_tokens:
            raise ValueError(f"{num_tokens} token ids but {len(self.behaviour_logprobs)} behaviour logprobs")
        num_covered, fewest = 0, 1
        for _, count in self.versions:  # a group has dozens: any() and sum() would take longer than all other checks
            num_covered, fewest = num_covered + count, min(fewest, count)
        if num_covered != num_tokens or fewest < 1:
            raise ValueError(f"versions {self.versions} do not cover {num_tokens} tokens")

    @property
    def oldest_version(self) -> int:
        return min(version for version, _ in self.versions)


class Group(Message):
    """All completions of one prompt."""

    group_id: Name
    entered_version: int
    """The policy version when the group entered the engine; its prompt's keys and values may be as old."""
    completions: list[Completion]
    server_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """From the request's arrival to the last token. 0: from before a server that says so."""
    salt: Name = ""
    """What its keys and values are kept under, of no other server and no other push; empty: from before a server that says so."""
    num_cached_tokens: Size = 0
    """Of its prompt, those whose keys and values were there already."""

    @property
    def oldest_version(self) -> int:
        return min(completion.oldest_version for completion in self.completions if completion.versions)


class GroupFailed(Message):
    """The group will not come; sent again only if `retryable`.

    "draining": the server ends and has not begun with it; it is asked of another, or of the next one, and nothing has failed.
    """

    group_id: Name
    code: Literal["invalid_prompt", "deadline", "engine_error", "not_ready", "draining"]
    message: str
    retryable: bool


class Ack(Message):
    """The learner has the groups in its ledger; the server may forget them."""

    group_ids: list[str]


class Cancel(Message):
    """The learner no longer wants these groups."""

    group_ids: list[str]


class Score(Message):
    """Ask for the logprobs the server's policy gives to a fixed token sequence."""

    request_id: Name
    token_ids: np.ndarray
    deadline_s: Seconds
    replica: Size = 0
    """Which of Welcome.num_replicas is to give them, counted from 0."""

    def __post_init__(self) -> None:
        check_array(self.token_ids, "int32", "token_ids")


class Scores(Message):
    """`logprobs[i]` belongs to `token_ids[i + 1]`; `error` is set instead when scoring failed.

    The version is None while the server has its model's own weights.
    """

    request_id: Name
    logprobs: np.ndarray
    policy_version: Version | None
    error: str | None = None

    def __post_init__(self) -> None:
        check_array(self.logprobs, "float32", "logprobs")
