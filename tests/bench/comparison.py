"""Compare both sides on one workload: medians over repetitions, and ratios of Slipstream to TRL. Pure."""

import statistics
from typing import Any

import msgspec

from tests.bench import steps as arithmetic
from tests.bench.steps import Step
from tests.bench.trl_side import TrlRun
from tests.bench.workload import Workload
from tests.bench.workload_run import Run

MAX_LENGTH_DIFFERENCE = 0.05
NUM_LAST_STEPS = 3


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Operations per second of large float32 matrix products, in each repetition."""

    num_cores: int
    """Number of the learner's cores."""
    of_one: list[float]
    of_all: list[float]


def compare(
    workload: Workload, trl: list[TrlRun], ours: list[Run], rates: Rates, num_parameters: int, warm_up: int
) -> dict[str, Any]:
    """Return medians over repetitions of each side, and ratios of Slipstream to TRL."""

    def limit_frac(flops_per_s: list[float]) -> float:
        rate = statistics.median(flops_per_s)
        return statistics.median(
            arithmetic.limit_frac(workload, run.steps, warm_up, num_parameters, rate) for run in ours
        )

    s_per_step = {
        "trl": [arithmetic.seconds_per_step(run.steps, warm_up) for run in trl],
        "ours": [arithmetic.seconds_per_step(run.steps, warm_up) for run in ours],
    }
    lengths = {
        "trl": statistics.median(arithmetic.length_mean(run.steps, warm_up) for run in trl),
        "ours": statistics.median(arithmetic.length_mean(run.steps, warm_up) for run in ours),
    }
    medians = {side: statistics.median(values) for side, values in s_per_step.items()}
    length_ratio = lengths["ours"] / lengths["trl"]
    return {
        "samples_per_s_ratio": medians["trl"] / medians["ours"],
        "limit_frac": limit_frac(rates.of_all),
        "limit_frac_of_one_core": limit_frac(rates.of_one),
        "s_per_step": medians,
        "samples_per_s": {side: workload.samples_per_step / value for side, value in medians.items()},
        "s_per_step_by_repetition": s_per_step,
        "num_steady_steps": len(ours[0].steps) - warm_up,
        "completion_length_mean": lengths,
        "expected_length": workload.mean_length,
        "length_ratio": length_ratio,
        "lengths_comparable": abs(length_ratio - 1) <= MAX_LENGTH_DIFFERENCE,
        **compare_rewards([run.steps for run in trl], [run.steps for run in ours]),
        "learner_busy_s": statistics.median(
            value * (1 - run.learner_idle_frac) for value, run in zip(s_per_step["ours"], ours, strict=True)
        ),
        "learner_idle_frac": statistics.median(run.learner_idle_frac for run in ours),
        "server_idle_frac": statistics.median(run.server_idle_frac for run in ours),
        "learner_phases_s": ours[-1].phases_s,
        "matrix_gflops_per_s": {"one core": in_billions(rates.of_one), "all": in_billions(rates.of_all)},
        "learner_threads": rates.num_cores,
        "trl_processes": trl[0].processes,
        "trl_threads_each": trl[0].threads,
    }


def in_billions(rates: list[float]) -> list[float]:
    return [rate / 1e9 for rate in rates]


def compare_rewards(trl: list[list[Step]], ours: list[list[Step]]) -> dict[str, Any]:
    """Compare rewards at the versions of Slipstream's last batches. Noise: three standard errors of the difference."""
    at_trl, at_ours = [], []
    for theirs, own in zip(trl, ours, strict=True):
        versions_seen = [step.version for step in own[-NUM_LAST_STEPS:]]
        at_trl.append(arithmetic.reward_at(theirs, versions_seen))
        at_ours.append(arithmetic.reward_at(own, versions_seen))
    difference = statistics.fmean(at_ours) - statistics.fmean(at_trl)
    found = {
        "reward_at_same_version": {"trl": statistics.fmean(at_trl), "ours": statistics.fmean(at_ours)},
        "reward_of_last_step": {
            side: statistics.fmean(steps[-1].reward_mean for steps in runs)
            for side, runs in (("trl", trl), ("ours", ours))
        },
        "reward_difference": difference,
    }
    if len(trl) < 2:
        return found | {"reward_noise": None, "rewards_equal": None}
    noise = 3 * ((statistics.variance(at_trl) + statistics.variance(at_ours)) / len(trl)) ** 0.5
    return found | {"reward_noise": noise, "rewards_equal": abs(difference) <= noise}
