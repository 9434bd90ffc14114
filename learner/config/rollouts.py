"""Config of the sampling of completions."""

from learner.config.section import AtLeastOne, Section, Share, require
from protocol.messages import MAX_STOP_LENGTH, MAX_STOPS


class SamplingConfig(Section):
    """Sampling of completions."""

    group_size: int = 8
    """Number of completions per prompt, the size of a group."""
    max_tokens: AtLeastOne[int] = 512
    """Maximum number of tokens of a completion. A completion that reaches it is truncated and counted."""
    temperature: float = 1.0
    """Sampling temperature. The learner applies it to its logits too."""
    top_p: Share[float] = 1.0
    """Total probability of the likeliest tokens to sample from. Below 1: only with allow_partial_support."""
    top_k: int = 0
    """Number of likeliest tokens to sample from. 0: all tokens; above 0: only with allow_partial_support."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion, such as "</answer>". The completion keeps the tokens up to the one that
    completes such a text."""
    allow_partial_support: bool = False
    """Whether to train on completions sampled with top_p or top_k, although their logprobs are not those of
    the whole distribution."""
    seeded: bool = False
    """Whether to sample every completion with its own seed, which makes runs reproducible. Slower on GPUs."""

    def unmet_needs(self) -> dict[str, str]:
        return {} if self._is_partial else {"allow_partial_support": "top_p below 1 or top_k above 0"}

    def check(self) -> None:
        require(
            self.group_size >= 2,
            f"group_size = {self.group_size} must be at least 2, because a single completion has no baseline",
        )
        require(
            0.01 <= self.temperature <= 2,
            f"temperature = {self.temperature} must be between 0.01 (below it, vLLM samples greedily) and 2",
        )
        require(
            len(self.stop) <= MAX_STOPS and all(0 < len(text) <= MAX_STOP_LENGTH for text in self.stop),
            f"stop = {self.stop} must be at most {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters",
        )
        require(self.top_k >= 0, f"top_k = {self.top_k} must not be negative; 0 samples from all tokens")
        require(
            self.allow_partial_support or not self._is_partial,
            f"top_p = {self.top_p}, top_k = {self.top_k}: the server's logprobs would be those of the truncated "
            "distribution and the learner's those of the whole one, so every importance ratio would be too small "
            "(TRL measured a mean of 0.90 at top_p = 0.8). Set top_p = 1 and top_k = 0, or allow_partial_support = "
            "true to train anyway",
        )

    @property
    def _is_partial(self) -> bool:
        return self.top_p < 1 or self.top_k > 0
