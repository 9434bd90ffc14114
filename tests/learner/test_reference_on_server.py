"""Runs whose reference is on a server of its own: the real protocol, with transformers models instead of vLLM."""

import shutil
import threading
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.config import LearnerRun
from learner.train import train
from protocol.errors import ConfigError, DeadlineExceeded, HandshakeRefused
from protocol.model_digest import digest_model
from protocol.model_files import fingerprint, resolve_model
from tests.fakes import ServerThread
from tests.learner.model_engine import TINY_LIMITS, ModelEngine, tiny_server
from tests.learner.runs import make_run, metrics_of, rows_of, seeded
from tests.ports import free_port

EVERY = {"kind": "every", "every_steps": 2}


def reference_server(
    path: Path | None = None, engine: ModelEngine | None = None, endpoint: str = "tcp://127.0.0.1:*", **options: Any
) -> ServerThread:
    """Return a server of the tiny model, or of the one at `path`."""
    path = path or resolve_model("tiny:digits")
    options = {"model": fingerprint(path), "model_digest": digest_model(path)} | options
    return ServerThread(engine or ModelEngine(path), endpoint=endpoint, **options)


def run_with(tmp_path: Path, server: ServerThread, endpoint: str | None, **learner: Any) -> LearnerRun:
    reference = learner.pop("reference", {"kind": "fixed"})
    if endpoint is not None:
        reference = reference | {"endpoint": endpoint}
    settings = {"kl": {"coef": 0.1}, "reference": reference} | seeded() | learner
    return make_run(tmp_path, server.endpoint, **settings)


def of_learning(run: LearnerRun) -> list[dict[str, float]]:
    """Return the metrics that the reference decides."""
    names = ("loss/policy", "optim/grad_norm", "reference/kl", "reference/version", "reward/mean")
    return [{name: line[name] for name in names} for line in metrics_of(run)]


def assert_alike(run: LearnerRun, other: LearnerRun) -> None:
    ours, theirs = of_learning(run), of_learning(other)
    assert len(ours) == len(theirs)
    for one, two in zip(ours, theirs, strict=True):
        assert one == pytest.approx(two, abs=2e-5)


@pytest.mark.parametrize(
    ("reference", "place"), [({"kind": "fixed"}, "loss"), (EVERY, "loss"), (EVERY, "reward"), (EVERY, "advantage")]
)
def test_a_run_learns_the_same_with_its_reference_on_a_server(
    tmp_path: Path, reference: dict[str, Any], place: str
) -> None:
    settings = {"reference": reference, "kl": {"coef": 0.1, "place": place}, "advantage": {"scale": "none"}}
    with tiny_server() as server, reference_server() as on_server:
        own = run_with(tmp_path / "own", server, None, **settings)
        run = run_with(tmp_path / "on_server", server, on_server.endpoint, **settings)
        train(own, resume=False)
        train(run, resume=False)
    assert_alike(run, own)
    assert [line["reference/version"] for line in metrics_of(run)] == (
        [0, 0, 0, 0] if reference["kind"] == "fixed" else [0, 2, 2, 4]
    )
    assert all(line["reference/scored_tokens"] > 0 and line["reference/score_seconds"] > 0 for line in metrics_of(run))


def test_a_killed_and_restarted_reference_loses_nothing_and_a_resume_has_the_same_version(tmp_path: Path) -> None:
    """The server dies twice: during a step, and while the learner is down."""
    with tiny_server() as server:
        own = run_with(tmp_path / "own", server, None, reference=EVERY, steps=8)
        train(own, resume=False)
        endpoint = f"tcp://127.0.0.1:{free_port()}"
        dies = threading.Event()
        first = reference_server(engine=Dying(resolve_model("tiny:digits"), dies, 50), endpoint=endpoint)
        second = reference_server(endpoint=endpoint)

        def restart() -> None:
            with first:
                assert dies.wait(60)
            with second:
                stop.wait(60)

        stop = threading.Event()
        thread = threading.Thread(target=restart)
        thread.start()
        part = run_with(tmp_path / "part", server, endpoint, reference=EVERY, steps=5, checkpoint={"every_steps": 5})
        train(part, resume=False)
        stop.set()
        thread.join()
        with reference_server(endpoint=endpoint):
            whole = run_with(tmp_path / "part", server, endpoint, reference=EVERY, steps=8)
            train(whole, resume=True)
    assert_alike(whole, own)
    assert rows_of(whole, "count(*)", "state = 'consumed'") == [(24,)]


class Dying(ModelEngine):
    """Gives the sign to end its server with a score, which it never answers."""

    def __init__(self, path: Path, dies: threading.Event, after: int) -> None:
        super().__init__(path)
        self._dies, self._left = dies, after

    async def score(self, token_ids: np.ndarray, replica: int) -> tuple[np.ndarray, int | None]:
        self._left -= 1
        if self._left <= 0:
            self.release.clear()
            self._dies.set()
        return await super().score(token_ids, replica)
