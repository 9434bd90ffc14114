"""The errors a user may meet, all under one root, so that a command can print them without a traceback.

Every message names what came, what was expected and what to do about it.

    SlipstreamError
    ├── ConfigError        a key, a value or a combination of them is wrong
    ├── ProtocolError      a peer sent something that is not a valid message
    ├── HandshakeRefused   the two sides do not fit together (model, version, run)
    ├── DeadlineExceeded   a wait ran out; the message names the knob to raise
    ├── PushError          weights did not reach the server whole
    ├── ServerLost         the server went away in the middle of a request; it is waited for
    ├── ParityError        server and learner disagree about the same tokens
    ├── DataError          prompts cannot be read or do not fit
    ├── RewardError        a reward function broke its contract
    └── RankFailed         another rank of the learner has stopped
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
