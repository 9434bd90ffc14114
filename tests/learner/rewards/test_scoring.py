"""Scoring: the arguments of reward functions, the overlong penalty, and the limit of failures."""

import asyncio
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from learner.algorithm.advantages import combined_advantages
from learner.config import AdvantageConfig, RewardConfig
from learner.environments.episode import Episode, EpisodeStats, TokenSequence, episodes_of
from learner.policy.model import load_tokenizer
from learner.prompts.prompts import Prompt
from learner.rewards.call import TrainerState
from learner.rewards.scoring import RewardFailures, Scorer, overlong_rewards, with_overlong
from learner.rewards.workers import EpisodeResults, FunctionRewards, GroupRewards, RewardWorkers
from protocol.errors import RewardError
from protocol.messages import Completion, Group
from protocol.model_files import resolve_model
from tests.learner.environments.chat_tokenizer import chat_tokenizer
from tests.learner.gateway.scripted_gateway import config_of
from tests.learner.rewards.scored_groups import STATE, prompt
from tests.learner.runs import make_run

OUTCOMES = {".": "ok", "f": "failed", "t": "timed_out"}


class RecordingWorkers:
    """Replaces the reward workers."""

    prompt: Prompt
    texts: list[str]
    state: TrainerState
    token_ids: list[Sequence[int]]
    rewards: GroupRewards | None = None

    def submit(
        self, prompt: Prompt, texts_G: list[str], token_ids_G: list[Sequence[int]], state: TrainerState,
        played: EpisodeResults, *, built_in_completions: list[str]
    ) -> "Future[GroupRewards]":  # fmt: skip
        self.prompt = prompt
        self.texts, self.state, self.token_ids = texts_G, state, token_ids_G
        future: Future[GroupRewards] = Future()
        future.set_result(self.rewards or GroupRewards(rewards=[0.0] * len(texts_G), functions=[]))
        return future


@pytest.mark.parametrize("skips", [True, False])
def test_special_tokens_are_kept_on_request(tmp_path: Path, skips: bool) -> None:
    tokenizer = load_tokenizer(resolve_model("tiny:digits"))
    config = make_run(tmp_path, "tcp://127.0.0.1:1").learner
    config = msgspec.structs.replace(config, reward=RewardConfig(functions=("exact_match",), skip_special_tokens=skips))
    ids = [*tokenizer("12")["input_ids"], tokenizer.eos_token_id]
    completion = Completion(
        token_ids=np.array(ids, np.int32), behavior_logprobs=np.zeros(3, np.float32), versions=[(0, 3)],
        finish_reason="stop"
    )  # fmt: skip
    workers = RecordingWorkers()
    scorer = Scorer(config, tokenizer, workers)  # type: ignore[arg-type]
    group = Group(group_id="0.0", entered_version=0, completions=[completion])
    asyncio.run(scorer.score(prompt(), episodes_of(group), step=2))
    assert workers.texts == ["12" if skips else f"12{tokenizer.eos_token}"]
    assert (workers.state.global_step, workers.state.max_steps) == (2, config.steps)


@pytest.mark.parametrize(
    ("row", "own", "text"),
    [
        ("6 * 7", "user: 6 * 7\n<think>\n", "<think>maybe 42"),
        ("6 * 7<think>", None, "<think>maybe 42"),
        ("6 * 7<think>", "user: 6 * 7<think>\nassistant: ", "maybe 42"),
        ("6 * 7", None, "maybe 42"),
    ],
)
def test_the_text_of_an_episode_begins_with_the_reasoning_that_the_prompt_of_its_branch_has_opened(
    row: str, own: str | None, text: str
) -> None:
    tokenizer, workers = chat_tokenizer(), RecordingWorkers()
    sampled = msgspec.structs.replace(
        branch(8),
        token_ids=np.array(tokenizer.encode("maybe 42"), np.int32),
        prompt_token_ids=None if own is None else np.array(tokenizer.encode(own), np.int32),
    )
    episode = Episode(branches=[sampled], stats=EpisodeStats(state="length", num_turns=1))
    of_row = msgspec.structs.replace(prompt(row), opens_reasoning=row.endswith("<think>"))
    scorer = Scorer(config_of(agent="my_agent:play"), tokenizer, workers)  # type: ignore[arg-type]
    asyncio.run(scorer.rate(of_row, [episode], STATE))
    assert (workers.texts, workers.prompt.opens_reasoning) == ([text], False)


