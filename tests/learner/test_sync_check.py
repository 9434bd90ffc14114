"""A weight sync that did not arrive is noticed at once, at learning rates whose steps no bound on |Δ logprob| would see."""

import sqlite3
import time
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from inference_server.engine.interface import EngineLimits
from learner.config import LearnerRun, ParityConfig
from learner.servers import sync_check
from learner.servers.sync_check import SyncCheck
from learner.servers.weight_transfer import WeightSample
from learner.train import train
from protocol.errors import ParityError
from protocol.messages import Scores
from protocol.model_files import resolve_model
from tests.fakes import ScriptedEngine
from tests.learner.model_engine import TINY_LIMITS, ModelEngine, tiny_server
from tests.learner.runs import make_run, metrics_of

ALL = ParityConfig(max_time_share=1.0)
TINY_STEPS = {"learning_rate": 1e-6}
"""A step changes a logprob by some 3e-4, a third of the bound in float32."""


class LosesOneSync(ModelEngine):
    """Takes every byte of one version, says that it has it, and goes on with the weights of before."""

    def __init__(self, lost: int | None, limits: EngineLimits = TINY_LIMITS) -> None:
        super().__init__(resolve_model("tiny:digits"), limits)
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
        assert line["parity/checked"] == 1
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
        run = a_run(tmp_path, server.endpoint, weight_sync={"overlap_with_training": overlap})
        with pytest.raises(
            ParityError, match=r"version 3 did not arrive .* 100% of these logprobs are exactly as before.*--resume"
        ):
            train(run, resume=False)
    assert newest_trained_on(run) == 2


class RoundsOtherwise(LosesOneSync):
    """In bfloat16, by another attention kernel and with a longer row than the learner's."""

    def __init__(self, lost: int | None = None) -> None:
        super().__init__(lost, msgspec.structs.replace(TINY_LIMITS, dtype="bfloat16"))
        self.model.to(torch.bfloat16).set_attn_implementation("eager")

    async def score(self, token_ids: np.ndarray, replica: int) -> tuple[np.ndarray, int | None]:
        ids = torch.from_numpy(token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logprobs_TV = (
                self.model(torch.cat([ids, ids[:, :5]], 1)).logits[0, : ids.shape[1] - 1].float().log_softmax(-1)
            )
        return logprobs_TV.gather(1, ids[0, 1:, None])[:, 0].numpy(), self.version


@pytest.mark.slow
def test_ever_smaller_steps_raise_no_alarm_in_bfloat16(tmp_path: Path) -> None:
    """At the end few weights change in bfloat16, which one side may round away and the other not."""
    with tiny_server(RoundsOtherwise()) as server:
        decaying = {"learning_rate": 3e-7, "schedule": "cosine"}
        run = a_run(tmp_path, server.endpoint, steps=25, optimizer=decaying)
        train(msgspec.structs.replace(run, dtype="bfloat16"), resume=False)
    assert len(metrics_of(run)) == 25


def test_a_lost_sync_is_seen_in_bfloat16_through_the_rounding_of_both_sides(tmp_path: Path) -> None:
    with tiny_server(RoundsOtherwise(lost=2)) as server:
        run = msgspec.structs.replace(a_run(tmp_path, server.endpoint), dtype="bfloat16")
        with pytest.raises(ParityError, match="version 2 did not arrive"):
            train(run, resume=False)


def test_a_sample_tells_how_much_of_the_policy_a_version_changed_for_a_dtype() -> None:
    sample = WeightSample(torch.float32)
    large, small = torch.ones(400, 300), torch.ones(10)
    for version, change in enumerate((0.0, 1.0, 1e-6, 0.0)):
        large[:100] += change  # a quarter of it
        list(sample.watch(version, {"large": large, "small": small}.items()))
        if version:
            in_float32, in_bfloat16 = (sample.changed_frac(version, dtype) for dtype in (torch.float32, torch.bfloat16))
            assert in_float32 == pytest.approx(0.25 if change else 0.0, abs=0.01)
            assert in_bfloat16 == pytest.approx(0.25 if change == 1 else 0.0, abs=0.01)
    assert sample.changed_frac(1, torch.float32) == 0.0  # forgotten


def test_a_step_that_changes_no_weight_is_no_lost_sync(tmp_path: Path) -> None:
    """Where every completion of a group has the same reward there is no gradient."""
    with tiny_server(LosesOneSync(3)) as server:
        run = a_run(tmp_path, server.endpoint, reward={"functions": [f"{__file__}:always_one"]})
        train(run, resume=False)
    assert len(metrics_of(run)) == 6


def always_one(completions: list[str], **_: Any) -> list[float]:
    return [1.0] * len(completions)


def test_checks_that_are_never_made_are_counted_and_reported_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(SyncCheck, "ask_before", lambda self, members: None)
    with tiny_server(LosesOneSync(None)) as server:
        run = a_run(tmp_path, server.endpoint, steps=8)
        train(run, resume=False)
    lines = [line for line in metrics_of(run) if "parity/checked" in line]
    assert len(lines) >= 5 and not any(line["parity/checked"] for line in lines)
    assert caplog.text.count("5 weight syncs in a row could not be checked") == 1


def test_a_wait_for_answers_keeps_the_other_ranks_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_check, "WAIT_SLICE_S", 0.01)
    calls: list[float] = []
    fleet = SimpleNamespace(on_wait=lambda: calls.append(time.monotonic()), max_model_len=64)
    probe: Any = SimpleNamespace(fleet=fleet, patience_s=0.2, timeout_s=60.0, logprobs=lambda sequences: torch.zeros(1))
    check = SyncCheck(probe, ALL, lambda version, dtype: 1.0)
    check.begin(0, [[1, 2]])
    monkeypatch.setattr(SyncCheck, "_ask", lambda self, *_: {(None, 0): [Future()]})
    check.ask_before([])
    check.expect(1)
    assert len(calls) > 3


