"""What a run tells: metrics.jsonl, a console line per step, samples.jsonl, the dashboard, TensorBoard. Rank 0 has one."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from learner.report.dashboard import Dashboard
from learner.report.health import Health
from learner.rollouts.scored_group import ScoredGroup
from learner.rollouts.waits import held_up_by
from learner.storage.disk import writing
from learner.storage.run_dir import RunDir

MAX_SAMPLED_COMPLETIONS = 4
BLOCK_BYTES = 1 << 16


class RunLog:
    """Appends to the files of a run. A resumed run goes on counting seconds where it stopped."""

    def __init__(
        self, run_dir: RunDir, trackers: tuple[str, ...], num_steps: int, dashboard: Dashboard | None = None
    ) -> None:
        self._num_steps, self._dashboard = num_steps, dashboard
        self._health = Health()
        self._metrics, self._samples = Lines(run_dir.metrics), Lines(run_dir.samples)
        self._elapsed_before = _elapsed_before(run_dir)
        self._started = time.monotonic()
        self._tensorboard = None
        if "tensorboard" in trackers:
            from torch.utils.tensorboard import SummaryWriter  # slow to import, and optional

            with writing(run_dir.tensorboard):
                self._tensorboard = SummaryWriter(run_dir.tensorboard)

    def start_clock(self) -> None:
        """Count the seconds of the run from now: training, not the wait for a server that starts."""
        self._started = time.monotonic()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        """Record one optimizer step everywhere. Raises DiskError."""
        line = {
            "step": step,
            "time": time.time(),
            "elapsed_s": self._elapsed_before + time.monotonic() - self._started,
        } | metrics
        self._metrics.append(line)
        self._health.watch(step, metrics)
        if self._dashboard is not None:
            self._dashboard.publish(step, line)
        if self._tensorboard is not None:
            with writing(Path(self._tensorboard.log_dir)):
                for name, value in metrics.items():
                    self._tensorboard.add_scalar(name, value, step)
        sys.stdout.write(console_line(step, self._num_steps, metrics) + "\n")
        sys.stdout.flush()

    def sample(self, step: int, group: ScoredGroup, tokenizer: PreTrainedTokenizerBase) -> None:
        """Keep a few completions of one group, as text, for the report."""
        kept = group.completions[:MAX_SAMPLED_COMPLETIONS]
        texts = tokenizer.batch_decode([completion.token_ids.tolist() for completion in kept], skip_special_tokens=True)
        prompt = tokenizer.decode(group.prompt_token_ids.tolist())
        rewards = group.rewards_G[:MAX_SAMPLED_COMPLETIONS]
        extra = {column: values[:MAX_SAMPLED_COMPLETIONS] for column, values in group.logged_extra.items()}
        sample = {"step": step, "prompt": prompt, "completions": list(texts), "rewards": rewards}
        self._samples.append(sample | ({"extra": extra} if extra else {}))

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()
        if self._tensorboard is not None:
            with writing(Path(self._tensorboard.log_dir)):
                self._tensorboard.close()


def console_line(step: int, num_steps: int, metrics: dict[str, float]) -> str:
    """One line a person can read while it scrolls by.

    Example: Step  12/300 | 0.31s | reward 0.437 | loss -0.0121 | clipped 1.3% | staleness 1.2 | grad 0.41 | 5,120 tok/s
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
        f"push {metrics['time/push']:.2f}s",
    ]
    if part := held_up_by(metrics):
        parts.append(f"waits: {part}")
    return " | ".join(parts)


class Lines:
    """A JSON-lines file to append to. Not buffered: after a write that failed, closing would try it again."""

    def __init__(self, path: Path) -> None:
        """A last line that was cut off, by a kill or a full disk, is taken away."""
        self._path = path
        if path.exists():
            os.truncate(path, whole_lines(path))
        with writing(path):
            self._file = path.open("ab", buffering=0)

    def append(self, record: dict[str, Any]) -> None:
        """Raises DiskError."""
        line = json.dumps(record).encode() + b"\n"
        with writing(self._path):
            num_written = self._file.write(line)
            if num_written != len(line):
                raise OSError(f"only {num_written} of the last {len(line)} bytes found room")

    def close(self) -> None:
        self._file.close()


def whole_lines(path: Path) -> int:
    """The bytes up to the end of the last whole line, found from the end of the file."""
    with path.open("rb") as file:
        end = file.seek(0, os.SEEK_END)
        while end > 0:
            start = max(0, end - BLOCK_BYTES)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
    return 0


def last_line(path: Path) -> bytes:
    """Of a file of whole lines; nothing of an empty one."""
    end = path.stat().st_size
    num_bytes = BLOCK_BYTES
    with path.open("rb") as file:
        while True:
            start = max(0, end - num_bytes)
            file.seek(start)
            *before, line = file.read(end - start).removesuffix(b"\n").split(b"\n")
            if before or start == 0:
                return line
            num_bytes *= 2


def _elapsed_before(run_dir: RunDir) -> float:
    line = last_line(run_dir.metrics)
    return json.loads(line)["elapsed_s"] if line else 0.0
