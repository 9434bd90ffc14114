"""An independent implementation of the loss, from the papers: per token, in plain Python with 50-digit arithmetic.

Terms with a gradient are computed from the logprobs `moved`, which are passed separately; terms under a stop-gradient
(sg) use those of the completion. A derivative is a difference quotient over `moved`, exact to thirty digits.

M is the set of a completion's tokens with a finite behavior logprob. All sums are over M.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import mpmath

from learner.config import KlConfig, LossConfig, OffPolicyCorrectionConfig

mpf = mpmath.mpf
STEP = mpf(10) ** -20
DIGITS = 50
MAX_NATS = mpf(20)

DEFAULTS: dict[str, dict[str, float]] = {
    "grpo": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},  # verl's dual clip; DAPO, arXiv 2503.14476
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": 3.0},  # GSPO, arXiv 2507.18071
    "gmpo": {"clip_low": 0.4, "clip_high": 0.4, "dual_clip": 3.0},  # GMPO, arXiv 2507.20673
    "cispo": {"clip_high": 4.0},  # MiniMax-M1, arXiv 2506.13585
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},  # SAPO, arXiv 2511.20347
    "dppo": {
        "tv_low": 0.2,
        "tv_high": 0.2,
        "log_ratio_penalty": 1e-3,
        "dual_clip": 3.0,
    },  # prime-rl: DPPO's TV mask, Kimi K2.5's penalty
    "vespo": {  # VESPO, arXiv 2602.10693: k and lambda
        "power_positive": 2.0,
        "decay_positive": 3.0,
        "power_negative": 3.0,
        "decay_negative": 2.0,
    },
    "ipo": {"tv_low": 0.3, "tv_high": 0.3, "log_ratio_penalty": 0.0, "dual_clip": 3.0},  # prime-rl pull request 3586
    "clip_cov": {  # Clip-Cov, arXiv 2505.22617
        "clip_low": 0.2,
        "clip_high": 0.2,
        "dual_clip": 3.0,
        "cov_frac": 2e-4,
        "cov_low": 1.0,
        "cov_high": 5.0,
    },
    "kl_cov": {"cov_frac": 2e-4, "cov_penalty": 1.0, "dual_clip": 3.0},  # KL-Cov, arXiv 2505.22617
    "reinforce": {},
}


class Token(NamedTuple):
    logprob: float
    behavior: float
    staleness: int = 0
    proximal: float | None = None
    reference: float | None = None
    entropy: float = 0.0
    carries_policy: bool = True
    picked: bool = False


class Completion(NamedTuple):
    advantage: float
    weight: float
    tokens: tuple[Token, ...]

    @property
    def finite(self) -> list[Token]:
        """M."""
        return [token for token in self.tokens if math.isfinite(token.behavior)]

    @property
    def logprobs(self) -> list:
        return [mpf(token.logprob) for token in self.finite]


class Rule(NamedTuple):
    """The config, and the current KL coefficient."""

    loss: LossConfig = LossConfig()
    off_policy_correction: OffPolicyCorrectionConfig = OffPolicyCorrectionConfig()
    kl: KlConfig = KlConfig()
    kl_coef: float = 0.0

    def bound(self, name: str):
        value = getattr(self.loss, name)
        return mpf(DEFAULTS[self.loss.objective].get(name, math.nan) if value is None else value)


def clamp(value, low=-MAX_NATS, high=MAX_NATS):
    return low if value < low else high if value > high else value


def log_ratio(above, below):
    """Return log(above / below), clamped to ±20 nats."""
    return clamp(mpf(above) - below)


def anchor(correction: OffPolicyCorrectionConfig, token: Token):
    """Return the logprob of the policy in the denominator of the objective's ratio.

    log_linear (A-3PO, arXiv 2512.06547): the staler a token, the closer to the current policy.
    """
    if correction.anchor != "proximal":
        return mpf(token.behavior)
    if correction.proximal == "log_linear":
        share = mpf(token.staleness) / (token.staleness + 1)
        return mpf(token.behavior) + share * (mpf(token.logprob) - mpf(token.behavior))
    return mpf(token.logprob if token.proximal is None else token.proximal)


def objectives(rule: Rule, completion: Completion, moved: Sequence) -> list:
    """Return the loss of each token before corrections."""
    tokens, advantage = completion.finite, mpf(completion.advantage)
    anchors = [anchor(rule.off_policy_correction, token) for token in tokens]
    log_ratios = [log_ratio(p, o) for p, o in zip(moved, anchors, strict=True)]
    match rule.loss.objective:
        case "grpo":
            return [clipped(rule, mpmath.exp(x), advantage) for x in log_ratios]
        case "gspo":
            mean = sum(log_ratios) / max(len(tokens), 1)
            return [clipped(rule, mpmath.exp(mean), advantage)] * len(tokens)
        case "cispo":
            held = [
                min(mpmath.exp(log_ratio(t.logprob, o)), 1 + rule.bound("clip_high"))
                for t, o in zip(tokens, anchors, strict=True)
            ]
            return [-ratio * advantage * p for ratio, p in zip(held, moved, strict=True)]
        case "sapo":
            tau = rule.bound("tau_positive" if advantage > 0 else "tau_negative")
            return [-4 / tau / (1 + mpmath.exp(-tau * (mpmath.exp(x) - 1))) * advantage for x in log_ratios]
        case "dppo":
            inside = [not binds for binds in binding(rule, completion)]
            penalty = rule.bound("log_ratio_penalty")
            bound = rule.bound("dual_clip") if advantage < 0 else mpmath.inf
            pairs = zip(log_ratios, inside, strict=True)
            return [
                penalty * x**2 - min(mpmath.exp(x), bound) * advantage * (ok or mpmath.exp(x) > bound)
                for x, ok in pairs
            ]
        case "ipo":
            inside, penalty = [not is_far for is_far in moved_far(rule, completion)], rule.bound("log_ratio_penalty")
            losses = [
                -floored(rule, mpmath.exp(x) * advantage * ok, advantage)
                for x, ok in zip(log_ratios, inside, strict=True)
            ]
            return [loss + penalty * x**2 for loss, x in zip(losses, log_ratios, strict=True)]
        case "gmpo":
            high, low = rule.bound("clip_high"), -rule.bound("clip_low")
            bounded = [min(x, high) if advantage > 0 else max(x, low) for x in log_ratios]
            mean = sum(bounded) / max(len(tokens), 1)
            return [-floored(rule, mpmath.exp(mean) * advantage, advantage)] * len(tokens)
        case "vespo":
            return [-taper(rule, completion)[1] * advantage * p for p in moved]
        case "clip_cov":
            return [
                clipped(rule, mpmath.exp(x), advantage) * (not t.picked)
                for x, t in zip(log_ratios, tokens, strict=True)
            ]
        case "kl_cov":
            penalty = rule.bound("cov_penalty")
            losses = [-floored(rule, mpmath.exp(x) * advantage, advantage) for x in log_ratios]
            return [loss + penalty * abs(x) * t.picked for loss, x, t in zip(losses, log_ratios, tokens, strict=True)]
        case "reinforce":
            return [-advantage * p for p in moved]


def taper(rule: Rule, completion: Completion) -> tuple:
    """Return the importance weight w of a completion, and VESPO's phi(w) = w^k exp(lambda (1 - w))."""
    logs = [log_ratio(t.logprob, anchor(rule.off_policy_correction, t)) for t in completion.finite]
    log_w = clamp(sum(logs, mpf(0)))
    sign = "positive" if completion.advantage >= 0 else "negative"
    power, decay, w = rule.bound(f"power_{sign}"), rule.bound(f"decay_{sign}"), mpmath.exp(log_w)
    return w, mpmath.exp(power * log_w + decay * (1 - w))


