"""Branches: an episode's tokens in sequence, from the policy and its environment.

    prompt ▸ turn ▸ answer ▸ turn ▸ …    one branch while each turn's prompt extends the recorded tokens,
                                         otherwise the next turn starts a branch with its own prompt

This sits between the rollouts and the batch. A plain completion is a branch of one turn.
Invariant: a token that the policy did not sample has no version, so it is in no loss, logprob, KL or count.
Only later tokens attend to it.
"""

import numpy as np

from protocol.messages import Completion, Part
from protocol.messages.parts import Version, check_array

UNKNOWN_VERSION = -1
"""Version of groups from before a restart.

A version that is trained again may have other weights under the same number.
"""


class TokenSequence(Part, frozen=True):
    """Tokens after a prompt in one sequence.

    Example: token_ids=[7, 3, 9, 1], behaviour_logprobs=[-0.2, -1.1, 0, -0.1], versions=[(4, 2), (None, 1),
    (5, 1)]. Policy version 4 sampled a turn of two tokens. One token of an environment follows, then a turn
    of one token by version 5.
    """

    token_ids: np.ndarray
    behaviour_logprobs: np.ndarray
    """Behavior logprobs, 0 for tokens that were not sampled."""
    versions: list[tuple[Version | None, int]]
    """Runs of tokens, each with the version that sampled it. None: the policy did not sample it."""
    finish_reason: str
    """Reason for the end. "length": the episode was cut off."""
    prompt_token_ids: np.ndarray | None = None
    """The branch's own prompt. None: the group's prompt."""

    def __post_init__(self) -> None:
        check_array(self.token_ids, "int32", "token_ids")
        check_array(self.behaviour_logprobs, "float32", "behaviour_logprobs")
        covered = sum(count for _, count in self.versions)
        if not len(self.token_ids) == len(self.behaviour_logprobs) == covered:
            raise ValueError(
                f"{len(self.token_ids)} token ids, {len(self.behaviour_logprobs)} behavior logprobs and versions of "
                f"{covered} tokens; expected the same number of each"
            )

    @classmethod
    def of(cls, completion: Completion) -> "TokenSequence":
        """Return a plain completion as a branch, all of which the policy sampled."""
        return cls(
            token_ids=completion.token_ids,
            behaviour_logprobs=completion.behaviour_logprobs,
            versions=list(completion.versions),
            finish_reason=completion.finish_reason,
        )

    @property
    def versions_T(self) -> np.ndarray:
        """The version of each token, or UNKNOWN_VERSION if it was not sampled."""
        versions = [UNKNOWN_VERSION if version is None else version for version, _ in self.versions]
        return np.repeat(versions, [count for _, count in self.versions])

    @property
    def is_sampled_T(self) -> np.ndarray:
        return np.repeat([version is not None for version, _ in self.versions], [count for _, count in self.versions])

    @property
    def num_sampled(self) -> int:
        return sum(count for version, count in self.versions if version is not None)

    @property
    def sampled_versions(self) -> list[int]:
        return [version for version, _ in self.versions if version is not None]
