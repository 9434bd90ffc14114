"""Trackers receive every metric of metrics.jsonl, of any number type. A failing or missing tracker is reported."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import PartialState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from learner.report.summary import read_metrics
from learner.report.trackers import EXTRAS, Trackers, is_installed
from learner.storage.run_dir import RunDir
from learner.train import train
from protocol.errors import ConfigError
from protocol.model_files import resolve_model
from tests.learner.model_engine import ModelEngine, tiny_server
from tests.learner.runs import make_run

WANDB = """
told, closed = [], []

class Config:
    def update(self, values, allow_val_change):
        self.values = values

config = Config()

class Table:
    def __init__(self, columns, data):
        self.columns, self.data = columns, data

class Run:
    def define_metric(self, name, step_metric):
        told.append({name: step_metric})

    def log(self, values, step):
        assert step is None  # W&B drops steps below its newest
        if values["step"] == 3:
            raise ConnectionError("nobody is there")
        told.append(values)

    def finish(self):
        closed.append(self)

def init(**named):
    told.append(named)
    return Run()
"""
TRACKIO = """
named, config = [], {}

def init(**settings):
    named.append(settings)
"""
MLFLOW = """
import os

def search_experiments(filter_string):
    variables = [os.environ["MLFLOW_HTTP_REQUEST_" + name] for name in ("TIMEOUT", "MAX_RETRIES")]
    raise ConnectionError("no answer, with " + " and ".join(variables))
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[RunDir]:
    PartialState(cpu=True)  # accelerate's trackers need it, as in a learner
    run_dir = RunDir(tmp_path / "run", make_run(tmp_path, "tcp://127.0.0.1:1"))
    yield run_dir
    run_dir.close()


def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, source: str) -> None:
    """Let a package of this source be imported."""
    package = tmp_path / "packages" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.delitem(sys.modules, name, raising=False)


def read_back(path: Path) -> dict[str, dict[int, float]]:
    """Return the values that TensorBoard shows, by metric and step."""
    events = EventAccumulator(str(path), size_guidance={"scalars": 0})
    events.Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}


def test_tensorboard_has_every_metric_of_every_step(tmp_path: Path) -> None:
    with tiny_server(ModelEngine(resolve_model("tiny:digits"))) as server:
        run = make_run(tmp_path, server.endpoint, steps=2, report={"trackers": ["tensorboard"], "dashboard_port": 0})
        train(run, resume=False)
    lines = read_metrics(Path(run.run_dir))
    shown = read_back(Path(run.run_dir) / "tensorboard")
    assert len(lines) == 2 and sum("/" in name for name in lines[0]) > 30
    for line in lines:
        for name, value in line.items():
            if "/" in name:
                assert shown[name][line["step"]] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("value", [np.float32(0.5), np.array(0.5), torch.tensor(0.5), np.int64(2), True], ids=repr)
def test_numbers_of_any_type_are_logged(run_dir: RunDir, value: float) -> None:
    trackers = Trackers(["tensorboard"], "p", run_dir)
    trackers.log_metrics(7, {"reward/mean": value})
    trackers.close()
    assert read_back(run_dir.tensorboard) == {"reward/mean": {7: float(value)}}


def test_a_failing_tracker_is_dropped_without_affecting_others(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, monkeypatch, "wandb", WANDB)
    trackers = Trackers(["wandb", "tensorboard"], "my-project", run_dir)
    sample = {"prompt": "2+2", "answer": 4, "completions": ["4", "5"], "rewards": [1.0, None]}
    for step in range(1, 5):
        trackers.log_metrics(step, {"reward/mean": np.float32(step)})
        if step == 1:
            trackers.log_completions(step, sample | {"functions": {"right": [1.0, 0.0], "reward": [2.0, 3.0]}})
    trackers.close()
    wandb = sys.modules.pop("wandb")
    named, axis, *logged = wandb.told
    assert axis == {"*": "step"}
    logged_tables = logged.pop(1)
    table = logged_tables["completions"]
    assert logged_tables["step"] == 1
    assert table.columns == ["step", "prompt", "answer", "completion", "reward", "right", "reward/reward"]
    assert table.data == [[1, "2+2", "4", "4", 1.0, 1.0, 2.0], [1, "2+2", "4", "5", None, 0.0, 3.0]]
    settings = wandb.config.values
    assert (settings["model"], settings["learner.steps"]) == ("tiny:digits", 4)
    assert all(value is None or isinstance(value, bool | int | float | str) for value in settings.values())
    assert (named["project"], named["id"], named["resume"]) == ("my-project", run_dir.run_id, "allow")
    assert logged == [{"step": step, "reward/mean": float(step)} for step in (1, 2)] and wandb.closed == []
    assert all(type(values["reward/mean"]) is float for values in logged)
    assert "dropping tracker wandb, which failed (nobody is there)" in caplog.text
    assert list(read_back(run_dir.tensorboard)["reward/mean"]) == [1, 2, 3, 4]


def test_an_mlflow_server_that_does_not_answer_is_given_up_before_the_ranks_are(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path, monkeypatch, "mlflow", MLFLOW)
    monkeypatch.setattr(os, "environ", os.environ | {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"})
    Trackers(["mlflow"], "p", run_dir)
    assert "dropping tracker mlflow, which failed (no answer, with 20 and 0)" in caplog.text
    sys.modules.pop("mlflow")


def test_runs_in_directories_of_one_name_are_different_runs_in_trackio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "trackio", TRACKIO)
    for folder in ("a", "b", "a"):  # the last one resumes the first
        run_dir = RunDir(tmp_path / folder / "qwen-math", make_run(tmp_path, "tcp://127.0.0.1:1"))
        Trackers(["trackio"], "p", run_dir)
        run_dir.close()
    first, second, resumed = (settings["name"] for settings in sys.modules.pop("trackio").named)
    assert first == resumed != second and first.startswith("qwen-math-")


@pytest.mark.parametrize("name", EXTRAS)
def test_a_tracker_without_its_package_is_rejected_with_the_install_command(
    run_dir: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if is_installed(name):
        pytest.skip(f"{name} is installed here")
    (tmp_path / name).mkdir()  # as W&B leaves the directory behind
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=rf"'{name}', which is not installed; .*pip install .*\[{EXTRAS[name]}\]'"):
        Trackers([name], "p", run_dir)
