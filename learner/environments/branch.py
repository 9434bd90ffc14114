"""A branch: the tokens of an episode in one sequence, of the policy and of what answers it. Between the rollouts and the batch.

    prompt ▸ turn ▸ answer ▸ turn ▸ …    one branch as long as each turn's prompt extends, token for token, what was recorded;
                                         otherwise the next turn begins a branch of its own, behind a prompt of its own

A plain completion is a branch of one turn. Invariant: a token that the policy did not sample has no version, and so no part in any
loss, logprob, KL or count; it is only seen by the tokens after it.
"""

import numpy as np

from protocol.messages import Completion, Part
from protocol.messages.parts import Version, check_array

UNKNOWN_VERSION = -1
"""Of groups from before a restart: a version that is trained again may have other weights under the same number."""


class Branch(Part, frozen=True):
    """What follows a prompt in one sequence.

    Example: token_ids=[7, 3, 9, 1], behaviour_logprobs=[-0.2, -1.1, 0, -0.1], versions=[(4, 2), (None, 1), (5, 1)]: a turn of two
    tokens sampled by policy version 4, one token of an environment, a turn of one token sampled by version 5.
    """

    token_ids: np.ndarray
    behaviour_logprobs: np.ndarray
    """0 where nothing was sampled."""
    versions: list[tuple[Version | None, int]]
    """Runs of tokens by the version that sampled them; None: the policy did not."""
    finish_reason: str
    """"length": the episode was cut off."""
    prompt_token_ids: np.ndarray | None = None
    """None: the group's prompt."""

    def __post_init__(self) -> None:
        check_array(self.token_ids, "int32", "token_ids")
        check_array(self.behaviour_logprobs, "float32", "behaviour_logprobs")
        covered = sum(count for _, count in self.versions)
        if not len(self.token_ids) == len(self.behaviour_logprobs) == covered:
            raise ValueError(
                f"{len(self.token_ids)} token ids, {len(self.behaviour_logprobs)} behaviour logprobs and versions of {covered} tokens"
            )

    @classmethod
    def of(cls, completion: Completion) -> "Branch":
        """A plain completion as a branch: the policy has sampled all of it."""
        return cls(
            token_ids=completion.token_ids,
            behaviour_logprobs=completion.behaviour_logprobs,
            versions=list(completion.versions),
            finish_reason=completion.finish_reason,
        )

    @property
    def versions_T(self) -> np.ndarray:
        """The version of each token; UNKNOWN_VERSION where nothing was sampled."""
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
