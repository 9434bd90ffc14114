"""The trackers of a run, through accelerate: TensorBoard, Weights & Biases, trackio, MLflow.

    run_log.py ─▶ all metrics of a step, as floats ─▶ RUN_DIR/tensorboard, or the tracker's own destination

The trackers' own environment variables set their destinations.
Invariants: each tracker gets the config and every metric of metrics.jsonl.
Trackers with tables also get the completions of samples.jsonl.
A tracker that fails is dropped with a warning and never stops the run. A full disk does, as elsewhere.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any

import msgspec

from learner.config import LearnerRun
from learner.storage.files import DiskError, writing
from learner.storage.run_dir import RunDir
from protocol.config import to_toml
from protocol.config_keys import flatten
from protocol.errors import ConfigError
from protocol.installation import install_command

log = logging.getLogger(__name__)

TENSORBOARD = "tensorboard"
COMPLETIONS = "completions"
STEP = "step"
"""Metric that is the x axis of W&B's charts."""
MLFLOW_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""Environment variables of MLflow, unless the user sets them. By default, a request to a server that does not answer
blocks rank 0 for longer than the other ranks wait for it (learner.collective_timeout_s)."""
EXTRAS = {TENSORBOARD: "learner", "wandb": "wandb", "trackio": "trackio", "mlflow": "mlflow"}
"""Map from a tracker, named like its package, to the extra that installs it."""


class Trackers:
    """The open trackers of one run."""

    def __init__(self, names: Sequence[str], project: str, run_dir: RunDir) -> None:
        """Open the trackers. Raises ConfigError if the package of one is not installed."""
        refuse_absent(names)
        self._run_dir = run_dir
        self._open: dict[str, Any] = {}
        for name in dict.fromkeys(names):
            with self._at_the_cost_of(name):
                tracker = _open(name, project, run_dir)
                tracker.start()
                if name == "wandb":
                    tracker.run.define_metric("*", step_metric=STEP)
                self._open[name] = tracker
                if name == TENSORBOARD:  # store_init_configuration would write one more file at each start
                    tracker.writer.add_text("config", f"```toml\n{to_toml(run_dir.run)}\n```")
                else:
                    tracker.store_init_configuration(_settings(run_dir.run))

    def log_metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step to every tracker. Raises DiskError."""
        # Some trackers silently skip values that are neither int nor float, such as NumPy's float32.
        values = {name: float(value) for name, value in metrics.items()}
        for name in [*self._open]:
            with self._at_the_cost_of(name):
                _log(name, self._open[name], values, step)

    def log_completions(self, step: int, sample: Mapping[str, Any]) -> None:
        """Log a line of samples.jsonl as a table, to the trackers that have tables."""
        functions = sample.get("functions", {})
        own = ["step", "prompt", "answer", "completion", "reward"]
        columns = own + [f"reward/{name}" if name in own else name for name in functions]
        answer = sample.get("answer")
        rows = zip(sample["completions"], sample["rewards"], *functions.values(), strict=True)
        data = [[step, sample["prompt"], None if answer is None else str(answer), *row] for row in rows]
        for name in [*self._open]:
            with self._at_the_cost_of(name):
                _log_table(name, self._open[name], columns, data, step)

    def close(self) -> None:
        """Finish every tracker. Raises DiskError."""
        for name in [*self._open]:
            with self._at_the_cost_of(name):
                self._open[name].finish()

    @contextmanager
    def _at_the_cost_of(self, name: str) -> Iterator[None]:
        try:
            with writing(self._run_dir.tensorboard) if name == TENSORBOARD else nullcontext():
                yield
        except DiskError:
            raise
        except Exception as error:
            self._open.pop(name, None)
            log.warning(
                "dropping tracker %s, which failed (%s); metrics.jsonl has all metrics", name, error or repr(error)
            )


def refuse_absent(names: Sequence[str]) -> None:
    """Raise ConfigError for trackers whose package is not installed."""
    if absent := [name for name in dict.fromkeys(names) if not is_installed(name)]:
        install = install_command(",".join(EXTRAS[name] for name in absent))
        raise ConfigError(
            f"learner.report.trackers contains {', '.join(map(repr, absent))}, which is not installed; "
            f"{install}, or remove it"
        )


def is_installed(name: str) -> bool:
    """Return whether the package is installed.

    W&B creates a directory `wandb` where it is started, which looks like a package without code.
    """
    found = find_spec(name)
    return found is not None and found.origin is not None


def _settings(run: LearnerRun) -> dict[str, bool | int | float | str | None]:
    """Return the config by full keys, in types that every tracker takes."""
    return {
        key: value if isinstance(value, bool | int | float | str | None) else str(value)
        for key, value in flatten(msgspec.to_builtins(run)).items()
    }


def _open(name: str, project: str, run_dir: RunDir) -> Any:
    from accelerate import tracking  # slow to import, like the trackers

    run_name = run_dir.path.resolve().name
    match name:
        case "wandb":
            return tracking.WandBTracker(
                project, id=run_dir.run_id, name=run_name, resume="allow", dir=str(run_dir.path)
            )
        case "trackio":
            return tracking.TrackioTracker(project, name=f"{run_name}-{run_dir.run_id[-8:]}", resume="allow")
        case "mlflow":
            for variable, value in MLFLOW_PATIENCE.items():
                os.environ.setdefault(variable, value)
            return tracking.MLflowTracker(experiment_name=project, run_name=run_name)
    return tracking.TensorBoardTracker(run_dir.tensorboard.name, logging_dir=run_dir.tensorboard.parent)


def _log(name: str, tracker: Any, values: Mapping[str, Any], step: int) -> None:
    if name == "wandb":
        # With W&B's own `step`, it would drop the steps that a resumed run repeats.
        tracker.log({STEP: step, **values})
    else:
        tracker.log(values, step=step)


def _log_table(name: str, tracker: Any, columns: list[str], data: list[list[Any]], step: int) -> None:
    match name:
        case "wandb":
            import wandb

            _log(name, tracker, {COMPLETIONS: wandb.Table(columns=columns, data=data)}, step)
        case "trackio":
            import trackio

            _log(name, tracker, {COMPLETIONS: trackio.Table(columns=columns, data=data)}, step)
        case "mlflow":
            import mlflow

            # Not log_table: it sends the whole table again for each sample, and lists table names in one short tag.
            table, file = {"columns": columns, "data": data}, f"{COMPLETIONS}/{step:06}.json"
            mlflow.log_dict(table, file, run_id=tracker.active_run.info.run_id)
