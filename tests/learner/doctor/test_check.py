"""`learner check`: prompts, rewards of correct answers and of noise, the size of the run, the doctor, and a trial."""

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

import learner.doctor.check as module
from learner.config import LearnerRun
from learner.doctor.check import NUM_STEPS, check, findings_of, reward_findings, trial
from learner.report.summary import read_metrics
from learner.report.trackers import is_installed
from learner.run_inputs import RunInputs
from learner.train import train
from protocol.config import load_config
from protocol.doctor import ok, problem
from tests.learner.in_process import run_here
from tests.learner.model_engine import tiny_server
from tests.learner.own_task import ROWS, write_task
from tests.learner.runs import make_run

EVERY = ("--learner.evaluation.every-steps", "4", "--learner.evaluation.num-prompts", "7")


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "examine", lambda run: [ok("server", run.endpoint)])


def a_run(tmp_path: Path, *flags: str, functions: tuple[str, ...] = ("right",), rows: list[Any] = ROWS) -> LearnerRun:
    return load_config(LearnerRun, [write_task(tmp_path, functions, rows), *flags], "learner check")


def results_of(run: LearnerRun, subject: str) -> list[tuple[str, str]]:
    return [(found.verdict, found.text) for found in check(run) if found.subject == subject]


def test_prompts_rewards_and_the_run_are_reported_before_servers_are_contacted(tmp_path: Path) -> None:
    found = list(check(a_run(tmp_path)))
    by_subject = {one.subject: one.text for one in found}
    assert [one.verdict for one in found[:-1]] == ["ok"] * (len(found) - 1) and found[-2].subject == "server"
    assert (found[-1].subject, found[-1].verdict) == ("time", "unknown") and "--trial" in found[-1].text
    assert by_subject["prompts"].startswith("10 prompts in ") and by_subject["prompts"].endswith("has 3 tokens")
    assert len([subject for subject in by_subject if subject.startswith("row ")]) == 3
    (row, text) = next((subject, text) for subject, text in by_subject.items() if subject.startswith("row "))
    assert text == f"3 tokens: '{ROWS[int(row[4:])]['prompt']}'"
    assert by_subject["rewards"] == "right: 1 for the column 'answer', 0 for noise"
    assert by_subject["course"] == (
        "6 steps of 5 groups of 4 completions: each prompt 3 times, 120 completions, at most 960 sampled tokens, at "
        "most 2 versions behind"
    )


def test_a_reward_that_prefers_noise_is_questioned(tmp_path: Path) -> None:
    longer = [row | {"answer": "7" * 99} for row in ROWS]
    (_, (verdict, text)) = results_of(a_run(tmp_path, functions=("shortness",), rows=longer), "rewards")
    assert verdict == "unknown" and text.startswith("right answers score no higher than noise (-99 and -")


def test_groups_of_the_first_right_answer_are_scored_after_reasoning_that_the_prompt_opened(tmp_path: Path) -> None:
    functions = "--learner.reward.functions", "exact_match", f"{tmp_path}/rewards.py:deviation"
    run_inputs = RunInputs(a_run(tmp_path, *functions, rows=[row | {"answer": [row["answer"], "0"]} for row in ROWS]))
    prompt = run_inputs.prompts.prompt_at(0)
    started: Any = {"prompt": [{"role": "assistant", "content": "Well: <think>"}], "prefill": "Well: <think>"}
    for change in ({}, {"opens_reasoning": True}, started):
        (exact, _) = reward_findings(run_inputs, [msgspec.structs.replace(prompt, **change)])
        assert (exact.verdict, exact.text) == ("ok", "exact_match: 1 for the column 'answer', 0 for noise")


def test_functions_see_the_first_step_of_the_run(tmp_path: Path) -> None:
    first, *_ = results_of(a_run(tmp_path, functions=("progress",)), "rewards")
    assert first == ("ok", "progress: 0 for the column 'answer', 0 for noise")


@pytest.mark.parametrize("nothing", [None, [], " "], ids=str)
def test_data_without_answers_is_scored_only_on_noise(tmp_path: Path, nothing: Any) -> None:
    rows = [{"prompt": row["prompt"], "answer": nothing} for row in ROWS]
    first, second = results_of(a_run(tmp_path, functions=("shortness",), rows=rows), "rewards")
    assert first[0] == "ok" and "nothing for the column 'answer'" in first[1]
    assert second == ("unknown", "none of the first 8 prompts has an 'answer', so right answers could not be rated")


