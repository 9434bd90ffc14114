"""Evaluations with episodes: a scripted OpenAI server, real environments and agents."""

from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest

from learner.config import LearnerRun
from learner.environments.builtin import HIGHER, LOWER
from learner.environments.episode import EndState
from learner.evaluation.episodes import SILENT
from learner.evaluation.eval_sets import sets_of
from learner.evaluation.evaluate import evaluate
from learner.evaluation.openai_client import EvaluationError
from learner.evaluation.results import FILE, earlier, format_evaluation
from learner.report.summary import read_metrics
from learner.run_inputs import RunInputs
from learner.train import train
from tests.fakes import ServerThread
from tests.learner.environments.games import playing_run
from tests.learner.openai_server import OpenAIServer

NUM_PROMPTS = 10
AGENT = {"agent": "tests.learner.gateway.user_agents:guess", "max_turns": 4}
FICKLE = {"factory": "tests.learner.environments.user_environments:Overrated", "max_turns": 2, "timeout_s": 5.0}


@pytest.fixture
def bisecting(openai: OpenAIServer) -> OpenAIServer:
    openai.answer = lambda prompt, count: [bisected(prompt)] * count
    return openai


def bisected(text: str) -> str:
    """Return the next guess by bisection, given the replies after the prompt, which is an equals sign."""
    low, high = 0, 9
    for guessed, reply in zip(text[1::2], text[2::2], strict=True):
        low = int(guessed) + 1 if reply == HIGHER else low
        high = int(guessed) - 1 if reply == LOWER else high
    return str((low + high) // 2)


def evaluated(tmp_path: Path, url: str, evaluation: dict[str, Any] | None = None, **learner: Any) -> LearnerRun:
    request = {"url": url, "num_prompts": NUM_PROMPTS, "timeout_s": 20} | (evaluation or {})
    return playing_run(tmp_path, "tcp://127.0.0.1:1", evaluation=request, **learner)


def ended(**counts: int) -> dict[str, int]:
    return dict.fromkeys((*get_args(EndState), SILENT), 0) | counts


AS_BOTH = pytest.mark.parametrize("environment", [{}, {"environment": AGENT}], ids=["environment", "agent"])


@AS_BOTH
def test_a_bisecting_policy_guesses_every_secret_with_an_environment_and_an_agent(
    tmp_path: Path, bisecting: OpenAIServer, environment: dict[str, Any]
) -> None:
    (made,) = evaluate(evaluated(tmp_path, bisecting.url, **environment))
    assert made.reward is not None and made.reward.mean == 1.0 and made.rewards_P == [1.0] * NUM_PROMPTS
    assert made.ends == ended(finished=NUM_PROMPTS) and made.truncated_frac == 0.0 and made.versions == (3, 4)
    assert made.turns_mean is not None and len(bisecting.requests) == made.turns_mean * NUM_PROMPTS
    turns = Counter(len(request["prompt"]) for request in bisecting.requests)
    assert turns[1] == NUM_PROMPTS and set(turns) <= {1, 3, 5, 7}, "each prompt has all earlier tokens"
    assert {(request["n"], request["temperature"], request["max_tokens"]) for request in bisecting.requests} == {
        (1, 0.0, 2)
    }
    assert not any(request["skip_special_tokens"] for request in bisecting.requests), "a stop may be a special token"
    assert made.length_mean == made.turns_mean, "a guess is one token"
    assert f"episodes ended: {NUM_PROMPTS} finished;" in format_evaluation(made)


@AS_BOTH
def test_functions_see_the_steps_of_the_policy_that_has_played(
    tmp_path: Path, bisecting: OpenAIServer, environment: dict[str, Any]
) -> None:
    functions = {"functions": ["tests.learner.rewards.user_rewards:progress"]}
    (made,) = evaluate(evaluated(tmp_path, bisecting.url, reward=functions, **environment))
    assert made.reward is not None and made.reward.mean == 3 / 4


def test_a_policy_that_ignores_feedback_is_right_by_chance_and_ends_at_the_turn_limit(
    tmp_path: Path, openai: OpenAIServer
) -> None:
    openai.answer = lambda prompt, count: ["4"] * count
    run = evaluated(tmp_path, openai.url, {"num_samples": 2, "temperature": 1.0})
    (made,) = evaluate(run)
    (eval_set,) = sets_of(RunInputs(run))
    expected = [float(prompt.columns["secret"] == 4) for prompt in eval_set.prompts]
    assert made.rewards_P == expected and 0 < sum(expected) < NUM_PROMPTS
    num_right = 2 * int(sum(expected))
    assert made.ends == ended(finished=num_right, max_turns=2 * NUM_PROMPTS - num_right)
    assert made.truncated_frac == 0.0 and made.majority is None, "an end at max_turns is no truncation"
    assert made.reward_finished is not None and made.reward_finished.mean == 1.0
    assert len({request["seed"] for request in openai.requests}) == len(openai.requests), "every turn has another seed"


def test_an_episode_that_ends_at_max_tokens_is_truncated(tmp_path: Path, openai: OpenAIServer) -> None:
    openai.answer = lambda prompt, count: ["+++"] * count
    (made,) = evaluate(evaluated(tmp_path, openai.url, {"max_tokens": 3}))
    assert made.ends == ended(length=NUM_PROMPTS) and made.truncated_frac == 1.0 and made.reward_finished is None


def test_an_aborted_episode_is_counted_but_excluded_from_means(tmp_path: Path, openai: OpenAIServer) -> None:
    openai.answer = lambda prompt, count: ["4"] * count
    (made,) = evaluate(evaluated(tmp_path, openai.url, environment=FICKLE))
    assert made.ends == ended(env_error=NUM_PROMPTS) and made.reward is None
    assert made.rewards_P == [None] * NUM_PROMPTS


def test_evaluations_are_compared_only_for_the_same_game(tmp_path: Path, bisecting: OpenAIServer) -> None:
    longer, few = {"factory": "guess", "max_turns": 5}, {"num_prompts": 2}
    evaluate(evaluated(tmp_path, bisecting.url, few))
    assert evaluate(evaluated(tmp_path, bisecting.url, few, environment=longer))[0].difference is None
    (again,) = evaluate(evaluated(tmp_path, bisecting.url, few))
    assert again.difference is not None and again.difference.mean == 0.0


def test_episodes_need_token_ids_and_a_limit(tmp_path: Path, bisecting: OpenAIServer) -> None:
    bisecting.max_model_len = None
    with pytest.raises(EvaluationError, match=r"set learner\.environment\.max_episode_tokens"):
        evaluate(evaluated(tmp_path, bisecting.url))
    limited = {"factory": "guess", "max_turns": 4, "max_episode_tokens": 64}
    assert evaluate(evaluated(tmp_path, bisecting.url, environment=limited))[0].ends == ended(finished=NUM_PROMPTS)
    bisecting.tells_tokens = False
    with pytest.raises(EvaluationError, match="does not return the token ids of its answers"):
        evaluate(evaluated(tmp_path, bisecting.url, environment=limited))


@AS_BOTH
def test_a_server_that_refuses_a_turn_ends_the_evaluation_not_its_episodes(
    tmp_path: Path, openai: OpenAIServer, environment: dict[str, Any]
) -> None:
    def fails_at_the_second(prompt: str, count: int) -> list[str]:
        openai.failures = [400] if len(prompt) > 1 else []
        return [bisected(prompt)]

    openai.answer = fails_at_the_second
    with pytest.raises(EvaluationError, match="returned status 400"):
        evaluate(evaluated(tmp_path, openai.url, {"max_concurrent": 1}, **environment))
    assert not (tmp_path / "run" / FILE).exists()


def test_a_run_with_episodes_is_evaluated_during_training(
    tmp_path: Path, server: ServerThread, bisecting: OpenAIServer
) -> None:
    evaluation = {"url": bisecting.url, "every_steps": 2, "num_prompts": NUM_PROMPTS, "timeout_s": 20}
    run = playing_run(tmp_path, server.endpoint, steps=4, evaluation=evaluation)
    train(run, resume=False)
    path = Path(run.run_dir)
    made = earlier(path / FILE)
    assert [(one.step, one.ends, one.rewards_P) for one in made] == [
        (step, ended(finished=NUM_PROMPTS), [1.0] * NUM_PROMPTS) for step in (2, 4)
    ]
    reply = read_metrics(path)[-1]
    assert (reply["evaluation/reward"], reply["evaluation/ended_finished"]) == (1.0, NUM_PROMPTS)
    assert reply["evaluation/ended_aborted"] == 0.0
    assert reply["evaluation/turns_mean"] == made[-1].turns_mean
