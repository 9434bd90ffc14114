"""Warnings about signs of off-policy divergence in the metrics of a step, on rank 0.

The bounds are rules of thumb (verl's rollout correction, issue threads of TRL and prime-rl). Runs have
collapsed above them, and rarely do below.
"""

import logging

log = logging.getLogger(__name__)

ADVICE = "lower max_staleness or the learning rate, or set learner.off_policy_correction"


class HealthMonitor:
    """Monitor that logs a sign once when it appears, not again while it lasts."""

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def watch(self, step: int, metrics: dict[str, float]) -> None:
        """Log the signs that this step shows and the previous step did not."""
        signs = unhealthy(metrics)
        for name in signs.keys() - self._shown:
            log.warning("step %d: %s", step, signs[name])
        self._shown = set(signs)


def unhealthy(metrics: dict[str, float]) -> dict[str, str]:
    """Return a description of each metric that is out of bounds, by metric name."""
    signs = {}
    ratio_mean = metrics.get("policy/ratio_mean", 1.0)
    if not 0.5 <= ratio_mean <= 2:
        signs["policy/ratio_mean"] = (
            f"the mean ratio to the behavior policy is {ratio_mean:.2f}, outside 0.5 to 2; {ADVICE}"
        )
    if (ess := metrics.get("policy/ess", 1.0)) < 0.3:
        signs["policy/ess"] = f"the effective sample size is {ess:.0%} of the tokens, below 30 %; {ADVICE}"
    if (mismatch := metrics.get("policy/behaviour_kl", 0.0)) > 0.1:
        signs["policy/behaviour_kl"] = (
            f"the KL between behavior and current policy is {mismatch:.2f} nats per token, above 0.1; {ADVICE}"
        )
    if (clipped := metrics.get("loss/clipped_frac", 0.0)) > 0.25:
        signs["loss/clipped_frac"] = f"{clipped:.0%} of the tokens are clipped, above 25 %; {ADVICE}"
    share, multiplier = metrics.get("loss/max_token_share", 0.0), metrics.get("loss/max_token_multiplier", 1.0)
    if share > 0.1 and multiplier > 3:  # the share alone may be large where few completions have an advantage
        signs["loss/max_token_share"] = (
            f"one token makes up {share:.0%} of an update's gradient, {multiplier:.3g} times its share by advantage "
            'alone; lower learner.loss.dual_clip, or set learner.off_policy_correction.weight = "mask"'
        )
    kept = metrics.get("loss/kept_frac", 1.0)
    by_length = {f"q{q}": metrics.get(f"loss/kept_frac_length_q{q}", kept) for q in range(1, 5)}
    if kept > 0 and min(by_length.values()) < kept / 2:
        shares = ", ".join(f"{share:.0%}" for share in by_length.values())
        signs["loss/kept_frac"] = (
            f"the objective excludes completions by length: it keeps {shares} of the tokens of completions up to a "
            "quarter, a half, three quarters and all of max_tokens; check the masks of learner.off_policy_correction "
            "(try granularity = "
            '"geometric") and top_entropy_frac'
        )
    return signs
