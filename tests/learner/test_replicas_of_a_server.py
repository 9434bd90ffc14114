"""Whole runs on a server of two replicas: each is asked for its logprobs, and one that is wrong is not lost in the mean of both."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from learner.train import train
from protocol.errors import ParityError
from protocol.model_files import resolve_model
from tests.learner.model_engine import TINY_LIMITS, ModelEngine, tiny_server
from tests.learner.runs import make_run, metrics_of

LITTLE = 1.5e-3
"""Above the bound of 1e-3; as the mean of both replicas it is below."""


class TwoReplicas(ModelEngine):
    """Whose second one gives other logprobs from a version on; None is before the first push."""

    def __init__(self, wrong_from: int | None = 1000, off: float = LITTLE) -> None:
        super().__init__(resolve_model("tiny:digits"))
        self.limits = msgspec.structs.replace(TINY_LIMITS, num_replicas=2)
        self._wrong_from, self._off = wrong_from, off
        self.asked: list[tuple[int | None, int]] = []

    async def score(self, token_ids: np.ndarray, replica: int) -> tuple[np.ndarray, int | None]:
        logprobs, version = await super().score(token_ids, replica)
        self.asked.append((version, replica))
        is_wrong = self._wrong_from is None or (version is not None and version >= self._wrong_from)
        return logprobs - np.float32(self._off if is_wrong and replica == 1 else 0.0), version


def test_every_replica_is_asked_at_the_start_and_after_every_push(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "learner")
    engine = TwoReplicas()
    with tiny_server(engine) as server:
        run = make_run(tmp_path, server.endpoint)
        train(run, resume=False)
    for version in (None, *range(5)):
        replicas = [replica for asked_version, replica in engine.asked if asked_version == version]
        assert replicas.count(0) == replicas.count(1) > 0, version
    assert f"parity of each replica of the server at {server.endpoint}: mean |Δ logprob| = " in caplog.text
    assert len(metrics_of(run)) == 4


@pytest.mark.parametrize(("wrong_from", "tokens"), [(0, "fixed sequences"), (3, "texts of the step")])
def test_one_wrong_replica_is_named_at_the_start_and_after_a_push(tmp_path: Path, wrong_from: int, tokens: str) -> None:
    with (
        tiny_server(TwoReplicas(wrong_from)) as server,
        pytest.raises(ParityError, match=rf"of {tokens} at its replica 1 is 0\.0015, the bound is 0\.001"),
    ):
        train(make_run(tmp_path, server.endpoint, steps=6), resume=False)


def test_a_first_push_that_changes_one_replica_is_noticed(tmp_path: Path) -> None:
    with (
        tiny_server(TwoReplicas(0, off=1.5e-5)) as server,
        pytest.raises(ParityError, match=r"its logprobs changed by 1\.5e-05 .*the bound is 1e-05"),
    ):
        train(make_run(tmp_path, server.endpoint), resume=False)


def test_what_one_replica_has_always_given_is_no_change(tmp_path: Path) -> None:
    with tiny_server(TwoReplicas(None, off=5e-4)) as server:
        run = make_run(tmp_path, server.endpoint)
        train(run, resume=False)
    assert max(line.get("parity/abs_logprob", 0.0) for line in metrics_of(run)) == pytest.approx(5e-4, rel=0.01)
