"""The errors a user may meet, all under one root, so that a command can print them without a traceback.

Every message names what came, what was expected and what to do about it.

    SlipstreamError
    ├── ConfigError        a key, a value or a combination of them is wrong
    ├── ProtocolError      a peer sent something that is not a valid message
    ├── HandshakeRefused   the two sides do not fit together (model, version, run)
    ├── DeadlineExceeded   a wait ran out; the message names the knob to raise
    ├── PushError          weights did not reach the server whole
    │   └── PushIncomplete     they did, but they are not all that the server's model has
    ├── ServerLost         the server went away in the middle of a request; it is waited for
    ├── ParityError        server and learner disagree about the same tokens
    ├── DataError          prompts cannot be read or do not fit
    ├── RewardError        a reward function broke its contract
    ├── RankFailed         another rank of the learner has stopped
    └── RanksDisagree      the ranks of the learner are about to do different things
"""


class SlipstreamError(Exception):
    """Root of every error that is the user's to solve rather than ours to debug."""


class ConfigError(SlipstreamError):
    """A config key, value or combination is wrong."""


class ProtocolError(SlipstreamError):
    """A peer sent bytes that are not a valid message."""


class HandshakeRefused(SlipstreamError):
    """The server refused the learner; the message carries both sides' values."""


class DeadlineExceeded(SlipstreamError):
    """A wait ran out of time; the message names the knob to raise."""


class PushError(SlipstreamError):
    """A weight transfer did not complete."""


class PushIncomplete(PushError):
    """Not all weights of the server's model were among those that came, and pushed again they would not be either."""

    @classmethod
    def lacking(cls, names: list[str]) -> "PushIncomplete":
        """With the first of the parameters that are missing."""
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        return cls(
            f"the push did not bring all weights of the server's model: {', '.join(names[:5])}{more} did not come. Give both sides "
            "the same `model`; learner/README.md#which-models-run says what is known to work"
        )


class ServerLost(SlipstreamError):
    """The server went away before it answered; whoever asked may wait for it and ask again."""


class ParityError(SlipstreamError):
    """Server and learner give different logprobs to the same tokens under the same weights."""


class DataError(SlipstreamError):
    """Prompts cannot be read, lack a column or do not fit the server's limits."""


class RewardError(SlipstreamError):
    """A reward function cannot be loaded or broke its contract."""


class RankFailed(SlipstreamError):
    """Another rank of the learner has stopped with an error, so this one stops too."""


class RanksDisagree(SlipstreamError):
    """The ranks of the learner are about to do different things; the message says in what they differ."""
