"""Evaluations of a run that trains: when they are begun, who answers them, what they cost, what a death leaves."""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from learner.config import LearnerRun
from learner.evaluation import results
from learner.evaluation.background import Evaluations, PartialHeader, PartialResults
from learner.evaluation.openai_client import PromptAnswers
from learner.evaluation.results import FILE, Evaluation, earlier
from learner.report.summary import read_metrics
from learner.rewards.workers import RewardWorkers
from learner.storage.checkpoint import best_models, complete_checkpoints, remove_checkpoint
from learner.storage.run_dir import RunDir
from learner.train import train
from protocol.config import load_config
from protocol.errors import ConfigError
from protocol.model_files import resolve_model
from tests.fakes import ServerThread
from tests.learner.model_engine import ModelEngine, tiny_server
from tests.learner.mortal_learner import Death, Life
from tests.learner.openai_server import OpenAIServer, openai_server
from tests.learner.runs import make_run
from tests.ports import free_port

NUM_PROMPTS = 8
STEPS = 6


@pytest.fixture
def engine() -> ModelEngine:
    return ModelEngine(resolve_model("tiny:digits"))


@pytest.fixture
def server(engine: ModelEngine) -> Iterator[ServerThread]:
    with tiny_server(engine) as server:
        yield server


@pytest.fixture
def openai(server: ServerThread) -> Iterator[OpenAIServer]:
    with openai_server() as openai:
        openai.of(server)
        openai.answer = lambda prompt, count: [prompt[-2:0:-1]] * count
        yield openai


def evaluating(
    tmp_path: Path, server: ServerThread, url: str, evaluation: dict[str, Any], **learner: Any
) -> LearnerRun:
    evaluation = {"url": url, "every_steps": 2, "timeout_s": 20, "max_concurrent": 2} | evaluation
    return make_run(tmp_path, server.endpoint, steps=STEPS, evaluation=evaluation, **learner)


def made_by(run: LearnerRun) -> list[Evaluation]:
    return earlier(Path(run.run_dir) / FILE)


def test_a_run_is_evaluated_before_its_first_step_every_so_many_and_after_its_last(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer
) -> None:
    run = evaluating(tmp_path, server, openai.url, {"at_start": True, "every_steps": 4, "pin_policy": True})
    train(run, resume=False)
    made = made_by(run)
    assert [one.step for one in made] == [0, 4, STEPS]
    assert len(openai.requests) == 3 * NUM_PROMPTS
    asked = Counter(tuple(request["prompt"]) for request in openai.requests)
    assert len(asked) == NUM_PROMPTS and set(asked.values()) == {3}
    rewards = [one.reward.mean for one in made if one.reward is not None]
    assert (
        rewards == [made[0].rewards_P[0]] * 3
        and made[2].difference is not None
        and made[2].difference_to_first is not None
    )
    metrics = read_metrics(Path(run.run_dir))
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert metrics[-1]["evaluation/step"] == STEPS and metrics[-1]["evaluation/reward"] == rewards[-1]
    assert metrics[-2]["evaluation/step"] == 0 and metrics[1]["evaluation/step"] == 0
    assert "evaluation/seconds" in metrics[1], "it ended in step 1, whose push it held"
    assert not (tmp_path / "run" / "evaluation.partial.jsonl").exists()


@pytest.mark.parametrize("pin", [True, False])
def test_a_pinned_evaluation_is_answered_by_the_version_of_its_step(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer, pin: bool
) -> None:
    openai.delay_s = 0.3
    run = evaluating(tmp_path, server, openai.url, {"pin_policy": pin, "max_concurrent": 1})
    train(run, resume=False)
    versions = {one.step: one.versions for one in made_by(run)}
    slowdowns = [
        line["evaluation/training_slowdown"]
        for line in read_metrics(Path(run.run_dir))
        if "evaluation/training_slowdown" in line
    ]
    if pin:
        assert versions == {step: (step, step) for step in (2, 4, 6)}
        assert len(slowdowns) == 2 and min(slowdowns) > 1, "a step that waits beside those that do not"
    else:
        assert versions[2] is not None and versions[2][0] in (2, 3) and versions[2][1] > versions[2][0]
        assert versions[6] == (6, 6)


