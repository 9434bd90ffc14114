"""Errors that a user may meet, under one root, printed without a traceback.

Every error message names what was received, what was expected and what to do.

    SlipstreamError
    ├── ConfigError        a key, a value or a combination of them is wrong
    ├── ProtocolError      a peer sent something that is not a valid message
    ├── HandshakeRefused   the two sides do not match (model, version, run)
    ├── DeadlineExceeded   a wait timed out; the error names the setting to raise
    ├── PushError          the server did not receive the weights completely
    │   ├── PushIncomplete     it did, but its model has other weights too
    │   └── PushInterrupted    the transfer broke off, at whichever rank
    ├── ServerLost         the server disappeared during a request; the learner waits for it
    ├── ParityError        server and learner disagree about the same tokens
    ├── DataError          prompts cannot be read or do not fit
    ├── RewardError        a reward function broke its contract
    ├── ProcessesExhausted the machine has no room for another process of user code
    ├── RankFailed         another rank of the learner has stopped
    └── RanksDisagree      the ranks of the learner are about to do different things
"""

from typing import ClassVar

USER_ERROR = 2
"""Exit code after an error that a person has to solve, so that a restart would meet it again."""
TRANSIENT_ERROR = 1
"""Exit code after an error that a restart may solve, as after a crash."""


class SlipstreamError(Exception):
    """Root of the errors that a user can resolve, as opposed to bugs."""

    exit_code: ClassVar[int] = USER_ERROR
    """Exit code of a process that ends with this error."""


class ConfigError(SlipstreamError):
    """Wrong config key, value or combination."""


class ProtocolError(SlipstreamError):
    """Bytes from a peer that are not a valid message."""


class HandshakeRefused(SlipstreamError):
    """Refusal of the learner by the server, with the values of both sides."""


class DeadlineExceeded(SlipstreamError):
    """Timeout of a wait. The error names the setting to raise."""

    exit_code = TRANSIENT_ERROR


class PushError(SlipstreamError):
    """Weight transfer that did not complete."""

    exit_code = TRANSIENT_ERROR


class PushIncomplete(PushError):
    """Transfer without some of the weights of the server's model.

    A retry would miss the same weights.
    """

    exit_code = USER_ERROR

    @classmethod
    def missing(cls, names: list[str]) -> "PushIncomplete":
        """Return an error that names the first of the missing parameters."""
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return cls(
            f"the weight sync is missing weights of the server's model: {', '.join(names[:5])}{more}. Set the "
            "same `model` on both sides; docs/models.md#which-models-run lists the models that are known to work"
        )


class PushInterrupted(PushError):
    """Transfer that broke off, perhaps at another rank.

    A side that reports it may not be the one that failed.
    """


class ServerLost(SlipstreamError):
    """Loss of the server before it answered. The caller may wait for it and retry."""

    exit_code = TRANSIENT_ERROR


class ScoringFailed(SlipstreamError):
    """Server that answered a request for logprobs with an error."""


class ParityError(SlipstreamError):
    """Different logprobs of server and learner for the same tokens and weights."""


class DataError(SlipstreamError):
    """Prompts that cannot be read, miss a column or exceed the server's limits."""


class RewardError(SlipstreamError):
    """Reward function that cannot be loaded or breaks its contract."""


class ProcessesExhausted(SlipstreamError):
    """Machine without room for another process of user code."""

    exit_code = TRANSIENT_ERROR


class RankFailed(SlipstreamError):
    """Failure of another rank of the learner, which stops this rank too."""


class RanksDisagree(SlipstreamError):
    """Ranks of the learner that are about to do different things.

    The error names the difference.
    """