def moved_far(rule: Rule, completion: Completion) -> list[bool]:
    """Return for each token whether its probability left IPO's band. A token without an advantage has no gradient."""
    moves = [
        mpmath.exp(t.logprob) - mpmath.exp(mpf(t.logprob) - log_ratio(t.logprob, anchor(rule.off_policy_correction, t)))
        for t in completion.finite
    ]
    return [completion.advantage != 0 and not -rule.bound("tv_low") <= move <= rule.bound("tv_high") for move in moves]


def clipped(rule: Rule, ratio, advantage):
    """Apply PPO's clip, arXiv 1707.06347, and the dual clip for negative advantages, arXiv 1912.09729."""
    bounded = clamp(ratio, 1 - rule.bound("clip_low"), 1 + rule.bound("clip_high"))
    return -floored(rule, min(ratio * advantage, bounded * advantage), advantage)


def floored(rule: Rule, objective, advantage):
    return max(objective, rule.bound("dual_clip") * advantage) if advantage < 0 else objective


def binding(rule: Rule, completion: Completion) -> list[bool]:
    """Return for each token whether a bound of the objective changes its gradient."""
    tokens, advantage = completion.finite, completion.advantage
    anchors = [anchor(rule.off_policy_correction, token) for token in tokens]
    log_ratios = [log_ratio(token.logprob, o) for token, o in zip(tokens, anchors, strict=True)]
    if rule.loss.objective == "gspo":
        log_ratios = [sum(log_ratios) / max(len(tokens), 1)] * len(tokens)
    ratios = [mpmath.exp(x) for x in log_ratios]
    above = [completion.advantage < 0 and ratio > rule.bound("dual_clip") for ratio in ratios]
    match rule.loss.objective:
        case "grpo" | "gspo" | "clip_cov":
            too_high = [ratio > 1 + rule.bound("clip_high") for ratio in ratios]
            too_low = [ratio < 1 - rule.bound("clip_low") for ratio in ratios]
            if advantage < 0:
                too_low = [low or high for low, high in zip(too_low, above, strict=True)]
            held = too_high if advantage > 0 else too_low if advantage < 0 else [False] * len(tokens)
            is_cov = rule.loss.objective == "clip_cov"
            return [h or (is_cov and t.picked) for h, t in zip(held, tokens, strict=True)]
        case "gmpo":
            if advantage > 0:
                return [x > rule.bound("clip_high") for x in log_ratios]
            low = -rule.bound("clip_low")
            mean = sum((max(x, low) for x in log_ratios), mpf(0)) / max(len(tokens), 1)
            is_floored = advantage < 0 and mpmath.exp(mean) > rule.bound("dual_clip")
            return [advantage < 0 and (x < low or is_floored) for x in log_ratios]
        case "vespo":
            w, phi = taper(rule, completion)
            return [advantage != 0 and phi < w / 2] * len(tokens)
        case "ipo":
            far = moved_far(rule, completion)
            return [is_far or high for is_far, high in zip(far, above, strict=True)]
        case "kl_cov":
            return above
        case "cispo":
            return [advantage != 0 and ratio > 1 + rule.bound("clip_high") for ratio in ratios]
        case "dppo":
            now = [mpmath.exp(token.logprob) for token in tokens]
            rises = [p - mpmath.exp(t.logprob - x) for p, t, x in zip(now, tokens, log_ratios, strict=True)]
            if advantage > 0:
                return [rise > rule.bound("tv_high") for rise in rises]
            fallen = [-rise > rule.bound("tv_low") for rise in rises]
            return [advantage < 0 and (fell or high) for fell, high in zip(fallen, above, strict=True)]
        case "sapo":  # a soft bound: half of the gradient is lost
            tau = rule.bound("tau_positive" if advantage > 0 else "tau_negative")
            gates = [1 / (1 + mpmath.exp(-tau * (ratio - 1))) for ratio in ratios]
            return [advantage != 0 and 4 * gate * (1 - gate) < 0.5 for gate in gates]
        case "reinforce":
            return [False] * len(tokens)


