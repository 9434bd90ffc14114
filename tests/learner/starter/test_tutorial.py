"""The recipes of the tutorial page work as the page describes."""

import re
import tomllib
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from learner.config import LearnerRun
from learner.evaluation.eval_sets import sets_of
from learner.rewards.workers import RewardWorkers
from learner.run_inputs import RunInputs
from learner.starter.starter import write_starter
from tests.learner.openai_server import openai_server
from tests.learner.rewards.scored_groups import STATE

PAGE = (Path(__file__).parents[3] / "docs/first-task.md").read_text()
SHOWN = {
    kind: re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL) for kind in ("json", "python", "toml")
}
LENGTH, JUDGE, EVALUATION = SHOWN["toml"]


@pytest.fixture
def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the task after `learner new my-task` and all changes of the page."""
    monkeypatch.chdir(tmp_path)
    write_starter(Path("my-task"))
    for code in SHOWN["python"]:
        name = re.match(r"# (\S+)\n", code)
        assert name is not None
        Path(name[1]).write_text(code)
    (row,) = SHOWN["json"]
    Path("my-task/prompts.jsonl").write_text(3 * row)
    Path("my-task/held-out.jsonl").write_text('{"prompt": "52>", "answer": "52", "most_tokens": 4}\n')
    return tmp_path


def run_with(recipe: str, **learner: object) -> LearnerRun:
    raw = tomllib.loads(Path("my-task/run.toml").read_text())
    raw["learner"] |= tomllib.loads(recipe)["learner"] | learner
    return msgspec.convert(raw, LearnerRun)


def rewards_of(run: LearnerRun, *texts: str) -> list[list[float | None]]:
    run_inputs = RunInputs(run)
    ids = [run_inputs.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    with RewardWorkers(run.learner.reward) as workers:
        group = workers.submit(run_inputs.prompts.prompt_at(0), list(texts), ids, STATE).result(60)
    assert [function.message for function in group.functions] == [None, None]
    return [function.rewards for function in group.functions]


def test_length_is_penalized_beyond_the_limit_of_the_row(task: Path) -> None:
    places, length = rewards_of(run_with(LENGTH), "371", "3710000000")
    assert length == [0.0, pytest.approx(-1.0)] and places[0] == 1.0


def test_the_judge_is_called_over_http(task: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_requests = Counter[str]()
    with openai_server() as judge:
        judge.tells_tokens = False

        def answer(prompt: str, count: int) -> list[str]:
            num_requests[prompt] += 1
            return [" Yes" if "'371'" in prompt.split(" a good answer")[0] else " no"] * count

        judge.answer = answer
        monkeypatch.setenv("JUDGE_URL", judge.url)
        places, judged = rewards_of(run_with(JUDGE), "371", "9")
    assert judged == [1.0, 0.0] and places[0] == 1.0 and len(num_requests) == 2


def test_the_second_set_selects_the_best_model(task: Path) -> None:
    config = run_with(EVALUATION).learner
    assert (config.evaluation.set_names(), config.checkpoint.judging_set) == (["known", "new"], "new")
    known, new = (len(eval_set.prompts) for eval_set in sets_of(RunInputs(run_with(EVALUATION))))
    assert (known, new) == (3, 1)
