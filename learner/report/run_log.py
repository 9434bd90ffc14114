"""The output of a run on rank 0: metrics.jsonl, console lines, samples.jsonl, dashboard, trackers."""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from learner.config import ReportConfig
from learner.report.dashboard import Dashboard
from learner.report.records import Samples
from learner.report.trackers import Trackers
from learner.rollouts.bottleneck import held_up_by
from learner.rollouts.rollout_group import RolloutGroup
from learner.storage.files import JsonLinesFile, last_line
from learner.storage.run_dir import RunDir
from learner.training.health import HealthMonitor
from protocol.console import say


class RunLog:
    """Writer of a run's output. A resumed run continues to count its seconds."""

    def __init__(
        self, run_dir: RunDir, config: ReportConfig, num_steps: int, dashboard: Dashboard | None = None
    ) -> None:
        self._num_steps, self._dashboard = num_steps, dashboard
        self._health = HealthMonitor()
        self._metrics, self._samples = (
            JsonLinesFile(run_dir.metrics),
            Samples(run_dir.samples, config.samples_every_steps),
        )
        self._elapsed_before = _elapsed_before(run_dir)
        self._started = time.monotonic()
        self._newest: dict[str, float] = {}
        self._trackers = Trackers(config.trackers, config.project, run_dir)

    def start_clock(self) -> None:
        """Start the run's clock: count training, not the wait for a server that starts."""
        self._started = time.monotonic()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Record one optimizer step everywhere. Raises DiskError."""
        line = {
            "step": step,
            "time": time.time(),
            "elapsed_s": self._elapsed_before + time.monotonic() - self._started,
        } | metrics
        self._record(step, line, metrics)
        self._health.watch(step, metrics)
        self._newest = line
        say(console_line(step, self._num_steps, metrics), line)

    def amend(self, metrics: dict[str, float]) -> None:
        """Replace the newest step by a line with more metrics. Raises DiskError."""
        if metrics and self._newest:
            self._record(int(self._newest["step"]), self._newest | metrics, metrics)

    def _record(self, step: int, line: dict[str, float], new: dict[str, float]) -> None:
        self._metrics.append(line)
        if self._dashboard is not None:
            self._dashboard.publish(step, line)
        self._trackers.log_metrics(step, new)

    def sample(
        self, step: int, group: RolloutGroup, tokenizer: PreTrainedTokenizerBase, row: Callable[[], Mapping[str, Any]]
    ) -> None:
        """Keep a few completions of a group for the report if it is the step's turn.

        `row` returns the columns of the group's prompt.
        """
        if (sample := self._samples.keep(step, group, tokenizer, row)) is not None:
            self._trackers.log_completions(step, sample)

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        self._trackers.close()


def console_line(step: int, num_steps: int, metrics: dict[str, float]) -> str:
    """Format the line of one step for the console.

    Example: Step  12/300 | 0.31s | reward 0.437 | loss -0.0121 | clipped 1.3% | staleness 1.2 | grad 0.41 |
    5,120 tok/s | wait 0.02s | sync 0.01s
    """
    parts = [
        f"Step {step:>{len(str(num_steps))}}/{num_steps}",
        f"{metrics['time/step']:.2f}s",
        f"reward {metrics['reward/mean']:.3f}" if "reward/mean" in metrics else "reward none",
    ]
    if "reward/exact_match" in metrics:
        parts.append(f"exact {metrics['reward/exact_match']:.3f}")
    if "loss/policy" in metrics:
        parts.append(f"loss {metrics['loss/policy']:+.4f}")
    if "loss/clipped_frac" in metrics:
        parts.append(f"clipped {metrics['loss/clipped_frac']:.1%}")
    if "reference/kl" in metrics:
        parts.append(f"KL {metrics['reference/kl']:.4f}")
    parts += [
        f"staleness {metrics['staleness/mean']:.1f}",
        f"grad {metrics['optim/grad_norm']:.2f}" if "optim/grad_norm" in metrics else "update skipped",
        f"{metrics['perf/completion_tokens_per_s']:,.0f} tok/s",
        f"wait {metrics['time/wait_for_batch']:.2f}s",
        f"sync {metrics['time/weight_sync']:.2f}s",
    ]
    if part := held_up_by(metrics):
        parts.append(f"waits: {part}")
    return " | ".join(parts)


def _elapsed_before(run_dir: RunDir) -> float:
    line = last_line(run_dir.metrics)
    return json.loads(line)["elapsed_s"] if line else 0.0