def corrected(rule: Rule, completion: Completion) -> list:
    """Return the logprobs of the policy that the correction compares with behavior: the current or the proximal one."""
    is_proximal = rule.off_policy_correction.anchor == "proximal"
    return [anchor(rule.off_policy_correction, t) if is_proximal else mpf(t.logprob) for t in completion.finite]


def importance_weights(rule: Rule, completion: Completion) -> list:
    """Return policy / behavior of each token, or the value of its completion."""
    policy = corrected(rule, completion)
    logs = [log_ratio(q, t.behavior) for q, t in zip(policy, completion.finite, strict=True)]
    if rule.off_policy_correction.weighted_completions == "negative" and completion.advantage >= 0:
        return [mpf(1)] * len(logs)  # TOPR, arXiv 2503.14286
    match rule.off_policy_correction.granularity:
        case "token":
            return [mpmath.exp(x) for x in logs]
        case "sequence":
            return [mpmath.exp(clamp(sum(logs)))] * len(logs)
        case "geometric":
            return [mpmath.exp(clamp(sum(logs) / max(len(logs), 1)))] * len(logs)


def far_apart(rule: Rule, completion: Completion) -> list[bool]:
    """Return for each token whether KPop leaves it out: a KL between two coins, in either direction.

    The probability of the other side is at least 1e-12, as a logprob of 0 or above leaves none.
    """
    bound = rule.off_policy_correction.max_binary_kl
    if bound is None:
        return [False] * len(completion.finite)

    def kl(p, q):
        rest_p, rest_q = (max(1 - mpmath.exp(x), mpf(10) ** -12) for x in (p, q))
        return mpmath.exp(p) * clamp(p - q) + rest_p * mpmath.log(rest_p / rest_q)

    pairs = [(q, mpf(t.behavior)) for q, t in zip(corrected(rule, completion), completion.finite, strict=True)]
    return [max(kl(p, q), kl(q, p)) > bound for p, q in pairs]


