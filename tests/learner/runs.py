"""The config of a run of a few seconds, and the contents of its directory."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from learner.config import LearnerRun

GROUPS_PER_STEP, NUM_COMPLETIONS, MAX_TOKENS = 3, 4, 5


def make_run(tmp_path: Path, *endpoints: str, **learner: Any) -> LearnerRun:
    """Return a run of a few seconds that reverses 4 digits."""
    settings = {
        "steps": 4,
        "groups_per_step": GROUPS_PER_STEP,
        "data": {"task": "reverse", "num_digits": 4, "num_prompts": 8},
        "reward": {"functions": ["share_right", "exact_match"], "weights": [1.0, 0.0]},
        "sampling": {"group_size": NUM_COMPLETIONS, "max_tokens": MAX_TOKENS},
        "optimizer": {"learning_rate": 2e-3},
        "report": {"trackers": [], "dashboard_port": 0},
        "connect_timeout_s": 20,
        "weight_sync": {"timeout_s": 20},
    }
    # Steps are so short that most checks would be skipped.
    learner["parity"] = {"max_time_share": 1.0} | learner.get("parity", {})
    return msgspec.convert(
        {
            "model": "tiny:digits",
            "run_dir": str(tmp_path / "run"),
            **({"endpoint": endpoints[0]} if len(endpoints) == 1 else {"endpoints": endpoints}),
            "dtype": "float32",
            "learner": settings | learner,
        },
        LearnerRun,
    )


def metrics_of(run: LearnerRun) -> list[dict[str, float]]:
    return [json.loads(line) for line in (Path(run.run_dir) / "metrics.jsonl").read_text().splitlines()]


def rows_of(run: LearnerRun, columns: str, where: str = "1") -> list[tuple]:
    with closing(sqlite3.connect(Path(run.run_dir) / "ledger.db")) as ledger:
        return ledger.execute(f"SELECT {columns} FROM groups WHERE {where} ORDER BY slot").fetchall()


def seeded() -> dict[str, Any]:
    return {
        "max_staleness": 0,
        "sampling": {"group_size": NUM_COMPLETIONS, "max_tokens": MAX_TOKENS, "seeded": True},
    }


def batches_of(run: LearnerRun) -> list[tuple]:
    """Return the history of all slots, without times."""
    return rows_of(run, "slot, attempt, position, prompt_id, state, reason, step, rewards")


def assert_each_prompt_once(run: LearnerRun, num_steps: int) -> None:
    """Check that every epoch of the 8 prompts has each once, and that no attempt failed. A step consumes 3."""
    assert num_steps % 8 == 0, "the last epoch must be complete"
    consumed = rows_of(run, "epoch, prompt_id", "state = 'consumed'")
    assert sorted(consumed) == [(index // 8, index % 8) for index in range(GROUPS_PER_STEP * num_steps)]
    assert rows_of(run, "max(attempt), count(*)") == [(0, GROUPS_PER_STEP * num_steps)]