@pytest.mark.parametrize(
    ("flags", "subject", "expected"),
    [
        (("--learner.sampling.max-tokens", "100000"), "prompts", "is 100,003 tokens, more than the model's"),
        (("--learner.data.prompt-column", "question"), "prompts", "question"),
        (("--learner.reward.functions", "{tmp}/rewards.py:right", "{tmp}/rewards.py:broken"), "rewards",
         "broken raised KeyError"),
        (("--learner.reward.functions", "{tmp}/rewards.py:absent"), "rewards", "holds nothing under the name 'absent'"),
        (("--learner.reward.functions", "{tmp}/rewards.py:unreachable"), "rewards",
         "unreachable raised ConnectionRefusedError"),
        (("--learner.reward.functions", "passes_tests", "--learner.reward.unconfined-programs"), "prompts",
         'contains "passes_tests", which reads the column \'tests\', but the columns of '),
        (("--learner.warm-start.steps", "1", "--learner.warm-start.answer-column", "gold"), "warm start",
         "none in column 'gold'"),
        (("--learner.advantage.function", "missing.py:f"), "plug-ins",
         "learner.advantage.function = 'missing.py:f': importing"),
        ((*EVERY, "--learner.evaluation.path", "absent.jsonl"), "evaluation", "absent.jsonl"),
        pytest.param(
            ("--learner.report.trackers", "wandb"), "trackers", "contains 'wandb', which is not installed",
            marks=pytest.mark.skipif(is_installed("wandb"), reason="W&B is installed here"),
        ),
    ],
)  # fmt: skip
def test_errors_that_would_stop_a_run_are_problems_with_a_remedy(
    tmp_path: Path, flags: tuple[str, ...], subject: str, expected: str
) -> None:
    found = check(a_run(tmp_path, *(flag.format(tmp=tmp_path) for flag in flags)))
    problems = [one for one in found if one.verdict == "problem"]
    assert {one.subject for one in problems} == {subject}
    assert all(expected in one.text and one.remedy for one in problems)


def test_planned_evaluations_are_reported(tmp_path: Path) -> None:
    assert results_of(a_run(tmp_path), "evaluation") == []
    ((verdict, text),) = results_of(a_run(tmp_path, *EVERY, "--learner.evaluation.at-start"), "evaluation")
    assert verdict == "ok" and text.startswith("7 prompts of ")
    assert "greedy, evaluated 3 times at http://127.0.0.1:8000/v1" in text


def test_the_command_continues_with_the_doctor_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "examine", lambda run: [problem("port", "no", "mend it")])
    done = run_here("check", write_task(tmp_path), "--json")
    assert done.returncode == 1 and done.stderr.endswith("1 problem found\n")
    found = json.loads(done.stdout)
    assert [one["subject"] for one in found if one["verdict"] == "problem"] == ["port"]
    assert {"config", "prompts", "rewards", "course"} <= {one["subject"] for one in found}


def test_a_trial_measures_with_a_server_and_leaves_no_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiny_server() as server:
        run = make_run(tmp_path, server.endpoint, steps=300)
        parity, time = trial(run)
        output = capsys.readouterr()
        assert (
            output.out == "" and output.err.count("| reward ") == NUM_STEPS and f"Step   {NUM_STEPS}/300" in output.err
        )
        assert list(tmp_path.iterdir()) == []
        train(make_run(tmp_path, server.endpoint, steps=2), resume=False)
    assert len(read_metrics(tmp_path / "run")) == 2, "the server must be free for the run"
    assert parity.verdict == "ok" and float(re.findall(r"\| of at most (\S+)", parity.text)[0]) < 1e-3
    assert time.verdict == "ok" and time.text.startswith("300 steps of ")
    assert "the server idle for" in time.text and "(median of 5 steps)" in time.text


def test_the_estimated_time_is_the_median_of_warm_steps_times_the_number_of_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path, "tcp://127.0.0.1:1", steps=1000)
    seconds = [60.0, 9.0, 9.0, 3.0, 3.0, 3.0, 3.0, 50.0]
    others = {
        "perf/completion_tokens_per_s": 100.0, "rollout/completion_length_mean": 8.0, "perf/learner_idle_frac": 0.25
    }  # fmt: skip
    (time,) = findings_of(run, [others | {"time/step": each} for each in seconds])
    assert time.text == (
        "1,000 steps of 3.00 s, about 50 min 00 s without evaluations; 100 completion tokens/s, 8 tokens each, the "
        "learner idle for 25% (median of 5 steps)"
    )


def test_a_trial_without_a_server_is_a_problem_with_a_remedy(tmp_path: Path) -> None:
    run = make_run(tmp_path, "tcp://127.0.0.1:1", connect_timeout_s=0.2)
    (found,) = trial(run)
    assert found.verdict == "problem" and found.subject == "trial" and "connect_timeout_s" in str(found)


@pytest.mark.parametrize("is_well", [True, False])
def test_a_trial_runs_only_without_other_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_well: bool
) -> None:
    finding = ok("port", "yes") if is_well else problem("port", "no", "mend it")
    monkeypatch.setattr(module, "examine", lambda run: [finding])
    monkeypatch.setattr(module, "trial", lambda run: [ok("time", "for long")])
    *_, last = check(make_run(tmp_path, "tcp://127.0.0.1:1"), with_trial=True)
    assert (last.verdict, last.text) == (
        ("ok", "for long") if is_well else ("unknown", "not measured because of the problems above")
    )