def test_built_in_functions_see_no_special_tokens(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_model("tiny:digits"))
    length = f"{Path(__file__).with_name('user_rewards.py')}:reward_len"
    reward = RewardConfig(functions=("exact_match", length), skip_special_tokens=False)
    config = msgspec.structs.replace(make_run(tmp_path, "tcp://127.0.0.1:1").learner, reward=reward)
    texts = ["12", "12<eos>", "1<eos>"]
    completions = [
        Completion(
            token_ids=np.array(ids, np.int32), behavior_logprobs=np.zeros(len(ids), np.float32),
            versions=[(0, len(ids))], finish_reason="stop",
        ) for ids in tokenizer(texts)["input_ids"]
    ]  # fmt: skip
    group = Group(group_id="0.0", entered_version=0, completions=completions)
    with RewardWorkers(reward) as workers:
        scorer = Scorer(config, tokenizer, workers)
        rewards = asyncio.run(scorer.score(prompt(answer="12"), episodes_of(group), step=2))
    assert rewards.by_function == {
        "exact_match": [1.0, 1.0, 0.0], "reward_len": [float(len(text) - 20) for text in texts]
    }  # fmt: skip


def test_waiting_groups_are_decoded_outside_the_event_loop_and_take_few_bytes_a_token(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve_model("tiny:digits"))
    config = make_run(tmp_path, "tcp://127.0.0.1:1").learner
    config = msgspec.structs.replace(config, reward=RewardConfig(functions=("exact_match",)))
    names, decode = [], tokenizer.batch_decode

    def record_and_decode(*args: Any, **kwargs: Any) -> Any:
        names.append(threading.current_thread().name)
        return decode(*args, **kwargs)

    tokenizer.batch_decode = record_and_decode
    workers = RecordingWorkers()
    scorer = Scorer(config, tokenizer, workers)  # type: ignore[arg-type]
    completions = [
        Completion(
            token_ids=np.ones(n, np.int32), behavior_logprobs=np.zeros(n, np.float32), versions=[(0, n)],
            finish_reason="stop"
        ) for n in (1000, 2)
    ]  # fmt: skip
    group = Group(group_id="0.0", entered_version=0, completions=completions)
    asyncio.run(scorer.score(prompt(), episodes_of(group), step=2))
    assert names and all(name.startswith("tokenizer") for name in names)
    assert [list(ids) for ids in workers.token_ids] == [[1] * 1000, [1, 1]]
    assert sys.getsizeof(workers.token_ids[0]) < 5000


def score_pair(tmp_path: Path, rewards: GroupRewards, **advantage: str) -> GroupRewards:
    """Score a group of two completions whose functions return these rewards."""
    config = msgspec.structs.replace(
        make_run(tmp_path, "tcp://127.0.0.1:1").learner,
        reward=RewardConfig(functions=("m:right", "m:penalty", "m:logged"), weights=(1.0, 1.0, 0.0)),
        advantage=AdvantageConfig(**advantage),  # type: ignore[arg-type]
    )
    completion = Completion(
        token_ids=np.ones(2, np.int32), behavior_logprobs=np.zeros(2, np.float32), versions=[(0, 2)],
        finish_reason="stop"
    )  # fmt: skip
    workers = RecordingWorkers()
    workers.rewards = rewards
    scorer = Scorer(config, load_tokenizer(resolve_model("tiny:digits")), workers)  # type: ignore[arg-type]
    group = Group(group_id="0.0", entered_version=0, completions=[completion, completion])
    return asyncio.run(scorer.score(prompt(), episodes_of(group), step=2))


