"""The trial: the first steps of a run, taken for real in a directory that is gone afterwards, to say how long the run would take.

    a server nobody uses ─▶ handshake, push, parity ─▶ NUM_STEPS steps as the run would take them ─▶ their median ─▶ the whole

The last thing that `learner check --trial` does. Invariant: the run's own directory is not touched; the server keeps the weights of the
trial until the run's first push.
"""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from statistics import fmean, median

import msgspec
from accelerate.utils import set_seed

from learner.config import CheckpointConfig, EvaluationConfig, LearnerRun, ReportConfig
from learner.interrupt import Interrupt
from learner.leader import Leader
from learner.material import Material
from learner.report.summary import duration, read_metrics
from learner.storage.run_dir import open_run_dir
from learner.training.metrics import StepTimer, group_metrics
from learner.training.ranks import make_accelerator
from learner.training.step import train_on
from learner.training.trainee import make_trainee
from protocol.doctor import Finding, ok, problem_of
from protocol.errors import ConfigError, SlipstreamError

NUM_STEPS = 8
NUM_COLD = 3
"""Of these the first, which wait for the first groups and warm caches, say nothing about the others."""

Metrics = list[dict[str, float]]


def trial(run: LearnerRun) -> Iterator[Finding]:
    """What server and learner say of each other, and the time."""
    with tempfile.TemporaryDirectory(prefix="slipstream-trial-") as directory:
        try:
            with redirect_stdout(sys.stderr):  # its lines are no findings
                metrics = first_steps(of_its_own(run, Path(directory) / "run"))
        except SlipstreamError as error:
            yield problem_of("trial", error, "correct what it names, or end what else uses the server")
            return
    yield from findings_of(run, metrics)


def first_steps(run: LearnerRun) -> Metrics:
    """Raises SlipstreamError."""
    with ExitStack() as cleanup:
        accelerator = make_accelerator()
        if accelerator.num_processes > 1:
            raise ConfigError(f"{accelerator.num_processes} ranks came; a trial is made by one: `learner check`")
        set_seed(run.seed)
        run_dir = open_run_dir(run, resume=False)
        cleanup.callback(run_dir.close)
        material = Material(run)
        trainee = make_trainee(material, accelerator, is_new=False)  # without a warm start, which is told by itself
        trainee.set_kl_coef(0, None)
        leader = cleanup.enter_context(Leader.open(material, run_dir, trainee.published, None))
        leader.connect(0)
        leader.fleet.is_over = True  # however it ends
        interrupt = Interrupt()  # not entered: Ctrl-C ends the trial at once
        num_steps = min(NUM_STEPS, run.learner.steps)
        for step in range(1, num_steps + 1):
            timer = StepTimer()
            with timer("wait_for_batch"):
                groups = leader.next_batch(step - 1, interrupt)
            assert groups is not None
            metrics = train_on(trainee, groups, step - 1, timer)
            with timer("push"):
                metrics |= leader.push(step, groups)
            metrics |= group_metrics(groups, step - 1)
            metrics |= trainee.after_step(step, metrics)
            leader.record(step, groups, metrics, timer)
        leader.finish(num_steps, interrupt)
    return read_metrics(Path(run.run_dir))


def of_its_own(run: LearnerRun, directory: Path) -> LearnerRun:
    """The run in another directory, with neither evaluations nor trackers. Its steps stay as they are, for schedules reckon with them."""
    config = msgspec.structs.replace(
        run.learner.in_effect(),
        evaluation=EvaluationConfig(),
        checkpoint=CheckpointConfig(),
        report=ReportConfig(trackers=(), dashboard_port=0),
    )
    return msgspec.structs.replace(run, run_dir=str(directory), learner=config)


def findings_of(run: LearnerRun, metrics: Metrics) -> Iterator[Finding]:
    if mismatches := _present(metrics, "parity/abs_logprob") + _present(metrics, "policy/mismatch_abs_logprob"):
        yield ok("parity", f"a mean |Δ logprob| of {max(mismatches):.1e} at most between server and learner")
    warm = metrics[NUM_COLD:] or metrics[-1:]
    step_s = median(_present(warm, "time/step"))
    speed = fmean(_present(warm, "perf/completion_tokens_per_s"))
    length = fmean(_present(metrics, "rollout/completion_length_mean"))
    idle = {
        "learner": _present(warm, "perf/learner_idle_frac"),
        "server": _present(warm, "perf/server_idle_frac"),
    }
    waits = ", ".join(f"the {side} idle for {fmean(shares):.0%}" for side, shares in idle.items() if shares)
    without = " and the warm start" if run.learner.warm_start.steps else ""
    yield ok(
        "time",
        f"{run.learner.steps:,} steps of {step_s:.2f} s, about {duration(run.learner.steps * step_s)} without evaluations{without}; "
        f"{speed:,.0f} completion tokens/s, {length:,.0f} tokens each, {waits}; by the median of {len(warm)} steps",
    )


def _present(metrics: Metrics, name: str) -> list[float]:
    """Of the steps that have it."""
    return [line[name] for line in metrics if name in line]
