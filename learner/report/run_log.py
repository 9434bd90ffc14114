"""The output of a run on rank 0: metrics.jsonl, console lines, samples.jsonl, dashboard, trackers, health warnings.

The bounds of the health warnings, which are signs of off-policy divergence, are rules of thumb (verl's rollout
correction, issue threads of TRL and prime-rl). Runs have collapsed above them, and rarely do below.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase

from learner.config import ReportConfig
from learner.evaluation.background import IN_EVERY_STEP
from learner.report.dashboard import Dashboard
from learner.report.records import Samples
from learner.report.trackers import Trackers
from learner.rollouts.bottleneck import held_up_by
from learner.rollouts.rollout_group import RolloutGroup
from learner.storage.files import JsonLinesFile, last_line
from learner.storage.run_dir import RunDir
from protocol.console import say

log = logging.getLogger(__name__)

ADVICE = "lower max_staleness or the learning rate, or set learner.off_policy_correction"


class RunLog:
    """Writer of a run's output. A resumed run continues to count its seconds."""

    def __init__(
        self, run_dir: RunDir, config: ReportConfig, num_steps: int, dashboard: Dashboard | None = None
    ) -> None:
        self._num_steps, self._dashboard = num_steps, dashboard
        self._health = HealthMonitor()
        self._metrics = JsonLinesFile(run_dir.metrics)
        self._samples = Samples(run_dir.samples, config.samples_every_steps)
        line = last_line(run_dir.metrics)
        self._newest: dict[str, float] = json.loads(line) if line else {}
        self._elapsed_before = self._newest.get("elapsed_s", 0.0)
        self._started = time.monotonic()
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

    def amend(self, step: int, evaluation: dict[str, float]) -> None:
        """Replace the line of `step`, if it is the newest, by one with these evaluations. Raises DiskError."""
        if self._newest.get("step") != step or evaluation.items() <= self._newest.items():
            return
        # The new values are those of the newest evaluation, which may have none of some name.
        outdated = [name for name in self._newest if name.startswith("evaluation/") and name.endswith(IN_EVERY_STEP)]
        line = {name: value for name, value in self._newest.items() if name not in outdated} | evaluation
        self._record(step, line, evaluation)

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
    if (mismatch := metrics.get("policy/behavior_kl", 0.0)) > 0.1:
        signs["policy/behavior_kl"] = (
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
            '(try granularity = "geometric") and top_entropy_frac'
        )
    return signs