@pytest.mark.parametrize(
    ("total", "penalty", "combine", "message"),
    [
        ([1.0, -0.5], [0.0, -1.5], "sum", r"the total reward of a completion is -0\.5, .*--resume"),
        ([1.0, -0.5], [0.0, -1.5], "normalize_then_sum", r"a reward of penalty is -1\.5, .*--resume"),
        ([1.0, 0.5], [0.0, -0.5], "sum", None),
        ([1.0, -2.8e-17], [0.0, -1.0], "sum", None),
        ([1.0, None], [0.0, None], "normalize_then_sum", None),
    ],
)
def test_a_negative_reward_that_a_mean_cannot_divide_is_refused_before_its_group_is_scored(
    tmp_path: Path, total: list[float | None], penalty: list[float | None], combine: str, message: str | None
) -> None:
    rewards = GroupRewards(
        rewards=total,
        functions=[
            FunctionRewards(name="right", rewards=[1.0, 1.0]),
            FunctionRewards(name="penalty", rewards=penalty),
            FunctionRewards(name="logged", rewards=[-1.0, -1.0]),
        ],
    )
    assert score_pair(tmp_path, rewards, scale="group", combine=combine) == rewards
    if message is None:
        assert score_pair(tmp_path, rewards, scale="mean", combine=combine) == rewards
    else:
        with pytest.raises(RewardError, match=message):
            score_pair(tmp_path, rewards, scale="mean", combine=combine)


def branch(num_tokens: int, finish_reason: str = "stop") -> TokenSequence:
    return TokenSequence(
        token_ids=np.ones(num_tokens, np.int32), behavior_logprobs=np.zeros(num_tokens, np.float32),
        versions=[(0, num_tokens)], finish_reason=finish_reason,
    )  # fmt: skip


def test_the_overlong_penalty_follows_the_paper_and_is_full_if_truncated() -> None:
    """Computed by hand from arXiv 2503.14476 eq. 13 with L_max = 20 and L_cache = 4."""
    expected = {1: 0.0, 15: 0.0, 16: 0.0, 17: -0.25, 18: -0.5, 19: -0.75, 20: -1.0}
    assert overlong_rewards([branch(n) for n in expected], 20, 4, 1.0) == list(expected.values())
    assert overlong_rewards([branch(n) for n in expected], 20, 4, 0.5) == [value / 2 for value in expected.values()]
    cut_off = [branch(20, "length"), branch(3, "length")]  # truncated by the limit, or by a shorter context
    assert overlong_rewards(cut_off, 20, 4, 1.0) == [-1.0, -1.0]


def test_the_penalty_is_added_to_existing_rewards_and_listed_with_the_functions() -> None:
    rewards = GroupRewards(rewards=[1.0, None, 0.0], functions=[FunctionRewards(name="f", rewards=[1.0, None, 0.0])])
    penalised = with_overlong(rewards, [-0.5, -1.0, 0.0])
    assert penalised.rewards == [0.5, None, 0.0]
    assert penalised.by_function == {"f": [1.0, None, 0.0], "overlong": [-0.5, None, 0.0]}
    assert penalised.mean == 0.25


def test_the_penalty_has_weight_one_if_rewards_are_normalized_separately() -> None:
    config = RewardConfig(functions=("m:f", "m:g"), weights=(2.0, 0.0), overlong_buffer_tokens=4)
    assert config.weight_by_name == {"f": 2.0, "g": 0.0, "overlong": 1.0}
    rewards = {"f": [1.0, 1.0], "g": [0.0, 3.0], "overlong": [0.0, -1.0]}
    ((longer_is_worse, worse),) = combined_advantages(
        [[2.0, 1.0]], [rewards], config.weight_by_name, AdvantageConfig(combine="normalize_then_sum")
    )
    assert longer_is_worse > 0 > worse


