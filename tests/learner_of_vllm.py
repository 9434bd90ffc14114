"""`learner train` on a real server, as a user starts it: tiny:digits learns to reverse digits, 4 groups per step."""

import json
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tests.inference_server.real_server import RealServer
from tests.learner.forked_learner import end_of, run_learner, start_learner

RECIPE = "deploy/recipes/reverse.toml"
TIMEOUT_S = 240
GROUPS_PER_STEP = 4
SMALL = [
    "--learner.data.num-prompts", "16", "--learner.groups-per-step", str(GROUPS_PER_STEP),
    "--learner.checkpoint.every-steps", "3", "--learner.report.dashboard-port", "0",
]  # fmt: skip


class Learner:
    """A learner, forked so that its imports cost nothing. Its log is next to its run directory."""

    def __init__(self, server: RealServer, run_dir: Path, num_steps: int, *flags: str) -> None:
        self.run_dir, self._log_file = run_dir, run_dir.with_suffix(".log")
        arguments = ("train", RECIPE, "--endpoint", server.endpoint, "--run-dir", str(run_dir), *SMALL)
        self.process = start_learner(
            (*arguments, "--learner.steps", str(num_steps), *flags), self._log_file, self._log_file
        )

    def metrics(self) -> list[dict[str, float]]:
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []  # the last line may be incomplete
        return [json.loads(line) for line in lines]

    @property
    def log(self) -> str:
        """Output of this learner and of earlier ones of the same run."""
        return self._log_file.read_text() if self._log_file.exists() else ""

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_so():
            assert self.process.is_alive() and time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        self.wait_until(lambda: len(self.metrics()) >= step)

    def finish(self) -> None:
        assert end_of(self.process, self._log_file, TIMEOUT_S) == 0, self.log

    def report(self) -> dict[str, float]:
        done = run_learner("report", str(self.run_dir), "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def assert_every_group_is_accounted_for(self, num_steps: int) -> None:
        """Check that each epoch has each prompt once, every step has four groups, and no group remains."""
        with closing(sqlite3.connect(self.run_dir / "ledger.db")) as ledger:
            consumed = ledger.execute("SELECT epoch, prompt_id, step FROM groups WHERE state = 'consumed'").fetchall()
        assert len({(epoch, prompt) for epoch, prompt, _ in consumed}) == len(consumed)
        steps = [step for step in range(1, num_steps + 1) for _ in range(GROUPS_PER_STEP)]
        assert sorted(step for *_, step in consumed) == steps
        report = self.report()
        assert (report["groups_lost"], report["groups_outstanding"], report["steps"]) == (0, 0, num_steps)
