"""Why the server refuses: a learner with another model or version, and counts of all that it refused."""

import logging
import time
from collections import Counter

from protocol.channel.liveness import Failure
from protocol.messages import PROTOCOL_VERSION, Hello, ModelFingerprint

log = logging.getLogger(__name__)
LOG_INTERVAL_S = 60.0


def why_mismatched(hello: Hello, model: ModelFingerprint) -> str | None:
    """Return why a learner does not match the server's model or version, or None if it does."""
    its = hello.model
    if hello.protocol_version != PROTOCOL_VERSION:
        return (
            f"the learner has protocol version {hello.protocol_version}, the server {PROTOCOL_VERSION}; "
            "install the same slipstream-rl on both sides"
        )
    if not hello.only_scores:
        if its == model:
            return None
        return (
            f"the learner's model is {_describe(its)}, the server's {_describe(model)}; start both with the same "
            "`model` in the config"
        )
    if its.tokenizer_hash != model.tokenizer_hash:
        return (
            f"the tokenizer of the learner's model ({_describe(its)}) is not that of the server's "
            f"({_describe(model)}), so token ids would not mean the same; serve a reference with the same tokenizer "
            "files"
        )
    if its.vocab_size > model.vocab_size:
        return (
            f"the vocabulary of the learner's model has {its.vocab_size} tokens, that of the server's "
            f"{model.vocab_size}, so it could not score all that the policy samples; serve a reference with at least "
            f"{its.vocab_size} tokens"
        )
    return None


def _describe(model: ModelFingerprint) -> str:
    return f"{model.architecture} of {model.size} with {model.vocab_size} tokens, tokenizer {model.tokenizer_hash}"


class Refusals:
    """Counters and logs of refused messages and failed handshakes.

    A peer that sends malformed messages fills neither the memory nor the log.
    """

    def __init__(self) -> None:
        self.num_messages = self.num_handshakes = 0
        self._messages: Counter[str] = Counter()
        self._handshakes: Counter[str] = Counter()
        self._example = ""
        self._logged_at = -LOG_INTERVAL_S

    def message(self, cause: str, example: str = "") -> None:
        """Count a refused message.

        `cause` takes one of few values. `example` describes the newest message.
        """
        self.num_messages += 1
        self._messages[cause] += 1
        if example:
            self._example = f"; latest: {example}"

    def handshakes(self, failures: Counter[Failure]) -> None:
        self.num_handshakes += failures.total()
        self._handshakes += Counter({failure.value: count for failure, count in failures.items()})

    def log_counts(self) -> None:
        """Log the counts since the last log line, at most once a minute."""
        if not (self._messages or self._handshakes) or time.monotonic() - self._logged_at < LOG_INTERVAL_S:
            return
        if self._handshakes:
            counts = ", ".join(f"{count} with {cause}" for cause, count in self._handshakes.most_common())
            log.warning("connections failed in the handshake: %s (SECURITY.md)", counts)
        if self._messages:
            counts = ", ".join(f"{count} {cause}" for cause, count in self._messages.most_common())
            log.warning("refused messages: %s%s (SECURITY.md)", counts, self._example)
        self._messages.clear()
        self._handshakes.clear()
        self._example = ""
        self._logged_at = time.monotonic()