def test_a_function_with_the_name_of_the_penalty_is_rejected() -> None:
    with pytest.raises(ValueError, match="rename the function"):
        RewardConfig(functions=("m:overlong",), overlong_buffer_tokens=2)


def num_groups_until_the_end(outcomes: str, **config: float) -> int | None:
    """Record one call per character. Return the number of calls when the run ended, or None."""
    failures = RewardFailures(RewardConfig(functions=("f",), **config))
    for number, outcome in enumerate(outcomes, start=1):
        function = FunctionRewards(name="f", rewards=[], outcome=OUTCOMES[outcome], message=f"call {number}")
        try:
            failures.record(GroupRewards(rewards=[], functions=[function]))
        except RewardError:
            return number
    return None


@pytest.mark.parametrize(
    ("outcomes", "config", "end"),
    [
        ("fff", {}, 3),  # all of the first calls
        ("ttt", {}, 3),
        (".f.t.f", {}, 6),
        ("ff" + 98 * "." + 500 * ("f" + 9 * "."), {}, None),  # a tenth is below the share
        (1000 * "." + 50 * "f", {}, 1021),  # more than 20 of the last 100
        (40 * "." + 50 * "t", {}, 51),  # 11 of 51
        (30 * (4 * "." + "f"), {}, None),  # a fifth is not more than a fifth
        (30 * (4 * "." + "f") + "f", {}, 151),
        (50 * "." + "t", {"max_failed_share": 0.0}, 51),
        (20 * "ff.", {"max_failed_share": 0.7}, 11),
        (20 * "f.", {"max_failed_share": 0.7}, None),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_run_ends_when_too_many_of_the_last_calls_failed(
    outcomes: str, config: dict[str, float], end: int | None
) -> None:
    assert num_groups_until_the_end(outcomes, **config) == end


def test_each_function_has_its_own_limit_and_the_error_shows_the_failed_calls() -> None:
    failures = RewardFailures(RewardConfig(functions=("f", "g")))

    def group(number: int) -> GroupRewards:
        fine = FunctionRewards(name="f", rewards=[1.0])
        broken = FunctionRewards(
            name="g", rewards=[None], outcome="failed" if number else "timed_out", message=f"call {number}"
        )
        return GroupRewards(rewards=[1.0], functions=[fine, broken])

    failures.record(group(0))
    failures.record(group(1))
    with pytest.raises(RewardError) as error:
        failures.record(group(2))
    assert str(error.value) == (
        "reward function g timed out 1 time and failed 2 times in its last 3 calls, more than "
        "learner.reward.max_failed_share = 0.2 allows (of the last 100, at first of 10):\n  call 0\n  call 1\n  call 2"
    )


def test_a_none_that_removes_a_reward_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    rewards = GroupRewards(
        rewards=[2.0, None, None],
        functions=[
            FunctionRewards(name="f", rewards=[1.0, None, None]),
            FunctionRewards(name="g", rewards=[1.0, 0.5, None]),
        ],
    )
    for on_none in ("skip", "unscorable"):
        failures = RewardFailures(RewardConfig(functions=("f", "g"), on_none=on_none))
        for _ in range(2):
            failures.record(rewards)
    (line,) = caplog.messages
    assert line.startswith("reward function f returned None for 1 of 3 completions that other functions scored")
    assert 'start a new run with learner.reward.on_none = "skip"' in line


def test_a_none_that_removes_no_reward_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    only_watches = FunctionRewards(name="f", rewards=[None])
    timed_out = FunctionRewards(name="g", rewards=[None], outcome="timed_out", message="call 1")
    fine = FunctionRewards(name="h", rewards=[1.0])
    failures = RewardFailures(RewardConfig(functions=("f", "g", "h"), weights=(0.0, 1.0, 1.0)))
    failures.record(GroupRewards(rewards=[None], functions=[only_watches, timed_out, fine]))
    assert caplog.messages == ["call 1"]
