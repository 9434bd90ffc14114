"""Real W&B (offline), trackio and MLflow in a new environment: each has the config, the metrics and the completions."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

PROGRAM = """
import sys
from pathlib import Path

from accelerate import PartialState

from learner.report.trackers import Trackers
from learner.storage.run_dir import RunDir
from tests.learner.runs import make_run

PartialState()  # its trackers log by the rank
directory = Path(sys.argv[1])
run_dir = RunDir(directory / "run", make_run(directory, "tcp://127.0.0.1:1"))
trackers = Trackers(["wandb", "trackio", "mlflow"], "my-project", run_dir)
for step in (2, 1):  # as after a resume, which W&B must not drop
    trackers.log_metrics(step, {"reward/mean": step / 4})
    sample = {"prompt": "2+2", "answer": 4, "completions": [f"four {step}", "5"], "rewards": [1.0, None]}
    trackers.log_completions(step, sample | {"functions": {"right": [1.0, 0.0], "form": [0.5, 0.5]}})
trackers.close()
run_dir.close()
"""
READ_MLFLOW = """
import json
import sys
from pathlib import Path
import mlflow

(run,) = mlflow.search_runs(experiment_names=["my-project"], output_format="list")
tables = [json.loads(Path(f"{run.info.artifact_uri}/completions/00000{step}.json").read_text()) for step in (2, 1)]
history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "reward/mean")
print(json.dumps([dict(run.data.params), [[one.step, one.value] for one in history], tables]))
"""
READ_TRACKIO = """
import json
import trackio

(run,) = trackio.Api().runs("my-project")
print(json.dumps(run.config))
"""


def test_each_tracker_has_config_metrics_and_completions(interpreter: Callable[..., str], tmp_path: Path) -> None:
    python = interpreter("wandb", "trackio", "mlflow", inherit=True)
    environment = {
        "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db", "PYTHONPATH": str(Path.cwd()),
    }  # fmt: skip

    def ran(program: str, *arguments: str) -> str:
        command = [python, "-c", program, *arguments]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        assert "dropping tracker" not in done.stderr, done.stderr
        return done.stdout

    ran(PROGRAM, str(tmp_path))
    settings, history, tables = json.loads(ran(READ_MLFLOW).splitlines()[-1])
    assert settings["model"] == "tiny:digits" and sorted(history) == [[1, 0.25], [2, 0.5]]
    rows = [row for table in tables for row in table["data"]]
    columns = dict(zip(tables[0]["columns"], zip(*rows, strict=True), strict=True))
    assert columns["step"] == (2, 2, 1, 1) and columns["completion"] == ("four 2", "5", "four 1", "5")
    assert columns["right"] == (1.0, 0.0) * 2 and [str(answer) for answer in columns["answer"]] == ["4"] * 4
    assert json.loads(ran(READ_TRACKIO).splitlines()[-1])["model"] == "tiny:digits"
    (database,) = (tmp_path / "trackio").glob("my-project.db")
    assert b"four 1" in database.read_bytes() and b"four 2" in database.read_bytes()
    (offline,) = [path.read_bytes() for path in (tmp_path / "run").rglob("*.wandb")]
    for value in (rb"0\.5", rb"0\.25"):
        assert re.search(rb"reward/mean.{1,4}" + value, offline, re.DOTALL), "W&B dropped a step"
    tables = [json.loads(path.read_text()) for path in (tmp_path / "run").rglob("*.table.json")]
    assert b"learner" in offline and sorted(table["data"][0][3] for table in tables) == ["four 1", "four 2"]
