"""The rates of a run's parts: all that a simulation knows of models and hardware.

    flags, or a run directory (measured.py) ─▶ Rates ─▶ simulation.py

Invariant: pure. Every formula that models hardware is in this file and has a line in `ASSUMPTIONS`.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from protocol.errors import ConfigError

BISECTIONS = 60
BENT_BY = (0.02, 50.0)
MEAN_TOLERANCE = 0.01


class Lengths(msgspec.Struct, frozen=True, kw_only=True):
    """Completion lengths in tokens: measured quantiles, interpolated to fit the mean."""

    p10: float
    p50: float
    p90: float
    mean: float
    max: float
    """`max_tokens` of the sampling, or the longest completion seen."""
    truncated_frac: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.p10 <= self.p50 <= self.p90 <= self.max or not 0 <= self.truncated_frac <= 1:
            raise ValueError(
                f"completion lengths p10 {self.p10:g}, p50 {self.p50:g}, p90 {self.p90:g}, max {self.max:g}, truncated "
                f"{self.truncated_frac:g}: expected 1 ≤ p10 ≤ p50 ≤ p90 ≤ max, and a share between 0 and 1"
            )

    def sampler(self) -> "LengthSampler":
        return LengthSampler(self)


class LengthSampler:
    """Sampler of completion lengths.

    Raises:
        ConfigError: The quantiles cannot have the mean.
    """

    def __init__(self, lengths: Lengths) -> None:
        self._lengths = lengths
        least = lengths.max if lengths.p10 == lengths.max else 1.0
        points = {0.0: least, 0.1: lengths.p10, 0.5: lengths.p50, 0.9: lengths.p90}
        not_truncated = 1 - lengths.truncated_frac
        kept = {share: tokens for share, tokens in points.items() if share < not_truncated}
        self._shares = np.array([*kept, not_truncated, 1.0 + 1e-9])
        self._tokens = np.array([*kept.values(), lengths.max, lengths.max])
        self._power = self._bend()

    def draw(self, rng: np.random.Generator, num: int) -> np.ndarray:
        """Draw `num` lengths in whole tokens, each at least 1."""
        return self._quantiles(rng.random(num), self._power)

    def _quantiles(self, shares: np.ndarray, power: float) -> np.ndarray:
        i = np.searchsorted(self._shares, shares, side="right") - 1
        fraction = (shares - self._shares[i]) / (self._shares[i + 1] - self._shares[i])
        low, high = self._tokens[i], self._tokens[i + 1]
        return np.maximum(1.0, np.rint(low + (high - low) * fraction**power))

    def _bend(self) -> float:
        """Return the exponent for interpolation between quantiles, found by bisection."""
        shares = (np.arange(10_000) + 0.5) / 10_000
        low, high = BENT_BY
        for _ in range(BISECTIONS):
            middle = (low * high) ** 0.5
            is_too_long = self._quantiles(shares, middle).mean() > self._lengths.mean
            low, high = (middle, high) if is_too_long else (low, middle)
        mean = self._quantiles(shares, low).mean()
        if abs(mean - self._lengths.mean) > max(MEAN_TOLERANCE * self._lengths.mean, 0.5):
            raise ConfigError(
                f"a mean completion length of {self._lengths.mean:g} does not fit {self._lengths}: the nearest is "
                f"{mean:.1f}"
            )
        return low


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of the parts of a run, in seconds."""

    lengths: Lengths
    decode_step_s: float
    """Fixed time of one decoding step of a server, for any number of sequences."""
    decode_token_s: float
    """Additional time of a decoding step for each running sequence."""
    score_s: float = 0.0
    """Time from a group's arrival until it is scored and in the ledger."""
    learner_step_s: float = 0.0
    """Fixed time of an optimizer step.

    Includes bookkeeping and the copy that an overlapped weight sync sends.
    """
    learner_token_s: float
    """Additional time for each completion token on one rank, with the prompt's cost."""
    learner_sync_s: float = 0.0
    """Additional time of each step with several ranks: the gradient reduction."""
    weight_sync_s: float = 0.0
    """Fixed time of a weight sync for any number of servers: pause, load, check."""
    weight_sync_feed_s: float = 0.0
    """Additional time for each server. The learner sends the weights to all of them through its one link."""
    weight_sync_stall_s: float = 0.0
    """Time in a weight sync during which no server generates, without the transfer."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__[1:]:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} = {getattr(self, name)} must not be negative")
        if self.decode_step_s + self.decode_token_s <= 0 or self.learner_step_s + self.learner_token_s <= 0:
            raise ValueError("decoding and training take no time; set a rate of each above 0")

    def decode_s(self, num_running: int) -> float:
        """Return the time of a decoding step, which gives each running sequence a token."""
        return self.decode_step_s + self.decode_token_s * num_running

    def train_s(self, num_tokens: float, longest: float, num_ranks: int) -> float:
        """Return the time of an optimizer step. Ranks divide groups but not completions."""
        of_fullest = max(num_tokens / num_ranks, min(longest, num_tokens))
        sync_s = self.learner_sync_s if num_ranks > 1 else 0.0
        return self.learner_step_s + sync_s + self.learner_token_s * of_fullest

    def weight_sync_seconds(self, num_servers: float) -> float:
        return self.weight_sync_s + self.weight_sync_feed_s * num_servers

    def stall_seconds(self, num_servers: float, *, overlap_weight_loading: bool) -> float:
        """Return the time at the end of a weight sync during which no server generates."""
        feed_s = 0.0 if overlap_weight_loading else self.weight_sync_feed_s * num_servers
        return min(self.weight_sync_seconds(num_servers), self.weight_sync_stall_s + feed_s)


ASSUMPTIONS = (
    "a decoding step takes a + b · (running sequences) s, including prefill: tokens/s rise with the sequences, up to "
    "1/b",
    "completion lengths depend neither on the group, nor on each other, nor on the policy version",
    "m ranks divide a step's tokens evenly, down to single completions: c + d · tokens / m s, plus a constant for "
    "several",
    "a weight sync takes e + f · servers s: one learner sends to all servers at once through one link, and all servers "
    "resume when the last one is done",
    "steps differ only in their tokens, and checkpoints take as long as in the measured run",
    "servers are identical, and a group goes to the server with the fewest groups; links and reward workers are never "
    "the bottleneck",
)


def decode_rate(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit `decode_step_s` and `decode_token_s` to (running sequences, tokens/s) pairs.

    The model is: seconds of a step = decode_step_s + decode_token_s · running.

    Raises:
        ConfigError: There are fewer than two different numbers of sequences, or a value is out of range.
    """
    if len({running for running, _ in points}) < 2 or any(running < 1 or rate <= 0 for running, rate in points):
        given = " ".join(f"{running:g}:{rate:g}" for running, rate in points)
        raise ConfigError(
            f"--decode {given}: expected the tokens/s of one server at two or more numbers of running sequences, each "
            "at least 1, such as --decode 1:90 256:7200"
        )
    running = np.array([running for running, _ in points])
    step_s = running / np.array([rate for _, rate in points])
    weights = 1 / step_s  # least squares on the relative error
    (base_s, token_s), *_ = np.linalg.lstsq(np.stack([weights, weights * running], 1), weights * step_s, rcond=None)
    if base_s < 0 or token_s < 0:
        base_s, token_s = (0.0, float(np.mean(step_s / running))) if base_s < 0 else (float(np.mean(step_s)), 0.0)
    return float(base_s), float(token_s)
