"""Messages about groups and scores: requests to the policy, and its results."""

from typing import Annotated, Literal

import msgspec
import numpy as np

from protocol.messages.parts import Message, Name, Part, Seconds, Size, Version, check_array, check_experts

MAX_STOPS, MAX_STOP_LENGTH = 16, 256
StopString = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_STOP_LENGTH)]


class Sampling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sampling parameters of a group."""

    num_completions: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    """Seed of completion 0. Completion i is sampled with seed + i."""
    stop_token_ids: tuple[int, ...] = ()
    stop: Annotated[tuple[StopString, ...], msgspec.Meta(max_length=MAX_STOPS)] = ()
    """Texts that end a completion. The token that completes one of them is kept as the last token."""


class Generate(Message, omit_defaults=True):
    """Request for one group.

    A request resent with the same id is generated once, and answered once per connection.
    """

    group_id: Name
    prompt_token_ids: np.ndarray
    sampling: Sampling
    deadline_s: Seconds
    """Maximum time without a token after the first token, in seconds. Time in which generation is not
    possible does not count."""
    salt: Name = ""
    """Salt of the KV cache that may be reused. In later turns of an episode, it is the salt of the first
    turn's group. Empty: only the KV cache of the server's current policy."""
    experts_from: Size | None = None
    """Number of leading prompt tokens whose routed experts the learner has. The answer has those of all later
    tokens. None: the answer has none."""

    def __post_init__(self) -> None:
        check_array(self.prompt_token_ids, "int32", "prompt_token_ids")


class Completion(Part, omit_defaults=True):
    """Completion with the logprobs of the policy that sampled it.

    Example: token_ids=[7, 3, 1], behavior_logprobs=[-0.2, -1.1, -0.1], versions=[(4, 2), (5, 1)],
    finish_reason="stop" is two tokens sampled by policy version 4, and one by version 5.
    """

    token_ids: np.ndarray
    behavior_logprobs: np.ndarray = msgspec.field(name="behaviour_logprobs")  # as ledgers of earlier releases spell it
    versions: list[tuple[Version, int]]
    finish_reason: Literal["stop", "length"]
    experts: np.ndarray | None = None
    """Routed experts of each token but the last, which has passed through no layer: ids by token, layer and rank
    of the choice. Dense layers have zeros. None: not requested."""

    def __post_init__(self) -> None:
        check_array(self.token_ids, "int32", "token_ids")
        check_array(self.behavior_logprobs, "float32", "behavior_logprobs")
        num_tokens = len(self.token_ids)
        if len(self.behavior_logprobs) != num_tokens:
            raise ValueError(f"{num_tokens} token ids but {len(self.behavior_logprobs)} behavior logprobs")
        num_covered, fewest = 0, 1
        # A group has dozens of completions: any() and sum() would take longer than all other checks.
        for _, count in self.versions:
            num_covered, fewest = num_covered + count, min(fewest, count)
        if num_covered != num_tokens or fewest < 1:
            raise ValueError(f"versions {self.versions} do not cover {num_tokens} tokens")
        if self.experts is not None:
            check_experts(self.experts, "experts")
            if len(self.experts) != max(0, num_tokens - 1):
                raise ValueError(
                    f"routed experts of {len(self.experts)} tokens, expected all but the last of {num_tokens}"
                )

    @property
    def oldest_version(self) -> int:
        return min(version for version, _ in self.versions)


class Group(Message, omit_defaults=True):
    """Completions of one prompt."""

    group_id: Name
    entered_version: int
    """Policy version when the group entered the engine. The KV cache of its prompt may be as old."""
    completions: list[Completion]
    server_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    """Time from the arrival of the request to the last token, in seconds. 0: from an older server, which does
    not report it."""
    salt: Name = ""
    """Salt under which the group's KV cache is kept, unique to a server and a weight sync. Empty: from an
    older server, which does not report it."""
    num_cached_tokens: Size = 0
    """Number of prompt tokens whose KV cache existed already."""
    prompt_experts: np.ndarray | None = None
    """Routed experts of the prompt's tokens from `experts_from` on, as one of the completions has computed them.
    None: not requested."""

    def __post_init__(self) -> None:
        if self.prompt_experts is not None:
            check_experts(self.prompt_experts, "prompt_experts")

    @property
    def oldest_version(self) -> int:
        return min(completion.oldest_version for completion in self.completions if completion.versions)


class GroupFailed(Message):
    """Failure of a group, which is requested again only if `retryable`.

    The code "draining" does not count as a failure: the server shuts down and will not complete the group.
    The learner requests the group from another server, or from the next one.
    """

    group_id: Name
    code: Literal["invalid_prompt", "deadline", "engine_error", "not_ready", "draining"]
    message: str
    retryable: bool


class Ack(Message):
    """Confirmation that the groups are in the learner's ledger.

    The server may delete them.
    """

    group_ids: list[str]


class Cancel(Message):
    """Cancellation of groups that the learner no longer needs."""

    group_ids: list[str]


class Score(Message):
    """Request for the logprobs that the server's policy gives to fixed tokens."""

    request_id: Name
    token_ids: np.ndarray
    deadline_s: Seconds
    replica: Size = 0
    """Replica that computes the logprobs, counted from 0 and below Welcome.num_replicas."""

    def __post_init__(self) -> None:
        check_array(self.token_ids, "int32", "token_ids")


class Scores(Message):
    """Result of a Score: `logprobs[i]` belongs to `token_ids[i + 1]`.

    If scoring failed, `error` is set instead. The version is None while the server has the model's own
    weights.
    """

    request_id: Name
    logprobs: np.ndarray
    policy_version: Version | None
    error: str | None = None

    def __post_init__(self) -> None:
        check_array(self.logprobs, "float32", "logprobs")
