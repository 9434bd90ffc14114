"""What the noise that the self-test measured means for the run, in words: a table, the bounds, what is wrong.

After self_test.py. Invariant: every problem says what was measured, what was expected and what to do; causes come first.
"""

import msgspec

from learner.checkup.noise_floor import TRUSTED_RATIO, Bound, Floor

SMALLEST_MARGIN = 10.0
"""A bound that is fewer times the noise away acts on the noise."""

NOISE_OF = {
    "token": "|ratio - 1| of a token",
    "sequence": "|ratio - 1| of a completion",
    "geometric": "|ratio - 1| of a completion's geometric mean",
    "probability": "difference of a token's probabilities",
}


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What the self-test found, and what of the run it is to be compared with."""

    dtype: str
    objective: str
    temperature: float
    parity_bound: float
    num_not_finite: int
    fresh: Floor | None
    through_push: Floor | None
    """Of completions that were in the engine during a push; None: there were none."""
    bounds: list[Bound]
    at_temperature_1: Floor | None = None
    """Of all tokens, had they been sampled at temperature 1; only where they do not fit the run's own temperature."""

    @property
    def columns(self) -> dict[str, Floor]:
        columns = {"fresh": self.fresh, "through a push": self.through_push}
        return {name: tokens for name, tokens in columns.items() if tokens is not None}

    @property
    def disagreeing(self) -> dict[str, Floor]:
        """The columns whose mean |Δ logprob| is above the bound of the parity check (or NaN)."""
        return {name: tokens for name, tokens in self.columns.items() if not self.is_close(tokens)}

    def is_close(self, tokens: Floor) -> bool:
        return tokens.abs_logprob_mean <= self.parity_bound


def problems(measured: Measured) -> list[str]:
    """Return what is wrong; empty: both sides agree, and nothing in the run acts on the noise that is left."""
    found = _disagreements(measured)
    if measured.num_not_finite:
        found.append(
            f"{measured.num_not_finite} tokens have a logprob that is no number on one of the two sides, and the loss would "
            'leave them out; look for inf or NaN in the weights, try dtype = "float32"'
        )
    for name, tokens in measured.columns.items():
        if tokens.clipped_frac > 0:
            found.append(
                f"{tokens.clipped_frac:.2%} of the tokens ({name}) are clipped by {measured.objective} although nothing was "
                'learned; widen the bounds in learner.loss, or set dtype = "float32" on both sides'
            )
    for bound in measured.bounds:
        if bound.distance < SMALLEST_MARGIN * bound.noise:
            found.append(
                f"learner.{bound.key} = {bound.value:g} is only {bound.distance / bound.noise:.1f} times the noise (mean "
                f"{NOISE_OF[bound.level]}: {bound.noise:.1e}), so it acts on noise; widen it to {SMALLEST_MARGIN:.0f} times, "
                'or set dtype = "float32" on both sides'
            )
    return found


def _disagreements(measured: Measured) -> list[str]:
    disagreeing = measured.disagreeing
    if not disagreeing:
        return []
    untempered = measured.at_temperature_1
    if untempered is not None and measured.is_close(untempered):
        worst = max(tokens.abs_logprob_mean for tokens in disagreeing.values())
        return [
            f"the server's logprobs are those of temperature 1 (mean |Δ logprob| {untempered.abs_logprob_mean:.1e}, but "
            f"{worst:.2g} at temperature {measured.temperature:g}): it does not apply learner.sampling.temperature = "
            f"{measured.temperature:g}; install the same slipstream-rl on both sides, or set it to 1"
        ]
    values = ", ".join(f"{tokens.abs_logprob_mean:.2g} ({name})" for name, tokens in disagreeing.items())
    problem = (
        f"server and learner disagree: the mean |Δ logprob| of sampled tokens is {values}, the bound is "
        f"{measured.parity_bound:.2g} for {measured.dtype} (learner.parity.max_mean_abs_logprob)"
    )
    if "fresh" in measured.columns.keys() - disagreeing.keys():
        advice = "only a push of equal weights came between, so the engine kept something wrong: try server.kv_on_push"
    else:
        advice = (
            "the fixed sequences agreed at the start, so it is in what only sampling has: look at temperature, top_p, top_k "
            "and at what the server does to logits before it samples"
        )
    return [f"{problem}; {advice}"]


def as_text(measured: Measured) -> str:
    """The table, and what the noise means for each bound."""
    columns = measured.columns
    low, high = TRUSTED_RATIO
    rows = [["", *columns]] + [
        [label, *(format(getattr(tokens, field), form) for tokens in columns.values())]
        for label, field, form in (
            ("tokens", "num_tokens", ",d"),
            ("mean |Δ logprob|", "abs_logprob_mean", ".1e"),
            ("max |Δ logprob|", "abs_logprob_max", ".1e"),
            ("ratio, mean", "ratio_mean", ".6f"),
            ("ratio, std", "ratio_std", ".1e"),
            ("ratio, min", "ratio_min", ".6f"),
            ("ratio, max", "ratio_max", ".6f"),
            (f"ratio outside {low} to {high}", "outside_frac", ".2%"),
            ("KL (k3)", "mismatch_kl", ".1e"),
            (f"clipped by {measured.objective}", "clipped_frac", ".2%"),
            ("effective sample size", "ess", ".2%"),
        )
    ]
    lines = [f"{row[0]:<26}" + "".join(f"{cell:>16}" for cell in row[1:]) for row in rows]
    if measured.through_push is None:
        lines.append("no completion was in the engine during a push: each was done before")
    if not measured.bounds:
        lines.append(f"{measured.objective} as configured has no bound on the ratio that noise could reach")
    return "\n".join([*lines, "", *map(_margin, measured.bounds)]).rstrip()


def _margin(bound: Bound) -> str:
    if bound.noise == 0:
        return f"learner.{bound.key} = {bound.value:g}: there is no noise ({NOISE_OF[bound.level]})"
    times = f"{float(f'{bound.distance / bound.noise:.2g}'):,.0f} times the noise"
    return f"learner.{bound.key} = {bound.value:g} is {times} (mean {NOISE_OF[bound.level]}: {bound.noise:.1e})"