def outside(rule: Rule, completion: Completion) -> list[bool]:
    """Return for each token whether its importance weight or its binary KL is outside the bounds."""
    correction, far = rule.off_policy_correction, far_apart(rule, completion)
    if correction.weight in ("auto", "none"):
        return far
    high = 2.0 if correction.max_weight is None else correction.max_weight
    low = -math.inf if correction.min_weight is None else correction.min_weight
    weights = importance_weights(rule, completion)
    return [not low <= w <= high or is_far for w, is_far in zip(weights, far, strict=True)]


def is_stale(rule: Rule, token: Token) -> bool:
    return (
        rule.off_policy_correction.max_token_staleness is not None
        and token.staleness > rule.off_policy_correction.max_token_staleness
    )


def multipliers(rule: Rule, completion: Completion) -> list:
    """Return the factor of the corrections for each token."""
    correction, tokens = rule.off_policy_correction, completion.finite
    factors = [mpf(1)] * len(tokens)
    if correction.weight not in ("auto", "none"):
        weights = importance_weights(rule, completion)
        high = mpf(2.0 if correction.max_weight is None else correction.max_weight)
        if correction.weight == "truncate":
            low = mpf(0.0 if correction.min_weight is None else correction.min_weight)
            factors = [clamp(w, low, high) for w in weights]
        else:
            is_weighed = correction.anchor == "proximal" or rule.loss.objective == "reinforce"
            out = outside(rule, completion)
            factors = [mpf(0) if o else w if is_weighed else mpf(1) for w, o in zip(weights, out, strict=True)]
    factors = [mpf(0) if far else factor for factor, far in zip(factors, far_apart(rule, completion), strict=True)]
    if correction.sequence_mask is not None and completion.advantage < 0:  # DeepSeek-V3.2, arXiv 2512.02556, equation 9
        drift = sum(mpf(t.behavior) - mpf(t.logprob) for t in tokens) / max(len(tokens), 1)
        factors = [factor * (drift <= correction.sequence_mask) for factor in factors]
    stale = [mpf(correction.stale_token_weight) if is_stale(rule, t) else mpf(1) for t in tokens]
    return [f * s * t.carries_policy for f, s, t in zip(factors, stale, tokens, strict=True)]


