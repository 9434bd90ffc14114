"""Measure the time of a resume after a long run: `python -m tests.bench.long_resume --help`.

    a run of one step ─▶ its directory, extended to many steps ─▶ `learner train --resume` ─▶ the next step is recorded

The directory is that of a long run: a row with rewards per group in the ledger, a line per step in metrics.jsonl, and
the newest checkpoint, with the pass rates of a curriculum. The resume is complete when the next step is recorded.
"""

import argparse
import json
import re
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from learner.config import LearnerRun
from learner.rollouts.ledger_storage import COLUMNS
from learner.train import train
from protocol.config import to_toml
from tests.learner.model_engine import tiny_server
from tests.learner.runs import make_run

NUM_PROMPTS = 4096
NUM_COMPLETIONS = 16
TIMEOUT_S = 600.0
BATCH_ROWS = 10_000


def long_run(path: Path, endpoint: str, num_steps: int, groups_per_step: int) -> LearnerRun:
    """Return the config of a run with one step left after `num_steps`."""
    return make_run(
        path, endpoint, steps=num_steps + 1, groups_per_step=groups_per_step, max_staleness=0,
        data={"task": "reverse", "num_digits": 4, "num_prompts": NUM_PROMPTS}, curriculum={"kind": "pass_rate"},
        sampling={"group_size": NUM_COMPLETIONS, "max_tokens": 5},
        report={"trackers": ["tensorboard"], "dashboard_port": 8765}, connect_timeout_s=120.0,
    )  # fmt: skip


def make_long(run: LearnerRun, num_steps: int) -> None:
    """Train one step, then extend the directory."""
    learner = msgspec.structs.replace(run.learner, steps=1)
    train(msgspec.structs.replace(run, learner=learner), resume=False)
    run_dir, num_groups = Path(run.run_dir), num_steps * run.learner.groups_per_step
    grow_lines(run_dir / "metrics.jsonl", num_steps)
    grow_lines(run_dir / "samples.jsonl", num_steps)
    grow_ledger(run_dir / "ledger.db", num_groups, run.learner.groups_per_step)
    move_checkpoint(run_dir / "checkpoints", num_steps, num_groups)


def grow_lines(path: Path, num_steps: int) -> None:
    first = path.read_text().splitlines()[0]
    with path.open("w") as file:
        for step in range(1, num_steps + 1):
            file.write(re.sub(r'"step": 1\b', f'"step": {step}', first) + "\n")


def grow_ledger(path: Path, num_groups: int, groups_per_step: int) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        names = COLUMNS.split(", ")
        row = dict(zip(names, db.execute(f"SELECT {COLUMNS} FROM groups WHERE slot = 0").fetchone(), strict=True))
        assert row["state"] == "consumed" and row["rewards"] is not None, row
        db.execute("DELETE FROM groups")
        insert = f"INSERT INTO groups ({COLUMNS}) VALUES ({', '.join('?' for _ in names)})"
        for start in range(0, num_groups, BATCH_ROWS):
            db.execute("BEGIN")
            for slot in range(start, min(start + BATCH_ROWS, num_groups)):
                epoch, prompt_id = divmod(slot, NUM_PROMPTS)
                changes = {"group_id": f"{slot}.0", "slot": slot, "position": slot, "epoch": epoch}
                changes |= {"prompt_id": prompt_id, "step": slot // groups_per_step + 1}
                db.execute(insert, tuple((row | changes).values()))
            db.execute("COMMIT")


def move_checkpoint(directory: Path, num_steps: int, num_groups: int) -> None:
    checkpoint = (directory / "step-000001").rename(directory / f"step-{num_steps:06d}")
    state = json.loads((checkpoint / "state.json").read_text()) | {"step": num_steps, "version": num_steps}
    (checkpoint / "state.json").write_text(json.dumps(state))
    curriculum = checkpoint / "curriculum.json"
    if curriculum.exists():  # missing in checkpoints of earlier versions
        rates = dict.fromkeys(map(str, range(NUM_PROMPTS)), 0.5)
        kept = json.loads(curriculum.read_text()) | {"next_slot": num_groups, "by_prompt": rates}
        curriculum.write_text(json.dumps(kept))


def resume_s(run: LearnerRun) -> float:
    """Return the seconds from the command to the line of the next step."""
    config, metrics = Path(run.run_dir).with_name("run.toml"), Path(run.run_dir) / "metrics.jsonl"
    config.write_text(to_toml(run))
    before, started = metrics.stat().st_size, time.monotonic()
    command = [sys.executable, "-m", "learner", "train", str(config), "--resume"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as learner:
        try:
            while metrics.stat().st_size == before:
                if learner.poll() is not None:
                    raise SystemExit(f"the learner ended before its next step:\n{learner.communicate()[0]}")
                if time.monotonic() - started > TIMEOUT_S:
                    raise SystemExit(f"no step within {TIMEOUT_S} s")
                time.sleep(0.02)
            return time.monotonic() - started
        finally:
            learner.kill()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--groups-per-step", type=int, default=2)
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="long-resume-"))
    found: dict[str, Any] = {"steps": args.steps, "ledger_rows": args.steps * args.groups_per_step}
    try:
        with tiny_server() as server:
            run = long_run(directory, server.endpoint, args.steps, args.groups_per_step)
            make_long(run, args.steps)
            for name in ("metrics.jsonl", "ledger.db", "samples.jsonl"):
                found[f"{name}_mib"] = round((Path(run.run_dir) / name).stat().st_size / (1 << 20), 1)
            found["resume_s"] = round(resume_s(run), 1)
    finally:
        shutil.rmtree(directory)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