def test_where_steps_are_short_so_many_syncs_are_left_out_that_checks_take_their_share() -> None:
    def logprobs(sequences: list[list[int]]) -> torch.Tensor:
        time.sleep(0.01)
        return torch.zeros(62)

    fleet = SimpleNamespace(on_wait=lambda: None, max_model_len=64, loop=SimpleNamespace(submit=None))
    probe: Any = SimpleNamespace(fleet=fleet, patience_s=0.2, timeout_s=60.0, logprobs=logprobs, record=lambda _: None)
    check = SyncCheck(probe, ParityConfig(max_time_share=0.1), lambda version, dtype: 1.0)
    began_at, version, num_checks, spent_s = time.monotonic(), 0, 0, 0.0
    while (total_s := time.monotonic() - began_at) < 1.5:
        started_at = time.monotonic()
        check.begin(version, [list(range(64))])
        expected = check.expect(version + 1)
        check.ask([], expected)
        check.check()
        spent_s += time.monotonic() - started_at
        num_checks += expected is not None
        version += 1
        time.sleep(0.005)
    assert num_checks >= 3 and spent_s / total_s < 0.15
    assert version > 5 * num_checks


@pytest.mark.slow
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

    patience_s, timeout_s = 0.5, 60.0

    def __init__(self, *logprobs_T: torch.Tensor) -> None:
        self.fleet = SimpleNamespace(max_model_len=64, loop=self, on_wait=lambda: None)
        self._logprobs = iter(logprobs_T)

    def logprobs(self, sequences: list[list[int]]) -> torch.Tensor:
        assert [len(sequence) for sequence in sequences] == [63]
        return next(self._logprobs)

    def submit(self, scores: Scores) -> Future[Scores]:
        answer: Future[Scores] = Future()
        answer.set_result(scores)
        return answer

    def check_level(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...


class StaysAsItWas:
    """A server that gives the same logprobs under every version."""

    endpoint = "tcp://a:1"
    welcome = SimpleNamespace(num_replicas=1, dtype="float32")

    def __init__(self, *versions: int) -> None:
        self.link, self._versions = self, iter(versions)
        self.timeouts_s: list[float] = []

    def score(self, token_ids: list[int], timeout_s: float, _replica: int) -> Scores:
        self.timeouts_s.append(timeout_s)
        assert token_ids == list(range(1, 64)), "the end of a sequence, as far as a server scores"
        return Scores(request_id="1", logprobs=np.zeros(62, np.float32), policy_version=next(self._versions))


def sync(server: Any, num_changed: int, *, num_uncertain: int = 62, changed_frac: float = 1.0) -> None:
    """Check the sync of version 5, which changed so many of the learner's logprobs, and so much of its weights."""
    before_T = -1.0 * (torch.arange(62) < num_uncertain)
    probe: Any = Probe(before_T, before_T + 1e-3 * (torch.arange(62) < num_changed))
    check = SyncCheck(probe, ALL, lambda version, dtype: changed_frac)
    check.begin(4, [list(range(64))])
    check.ask_before([server])
    check.ask([server], check.expect(5))
    check.check()


def test_a_server_that_gives_what_it_gave_before_is_judged_where_nearly_every_token_changed_at_the_learner() -> None:
    with pytest.raises(ParityError, match=r"version 5 did not arrive .* of 56 tokens"):
        sync(StaysAsItWas(4, 5), 56)
    sync(StaysAsItWas(4, 5), 55)


def test_a_server_is_not_judged_by_a_few_tokens() -> None:
    with pytest.raises(ParityError, match=r"version 5 did not arrive .* of 12 tokens"):
        sync(StaysAsItWas(4, 5), 12, num_uncertain=12)
    sync(StaysAsItWas(4, 5), 11, num_uncertain=11)


def test_a_busy_server_has_the_whole_step_for_what_it_is_asked_before_the_sync() -> None:
    server = StaysAsItWas(4, 5)
    sync(server, 0)
    assert server.timeouts_s == [Probe.timeout_s, Probe.patience_s]


def test_an_answer_that_came_after_the_sync_does_not_stand_for_what_was_before_it() -> None:
    sync(StaysAsItWas(5, 5), 62)


def test_after_a_step_that_changed_hardly_a_weight_a_server_is_not_judged_whatever_the_learner_gives() -> None:
    sync(StaysAsItWas(4, 5), 62, changed_frac=0.9e-4)