def test_the_model_that_is_best_at_evaluations_stays(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer
) -> None:
    engine = openai.engine
    assert engine is not None
    openai.answer = lambda prompt, count: [prompt[-2:0:-1] if engine.version == 2 else "1"] * count
    checkpoint = {"every_steps": 2, "keep_last": 1, "best_by": "evaluation"}
    run = evaluating(tmp_path, server, openai.url, {"pin_policy": True}, checkpoint=checkpoint)
    train(run, resume=False)
    directory = RunDir.checkpoints_of(run.run_dir)
    assert [path.name for path in complete_checkpoints(directory)] == ["step-000006"]
    (best,) = best_models(directory).values()
    rewards = {one.step: one.reward.mean for one in made_by(run) if one.reward is not None}
    assert best.judged_by == "evaluation" and best.step == 2 and best.score == rewards[2] > max(rewards[4], rewards[6])


def test_a_step_is_judged_or_awaited_at_every_moment(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[Evaluations] = []
    scores: list[dict[int, float | None]] = []
    start, note = Evaluations.start, results.record_evaluation

    def watched(self: Evaluations, workers: RewardWorkers) -> None:
        began.append(self)
        start(self, workers)

    def asked_meanwhile(path: Path, made: Evaluation) -> Evaluation:
        scores.append(began[0].scores())
        return note(path, made)

    monkeypatch.setattr(Evaluations, "start", watched)
    monkeypatch.setattr(results, "record_evaluation", asked_meanwhile)
    train(evaluating(tmp_path, server, openai.url, {"every_steps": 3, "pin_policy": True}), resume=False)
    assert [known[step] for known, step in zip(scores, (3, 6), strict=True)] == [None, None]
    assert None not in began[0].scores().values() and set(began[0].scores()) == {3, 6}


def test_what_is_due_while_another_is_under_way_is_left_out_and_reported(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer, caplog: pytest.LogCaptureFixture
) -> None:
    openai.delay_s = 1.0
    run = evaluating(tmp_path, server, openai.url, {"every_steps": 1, "max_concurrent": 1, "num_prompts": 3})
    train(run, resume=False)
    steps = [one.step for one in made_by(run)]
    left_out = [line["step"] - 1 for line in read_metrics(Path(run.run_dir)) if line.get("evaluation/left_out")]
    assert steps[0] == 1 and steps[-1] == STEPS and set(left_out) | set(steps) >= set(range(1, STEPS - 1))
    assert "skipping the evaluation after step 2 (that of step 1 still running)" in caplog.text


def test_an_evaluation_that_fails_is_reported_and_training_goes_on(
    tmp_path: Path, server: ServerThread, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    run = evaluating(tmp_path, server, url, {"timeout_s": 0.5})
    train(run, resume=False)
    metrics = read_metrics(Path(run.run_dir))
    assert len(metrics) == STEPS and any(line.get("evaluation/failed") for line in metrics)
    assert made_by(run) == [] and "could not be reached" in caplog.text and "learner.evaluation.url" in caplog.text


@pytest.mark.parametrize(
    "death",
    [Death("answer kept", 3),
     *(pytest.param(death, marks=pytest.mark.slow) for death in
       (Death("evaluation noted", 3), Death("answers forgotten", 3), Death("answer kept", NUM_PROMPTS + 1),
        Death("answer kept", 3 * NUM_PROMPTS), Death("evaluation noted", 1)))],
    ids=str,
)  # fmt: skip
def test_a_learner_killed_within_an_evaluation_asks_for_each_prompt_once(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer, death: Death
) -> None:
    openai.delay_s = 0.2
    run = evaluating(
        tmp_path, server, openai.url, {"max_concurrent": 1, "pin_policy": True}, checkpoint={"every_steps": 1}
    )
    life = Life(run, death, resume=False)
    assert life.end() < 0, life.log
    life = Life(run, resume=True)
    assert life.end() == 0, life.log
    made = made_by(run)
    assert [one.step for one in made] == [2, 4, 6]
    assert all(one.num_prompts == NUM_PROMPTS == len(one.rewards_P) and None not in one.rewards_P for one in made)
    # Of a step after the checkpoint all answers, for the step comes again; else the one that was on its way.
    goes_on = "resuming the evaluation after step" in life.log
    num_again = len(openai.requests) - 3 * NUM_PROMPTS
    assert num_again <= (1 if goes_on or death.point != "answer kept" else death.nth % NUM_PROMPTS + 1)
    lines = [json.loads(line) for line in (Path(run.run_dir) / FILE).read_text().splitlines()]
    assert len(lines) == 3, "none is noted twice"
    assert not (Path(run.run_dir) / "evaluation.partial.jsonl").exists()


def test_of_a_run_that_was_killed_in_its_last_evaluation_only_that_is_finished(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer
) -> None:
    run = evaluating(tmp_path, server, openai.url, {"pin_policy": True})
    train(run, resume=False)
    noted, under_way = Path(run.run_dir) / FILE, PartialResults(Path(run.run_dir))
    first, second, last = noted.read_text().splitlines(keepends=True)
    noted.write_text(first + second)
    under_way.begin(PartialHeader(STEPS, json.loads(last)["asked"]))
    for place in (1, 4, 6):
        under_way.add(place, PromptAnswers([""], [[0]], 1, [True], (STEPS, STEPS)))
    under_way.close()
    openai.requests.clear()
    train(run, resume=True)
    assert len(openai.requests) == NUM_PROMPTS - 3 and [one.step for one in made_by(run)] == [2, 4, STEPS]
    rewards = made_by(run)[-1].rewards_P
    assert [place for place, reward in enumerate(rewards) if reward == 0] == [1, 4, 6], "as they were answered"
    assert read_metrics(Path(run.run_dir))[-1]["step"] == STEPS


def test_a_run_that_was_killed_before_its_last_evaluation_began_makes_it_after_all_and_says_that_it_waits(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer, caplog: pytest.LogCaptureFixture
) -> None:
    run = evaluating(tmp_path, server, openai.url, {})
    train(run, resume=False)
    noted = Path(run.run_dir) / FILE
    noted.write_text("".join(noted.read_text().splitlines(keepends=True)[:-1]))
    openai.requests.clear()
    openai.delay_s = 0.3
    with caplog.at_level(logging.INFO):
        train(run, resume=True)
    assert "waiting for the evaluation after the last step" in caplog.text
    assert len(openai.requests) == NUM_PROMPTS and [one.step for one in made_by(run)] == [2, 4, STEPS]
    openai.requests.clear()
    train(run, resume=True)
    assert openai.requests == [], "nothing is owed any more"


def test_what_a_server_answers_before_it_has_the_policy_is_asked_again(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer
) -> None:
    openai.num_untrained = 3
    run = evaluating(tmp_path, server, openai.url, {"every_steps": STEPS})
    train(run, resume=False)
    (made,) = made_by(run)
    assert made.versions == (STEPS, STEPS) and len(openai.requests) == NUM_PROMPTS + 3


@pytest.mark.parametrize(
    ("run_of_server", "tells_versions", "told"),
    [
        ("other-1f2e", True, "was answered by the weights of other-1f2e instead of run-"),
        (None, True, "was answered by the weights of an unknown run instead of run-"),
        ("other-1f2e", False, "it is not a Slipstream server; set learner.evaluation.url to the server of run run-"),
    ],
)
def test_what_other_weights_than_the_runs_answer_is_no_evaluation_of_it(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer, caplog: pytest.LogCaptureFixture,
    run_of_server: str | None, tells_versions: bool, told: str,
) -> None:  # fmt: skip
    openai.run, openai.tells_tokens = lambda: run_of_server, tells_versions
    run = evaluating(tmp_path, server, openai.url, {"every_steps": STEPS, "timeout_s": 1.5})
    train(run, resume=False)
    assert made_by(run) == [] and told in caplog.text
    assert f"the evaluation after step {STEPS} failed" in caplog.text


def test_a_run_asks_at_the_address_of_its_server(tmp_path: Path) -> None:
    def url_of(text: str, *flags: str) -> str:
        config = tmp_path / "run.toml"
        config.write_text(
            f'model = "tiny:digits"\nrun_dir = "{tmp_path}"\n{text}\n[learner]\nsteps = 1\ndata = {{task = "sort"}}\nreward = {{functions = ["exact_match"]}}\n'
        )
        return load_config(LearnerRun, [str(config), *flags], "learner train").evaluation_url

    assert url_of("") == "http://127.0.0.1:8000/v1"
    nodes = 'insecure = true\nendpoints = ["tcp://node1:5757", "tcp://node2:5757"]\n'
    assert url_of(nodes + "[server]\nhttp_port = 9000") == "http://127.0.0.1:9000/v1", "there is a tunnel"
    assert url_of(nodes + '[server]\nhttp_host = "0.0.0.0"') == "http://node1:8000/v1"
    assert url_of(nodes + '[server]\nhttp_host = "10.0.0.5"') == "http://10.0.0.5:8000/v1"
    assert url_of('[server]\nhttp_host = "[::1]"') == "http://[::1]:8000/v1"
    assert url_of("", "--learner.evaluation.url", "http://judge/v1") == "http://judge/v1"
    with pytest.raises(ConfigError, match=r"every_steps = 2 with server.http_port = 0"):
        url_of("[server]\nhttp_port = 0", "--learner.evaluation.every-steps", "2")
    with pytest.raises(
        ConfigError, match=r"every_steps = 2 with endpoints_from = 'dns:nodes:5757'.* Set learner.evaluation.url"
    ):
        url_of('endpoints_from = "dns:nodes:5757"\ninsecure = true', "--learner.evaluation.every-steps", "2")


def test_what_was_noted_of_weights_that_a_resume_throws_away_is_taken_back(
    tmp_path: Path, server: ServerThread, openai: OpenAIServer
) -> None:
    run = evaluating(tmp_path, server, openai.url, {"pin_policy": True}, checkpoint={"every_steps": 3})
    train(run, resume=False)
    noted = Path(run.run_dir) / FILE
    by_hand = results.record_evaluation(noted, msgspec.structs.replace(made_by(run)[0], step=None))
    remove_checkpoint(complete_checkpoints(RunDir.checkpoints_of(run.run_dir))[-1])
    train(run, resume=True)
    again = made_by(run)
    assert [one.step for one in again] == [2, None, 4, 6] and again[1] == by_hand
    assert again[2].before == (2, 2), "and compared with the newest that stands"
    assert len(noted.read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("learner", "told"),
    [
        (
            {"evaluation": {"every_steps": 2, "pin_policy": True}, "weight_sync": {"overlap_with_training": True}},
            "cannot wait until an evaluation of the old version is complete",
        ),
        (
            {"evaluation": {"every_steps": 20}, "checkpoint": {"every_steps": 50, "best_by": "evaluation"}},
            "would have no evaluation; set evaluation.every_steps to a divisor of checkpoint.every_steps",
        ),
        ({"evaluation": {"every_steps": -1}}, "every_steps = -1 must not be negative"),
    ],
)
def test_keys_that_contradict_each_other(tmp_path: Path, learner: dict[str, Any], told: str) -> None:
    with pytest.raises((ConfigError, msgspec.ValidationError), match=told):
        make_run(tmp_path, "tcp://127.0.0.1:1", **learner)