def kl_estimate(estimator: str, reference, logprob, held):
    """Return Schulman's estimators (joschu.net/blog/kl-approx.html). k3_grad_k2 has k3's value and k2's gradient."""
    d, fixed = log_ratio(reference, logprob), log_ratio(reference, held)
    k2, k3 = d**2 / 2, mpmath.exp(d) - d - 1
    return {"k1": -d, "k2": k2, "k3": k3, "k3_grad_k2": mpmath.exp(fixed) - fixed - 1 + k2 - fixed**2 / 2}[estimator]


def terms(rule: Rule, completion: Completion) -> list:
    """Return the contribution of each token of M to the loss."""
    return _terms(rule, completion, multipliers(rule, completion), completion.logprobs)


def _terms(rule: Rule, completion: Completion, factors: Sequence, moved: Sequence) -> list:
    losses = objectives(rule, completion, moved)
    totals = [factor * loss for factor, loss in zip(factors, losses, strict=True)]
    for i, (token, p) in enumerate(zip(completion.finite, moved, strict=True)):
        if token.reference is not None and rule.kl.place == "loss":
            estimate = kl_estimate(rule.kl.estimator_used, token.reference, p, token.logprob)
            weight = mpmath.exp(log_ratio(p, token.behavior)) if rule.kl.importance_weighted else 1
            totals[i] += mpf(rule.kl_coef) * weight * estimate
        totals[i] -= mpf(rule.loss.entropy_coef) * mpf(token.entropy)
    return [mpf(completion.weight) * total for total in totals]


def gradient(rule: Rule, completion: Completion) -> list:
    """Return the derivative of the completion's loss by the logprob of each token; 0 outside M."""
    held, logprobs = multipliers(rule, completion), completion.logprobs

    def derivative(i: int):
        shifted = ([*logprobs[:i], logprobs[i] + h, *logprobs[i + 1 :]] for h in (STEP, -STEP))
        above, below = (sum(_terms(rule, completion, held, moved)) for moved in shifted)
        return (above - below) / (2 * STEP)

    inside = itertools.count()
    return [derivative(next(inside)) if math.isfinite(t.behavior) else mpf(0) for t in completion.tokens]


def sums(rule: Rule, completions: Sequence[Completion]) -> dict[str, float]:
    """Return the sums over M that are reported with the loss."""

    def total(of: Callable[[Completion], Sequence]) -> float:
        return float(sum(sum(map(mpf, of(completion))) for completion in completions))

    def drifts(completion: Completion) -> list:
        return [log_ratio(token.logprob, token.behavior) for token in completion.finite]

    def policy_part(completion: Completion) -> list:
        losses = objectives(rule, completion, completion.logprobs)
        return [completion.weight * m * x for m, x in zip(multipliers(rule, completion), losses, strict=True)]

    def clips(completion: Completion) -> list[bool]:
        pairs = zip(binding(rule, completion), multipliers(rule, completion), strict=True)
        return [binds and multiplier != 0 for binds, multiplier in pairs]

    found = {
        "tokens": total(lambda c: [1] * len(c.finite)),
        "loss": total(policy_part),
        "clipped": total(clips),
        "behavior_kl": total(lambda c: [mpmath.exp(x) - x - 1 for x in drifts(c)]),
        "ratio": total(lambda c: [mpmath.exp(x) for x in drifts(c)]),
        "ratio_squared": total(lambda c: [mpmath.exp(2 * x) for x in drifts(c)]),
        "kept": total(lambda c: [multiplier != 0 for multiplier in multipliers(rule, c)]),
        "bounded": total(lambda c: outside(rule, c)),
    }
    if rule.off_policy_correction.max_token_staleness is not None:
        found["stale"] = total(lambda c: [is_stale(rule, token) for token in c.finite])
    if any(token.reference is not None for completion in completions for token in completion.tokens):
        measured = "k3"  # independent of the penalty
        found["reference_kl"] = total(
            lambda c: [kl_estimate(measured, t.reference, t.logprob, t.logprob) for t in c.finite]
        )
    return found
