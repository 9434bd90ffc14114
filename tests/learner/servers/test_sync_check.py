"""A weight sync that did not arrive is noticed at once, at learning rates whose steps no bound on |Δ logprob| would
see."""

import time
from concurrent.futures import Future
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
from learner.servers.weight_copy import WeightSample
from learner.train import train
from protocol.errors import DeadlineExceeded, ParityError
from protocol.messages import Scores
from protocol.model_files import resolve_model
from tests.fakes import ScriptedEngine
from tests.learner.model_engine import TINY_LIMITS, ModelEngine, tiny_server
from tests.learner.runs import make_run, rows_of

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
        with pytest.raises(ParityError, match=r"version 3 did not reach .* none on the server.*--resume"):
            train(run, resume=False)
    ((newest,),) = rows_of(run, "max(oldest_version)", "state = 'consumed'")  # each group here is of one version
    assert newest == 2


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


def test_a_lost_sync_is_seen_in_bfloat16_through_the_rounding_of_both_sides(tmp_path: Path) -> None:
    with tiny_server(RoundsOtherwise(lost=2)) as server:
        run = msgspec.structs.replace(a_run(tmp_path, server.endpoint), dtype="bfloat16")
        with pytest.raises(ParityError, match="version 2 did not reach"):
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


class Probe:
    """The learner's logprobs before a sync, and after it; answers of servers are there at once."""

    patience_s, patience_key, timeout_s = 0.5, "half of learner.weight_sync.timeout_s", 60.0

    def __init__(self, *logprobs_T: torch.Tensor) -> None:
        self.fleet = SimpleNamespace(max_model_len=64, loop=self, on_wait=lambda: None)
        self._logprobs = iter(logprobs_T)
        self.levels: list[tuple[Any, int, float, str]] = []
        self.recorded: dict[str, float] = {}

    def logprobs(self, sequences: list[list[int]]) -> torch.Tensor:
        assert [len(sequence) for sequence in sequences] == [63]
        return next(self._logprobs)

    def submit(self, scores: Scores | Exception) -> Future[Scores]:
        answer: Future[Scores] = Future()
        if isinstance(scores, Exception):
            answer.set_exception(scores)
        else:
            answer.set_result(scores)
        return answer

    def check_level(self, member: Any, replica: int, difference_T: torch.Tensor, tokens: str) -> None:
        self.levels.append((member, replica, float(difference_T.mean()), tokens))

    def record(self, metrics: dict[str, float]) -> None:
        self.recorded |= metrics


class StaysAsItWas:
    """A server that gives the same logprobs under every version."""

    endpoint, is_draining = "tcp://a:1", False

    def __init__(
        self, *versions: int, num_replicas: int = 1, fail_with: Exception | None = None, quantization: str = ""
    ) -> None:
        self.welcome = SimpleNamespace(num_replicas=num_replicas, dtype="float32", quantization=quantization)
        self.link, self._versions, self._fail_with = self, iter(versions), fail_with
        self.timeouts_s: list[float] = []

    def score(self, token_ids: list[int], timeout_s: float, replica: int) -> Scores | Exception:
        self.timeouts_s.append(timeout_s)
        assert token_ids == list(range(1, 64)), "the end of a sequence, as far as a server scores"
        if self._fail_with is not None and len(self.timeouts_s) > 1:
            return self._fail_with
        logprobs = np.full(62, -0.25 * replica, np.float32)
        return Scores(request_id="1", logprobs=logprobs, policy_version=next(self._versions))


def sync(
    server: Any, num_changed: int, *, num_uncertain: int = 62, changed_frac: float = 1.0, num_joiners: int = 0
) -> Any:
    """Check the sync of version 5, which changed so many of the learner's logprobs, and so much of its weights.

    So many servers join before the check.
    """
    before_T = -1.0 * (torch.arange(62) < num_uncertain)
    probe: Any = Probe(before_T, before_T + 1e-3 * (torch.arange(62) < num_changed))
    check = SyncCheck(probe, ALL, lambda version, dtype: changed_frac)
    check.begin(4, [list(range(64))])
    check.ask_before([server])
    check.ask([server], check.expect(5))
    for _ in range(num_joiners):
        check.ask([server], None)
    check.check()
    return probe


def test_a_server_that_joins_does_not_cancel_the_check_of_the_others() -> None:
    with pytest.raises(ParityError, match="version 5 did not reach"):
        sync(StaysAsItWas(4, 5), 62, num_joiners=1)
    assert sync(StaysAsItWas(4, 5), 0, num_joiners=1).recorded == {"parity/checked": 1.0}


def test_a_server_that_gives_what_it_gave_before_is_judged_where_nearly_every_token_changed_at_the_learner() -> None:
    with pytest.raises(ParityError, match=r"version 5 did not reach .* 56 logprobs changed"):
        sync(StaysAsItWas(4, 5), 56)
    sync(StaysAsItWas(4, 5), 55)


def test_a_server_is_not_judged_by_a_few_tokens() -> None:
    with pytest.raises(ParityError, match=r"version 5 did not reach .* 12 logprobs changed"):
        sync(StaysAsItWas(4, 5), 12, num_uncertain=12)
    sync(StaysAsItWas(4, 5), 11, num_uncertain=11)


