"""A weight sync that did not arrive is noticed at once, at learning rates whose steps no bound on |Δ logprob| would see."""

import sqlite3
import time
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from learner.config import LearnerRun
from learner.servers.sync_check import SyncCheck
from learner.train import train
from protocol.errors import ParityError
from protocol.messages import Scores
from protocol.model_files import resolve_model
from tests.fakes import ScriptedEngine
from tests.learner.model_engine import ModelEngine, tiny_server
from tests.learner.test_train import make_run, metrics_of

TINY_STEPS = {"learning_rate": 1e-6}
"""A step changes a logprob by some 3e-4, a third of the bound in float32."""


class LosesOneSync(ModelEngine):
    """Takes every byte of one version, says that it has it, and goes on with the weights of before."""

    def __init__(self, lost: int | None) -> None:
        super().__init__(resolve_model("tiny:digits"))
        self._lost = lost

    async def set_version(self, version: int) -> None:
        if version == self._lost:
            await ScriptedEngine.set_version(self, version)
        else:
            await super().set_version(version)


def a_run(tmp_path: Path, endpoint: str, **learner: Any) -> LearnerRun:
    settings = {"steps": 6, "optimizer": TINY_STEPS, "max_staleness": 1}
    return make_run(tmp_path, endpoint, **settings | learner)


def newest_trained_on(run: LearnerRun) -> int:
    """The newest version whose tokens were consumed; each group of this engine is of one version."""
    with closing(sqlite3.connect(Path(run.run_dir) / "ledger.db")) as ledger:
        (version,) = ledger.execute("select max(oldest_version) from groups where state = 'consumed'").fetchone()
    return version


def test_syncs_that_arrive_change_nearly_every_logprob_on_both_sides(tmp_path: Path) -> None:
    with tiny_server(LosesOneSync(None)) as server:
        run = a_run(tmp_path, server.endpoint)
        train(run, resume=False)
    measured = [line for line in metrics_of(run) if "parity/unchanged_frac" in line]
    assert len(measured) >= 4
    for line in measured:
        assert line["parity/unchanged_frac"] < 0.1 and line["parity/abs_logprob"] < 1e-4
        assert line["parity/server_change"] == pytest.approx(line["parity/learner_change"], rel=0.1)


@pytest.mark.parametrize("overlap", [False, True])
def test_one_sync_that_did_not_arrive_ends_the_run_before_its_tokens_are_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    ask = SyncCheck.ask

    def ask_late(*args: Any) -> None:
        time.sleep(0.3 * overlap)  # groups of the new version are there before its check has been asked for
        ask(*args)

    monkeypatch.setattr(SyncCheck, "ask", ask_late)
    with tiny_server(LosesOneSync(3)) as server:
        run = a_run(tmp_path, server.endpoint, push={"overlap": overlap})
        with pytest.raises(
            ParityError, match=r"version 3 did not arrive .* 100% exactly the logprobs of before.*--resume"
        ):
            train(run, resume=False)
    assert newest_trained_on(run) == 2


def test_a_step_that_changes_no_weight_is_no_lost_sync(tmp_path: Path) -> None:
    """Where every completion of a group has the same reward there is no gradient."""
    with tiny_server(LosesOneSync(3)) as server:
        run = a_run(tmp_path, server.endpoint, reward={"functions": [f"{__file__}:always_one"]})
        train(run, resume=False)
    assert len(metrics_of(run)) == 6


def always_one(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def test_a_check_is_made_as_often_as_the_config_says(tmp_path: Path) -> None:
    for every_steps, steps in ((3, [3, 6]), (0, [])):
        with tiny_server(LosesOneSync(None)) as server:
            run = a_run(tmp_path / str(every_steps), server.endpoint, steps=7, parity={"every_steps": every_steps})
            train(run, resume=False)
        lines = metrics_of(run)
        found = [place for place, line in enumerate(lines, start=1) if "parity/unchanged_frac" in line]
        # A version is checked before its first tokens are trained on: in the step after, or the one after that.
        assert len(found) == len(steps)
        assert all(step < one <= step + 2 for step, one in zip(steps, found, strict=True))


class Probe:
    """The learner's logprobs before a sync, and after it; answers of servers are there at once."""

    patience_s = 0.0

    def __init__(self, *logprobs_T: torch.Tensor) -> None:
        self.fleet = SimpleNamespace(max_model_len=64, loop=self)
        self._logprobs = iter(logprobs_T)

    def logprobs(self, sequences: list[list[int]]) -> torch.Tensor:
        assert [len(sequence) for sequence in sequences] == [63]
        return next(self._logprobs)

    def submit(self, scores: Scores) -> Future[Scores]:
        answer: Future[Scores] = Future()
        answer.set_result(scores)
        return answer

    def check_level(self, *_: Any) -> None: ...

    def note(self, *_: Any) -> None: ...


class StaysAsItWas:
    """A server that gives the same logprobs under every version."""

    endpoint = "tcp://a:1"
    welcome = SimpleNamespace(num_replicas=1)

    def __init__(self, *versions: int) -> None:
        self.link, self._versions = self, iter(versions)

    def score(self, token_ids: list[int], *_: Any) -> Scores:
        assert token_ids == list(range(1, 64)), "the end of a sequence, as far as a server scores"
        return Scores(request_id="1", logprobs=np.zeros(62, np.float32), policy_version=next(self._versions))


def sync(server: Any, num_changed: int, *, is_changed: bool = True) -> None:
    """Check the sync of version 5, which changed so many of the learner's logprobs."""
    change_T = 1e-3 * (torch.arange(62) < num_changed)
    check: Any = SyncCheck(Probe(torch.zeros(62), change_T), every_steps=1)  # type: ignore[arg-type]
    check.begin(4, [list(range(64))])
    check.ask_before([server])
    check.ask([server], check.expect(5, is_changed=is_changed))
    check.check()


def test_a_server_that_gives_what_it_gave_before_is_not_judged_by_a_few_tokens() -> None:
    with pytest.raises(ParityError, match=r"version 5 did not arrive .* of 12 tokens"):
        sync(StaysAsItWas(4, 5), 12)
    sync(StaysAsItWas(4, 5), 11)


def test_an_answer_that_came_after_the_sync_does_not_stand_for_what_was_before_it() -> None:
    sync(StaysAsItWas(5, 5), 62)


def test_after_a_step_without_an_update_a_server_is_not_judged_whatever_the_learner_gives() -> None:
    sync(StaysAsItWas(4, 5), 62, is_changed=False)
