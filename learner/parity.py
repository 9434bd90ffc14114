"""Parity: server and learner must give the same logprobs to the same tokens under the same weights.

Asked right after a push, when both sides hold the same version. A wrong model, a stale LM head, a lost tensor or another
dtype shows here at once instead of as a run that silently does not learn.
"""

import random
from collections.abc import Callable

import torch

from learner.config import ParityConfig
from learner.link import ServerLink
from learner.loop_thread import LoopThread
from protocol.errors import ParityError

NUM_SEQUENCES = 4
MAX_PROMPT_TOKENS = 256
NUM_RANDOM_TOKENS = 8


class ParityProbe:
    """Fixed sequences (prompts with random tokens behind them) scored on both sides."""

    def __init__(
        self,
        prompts: list[list[int]],
        vocab_size: int,
        logprobs: Callable[[list[int]], torch.Tensor],
        link: ServerLink,
        loop: LoopThread,
        *,
        config: ParityConfig,
        dtype: str,
        timeout_s: float,
    ) -> None:
        """`logprobs` gives the learner's of a sequence, after its first token."""
        generator = random.Random(0)
        self._sequences = [
            prompt[-MAX_PROMPT_TOKENS:] + [generator.randrange(vocab_size) for _ in range(NUM_RANDOM_TOKENS)]
            for prompt in prompts[:NUM_SEQUENCES]
        ]
        self._logprobs = logprobs
        self._link, self._loop, self._timeout_s = link, loop, timeout_s
        self._bound, self._dtype = config.bound(dtype), dtype

    def measure(self, version: int) -> float:
        """Return the mean |Δ logprob| over all tokens. Raises ParityError above the bound, ServerLost."""
        assert self._link.welcome is not None
        longest = self._link.welcome.max_model_len - 1  # vLLM scores a prompt on the way to one more token
        total, count = 0.0, 0
        for sequence in (sequence[-longest:] for sequence in self._sequences):
            theirs = self._loop.call(self._link.score(sequence, self._timeout_s), self._timeout_s + 10)
            if theirs.policy_version != version:
                raise ParityError(f"the server scored with version {theirs.policy_version}, pushed was {version}")
            ours = self._logprobs(sequence)
            total += (ours - torch.from_numpy(theirs.logprobs.copy())).abs().sum().item()
            count += len(ours)
        check_mismatch(total / count, self._bound, self._dtype, "fixed sequences")
        return total / count


def check_mismatch(mean_abs_logprob: float, bound: float, dtype: str, tokens: str) -> None:
    """Raise ParityError when the mean |Δ logprob| is above the bound (or NaN)."""
    if not mean_abs_logprob <= bound:
        raise ParityError(
            f"server and learner disagree: mean |Δ logprob| of {tokens} is {mean_abs_logprob:.2g}, the bound is {bound:.2g} "
            f"for {dtype} (learner.parity.max_abs_logprob). The server may run another model, dtype or temperature, or a "
            "push did not load every tensor."
        )