def test_each_replica_is_compared_and_named() -> None:
    server = StaysAsItWas(4, 4, 5, 5, num_replicas=2)
    probe = sync(server, 0)
    assert probe.levels == [
        (server, 0, 1.0, "texts of the step"), (server, 1, 0.75, "texts of the step"),
    ]  # fmt: skip
    with pytest.raises(ParityError, match="reach the engine of replica 0 of the server at tcp://a:1"):
        sync(StaysAsItWas(4, 4, 5, 5, num_replicas=2), 62)


def test_a_busy_server_has_the_whole_step_for_what_it_is_asked_before_the_sync() -> None:
    server = StaysAsItWas(4, 5)
    sync(server, 0)
    assert server.timeouts_s == [Probe.timeout_s, Probe.patience_s]


def test_an_answer_that_came_after_the_sync_does_not_stand_for_what_was_before_it() -> None:
    assert sync(StaysAsItWas(5, 5), 62).recorded == {"parity/checked": 0.0}


def test_after_a_step_that_changed_hardly_a_weight_a_server_is_not_judged_whatever_the_learner_gives() -> None:
    sync(StaysAsItWas(4, 5), 62, changed_frac=0.9e-4)


def test_a_quantized_server_is_judged_only_after_steps_that_change_many_weights() -> None:
    sync(StaysAsItWas(4, 5, quantization="fp8"), 62, changed_frac=0.9e-2)
    with pytest.raises(ParityError, match="version 5 did not reach"):
        sync(StaysAsItWas(4, 5, quantization="fp8"), 62, changed_frac=1.1e-2)


def test_a_server_that_is_too_busy_to_score_is_reported_and_nobody_waits_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    probe = sync(StaysAsItWas(4, fail_with=DeadlineExceeded("it did not score")), 62)
    assert probe.recorded == {"parity/checked": 0.0} and probe.levels == []
    (line,) = caplog.messages
    assert line == (
        "parity of version 5 could not be checked: it did not score (half of learner.weight_sync.timeout_s)"
    )


class Steps:
    """Steps of a second each on a clock of its own, of which each call for the learner's logprobs takes 10 ms more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **parity: Any) -> None:
        self.now_s, self.spent_s = 1000.0, 0.0
        monkeypatch.setattr("learner.servers.sync_check.time", SimpleNamespace(monotonic=lambda: self.now_s))
        fleet = SimpleNamespace(on_wait=lambda: None, max_model_len=64, loop=SimpleNamespace(submit=None))
        probe: Any = SimpleNamespace(
            fleet=fleet,
            patience_s=0.2,
            patience_key=Probe.patience_key,
            timeout_s=60.0,
            logprobs=self._logprobs,
            record=lambda _: None,
        )
        self._check = SyncCheck(probe, ParityConfig(**parity), lambda version, dtype: 1.0)

    def _logprobs(self, sequences: list[list[int]]) -> torch.Tensor:
        self.now_s, self.spent_s = self.now_s + 0.01, self.spent_s + 0.01
        return torch.zeros(62)

    def checked(self, num_steps: int, step_s: float = 1.0) -> list[int]:
        """Which of so many versions were due for a check; no server answers."""
        versions = []
        for version in range(num_steps):
            self._check.begin(version, [list(range(64))])
            expected = self._check.expect(version + 1)
            self._check.ask([], expected)
            self._check.check()
            versions += [version + 1] if expected is not None else []
            self.now_s += step_s
        return versions


@pytest.mark.parametrize(("every_steps", "versions"), [(1, [1, 2, 3, 4, 5, 6]), (3, [3, 6]), (0, [])])
def test_a_check_is_made_as_often_as_the_config_says(
    monkeypatch: pytest.MonkeyPatch, every_steps: int, versions: list[int]
) -> None:
    assert Steps(monkeypatch, every_steps=every_steps).checked(6) == versions


def test_where_steps_are_short_so_many_syncs_are_left_out_that_checks_take_their_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = Steps(monkeypatch, max_time_share=0.1)
    versions = steps.checked(500, step_s=0.005)
    assert len(versions) > 10 and 0.08 < steps.spent_s / (steps.now_s - 1000.0) <= 0.11


def test_checks_that_are_never_made_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Steps(monkeypatch).checked(8)
    assert caplog.text.count("5 weight syncs in a row could not be checked") == 1


def test_a_wait_for_answers_keeps_the_other_ranks_patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_check, "WAIT_SLICE_S", 0.01)
    calls: list[None] = []
    fleet = SimpleNamespace(on_wait=lambda: calls.append(None), max_model_len=64)
    probe: Any = SimpleNamespace(fleet=fleet, patience_s=0.2, timeout_s=60.0, logprobs=lambda sequences: torch.zeros(1))
    check = SyncCheck(probe, ALL, lambda version, dtype: 1.0)
    check.begin(0, [[1, 2]])
    monkeypatch.setattr(SyncCheck, "_ask", lambda self, *_: {(None, 0): [Future()]})
    check.ask_before([])
    check.expect(1)
    assert len(calls) > 3
