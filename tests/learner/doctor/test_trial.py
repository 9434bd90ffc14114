"""`learner check --trial`: the first steps of a run, for real, leave nothing behind and say how long all would take."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import learner.doctor.check as module
from learner.config import LearnerRun
from learner.doctor.check import NUM_STEPS, check, findings_of, trial
from learner.report.summary import read_metrics
from learner.train import train
from protocol.doctor import Finding, ok, problem
from protocol.model_files import resolve_model
from tests.learner.model_engine import ModelEngine, tiny_server
from tests.learner.runs import make_run


def test_a_trial_measures_with_a_server_and_leaves_nothing_behind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiny_server(ModelEngine(resolve_model("tiny:digits"))) as server:
        run = make_run(tmp_path, server.endpoint, steps=300)
        parity, time = trial(run)
        said = capsys.readouterr()
        assert said.out == "" and said.err.count("| reward ") == NUM_STEPS and f"Step   {NUM_STEPS}/300" in said.err
        assert list(tmp_path.iterdir()) == []
        train(make_run(tmp_path, server.endpoint, steps=2), resume=False)
    assert len(read_metrics(tmp_path / "run")) == 2, "the server is there for the run"
    assert parity.verdict == "ok" and float(re.findall(r"\| of at most (\S+)", parity.text)[0]) < 1e-3
    assert time.verdict == "ok" and time.text.startswith("300 steps of ")
    assert "the server idle for" in time.text and "(median of 5 steps)" in time.text


def test_the_time_of_all_is_the_median_of_the_warm_steps_times_their_number(tmp_path: Path) -> None:
    run = make_run(tmp_path, "tcp://127.0.0.1:1", steps=1000)
    seconds = [60.0, 9.0, 9.0, 3.0, 3.0, 3.0, 3.0, 50.0]
    others = {
        "perf/completion_tokens_per_s": 100.0, "rollout/completion_length_mean": 8.0, "perf/learner_idle_frac": 0.25
    }  # fmt: skip
    (time,) = findings_of(run, [others | {"time/step": each} for each in seconds])
    assert time.text == (
        "1,000 steps of 3.00 s, about 50 min 00 s without evaluations; 100 completion tokens/s, 8 tokens each, the learner idle for 25% "
        "(median of 5 steps)"
    )


def test_a_trial_without_a_server_is_a_problem_with_its_remedy(tmp_path: Path) -> None:
    run = make_run(tmp_path, "tcp://127.0.0.1:1", connect_timeout_s=0.2)
    (found,) = trial(run)
    assert found.verdict == "problem" and found.subject == "trial" and "connect_timeout_s" in str(found)


@pytest.mark.parametrize("is_well", [True, False])
def test_only_where_all_else_is_well_and_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_well: bool
) -> None:
    def examined(run: LearnerRun) -> Iterator[Finding]:
        yield ok("port", "yes") if is_well else problem("port", "no", "mend it")

    def tried(run: LearnerRun) -> Iterator[Finding]:
        yield ok("time", "for long")

    monkeypatch.setattr(module, "examine", examined)
    monkeypatch.setattr(module, "trial", tried)
    run = make_run(tmp_path, "tcp://127.0.0.1:1")
    *_, last = check(run, with_trial=True)
    assert (last.verdict, last.text) == (
        ("ok", "for long") if is_well else ("unknown", "not measured because of the problems above")
    )
    *_, last = check(run)
    assert last.verdict == "unknown" and "--trial" in last.text
