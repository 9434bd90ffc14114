"""Attributes of an environment's instance in reward functions: a bounded amount of plain data, or a clear error."""

import asyncio
import copy
import math
from enum import Enum
from pathlib import Path

import msgspec
import numpy as np
import pytest

from learner.config import RewardConfig
from learner.environments.attributes import MAX_BYTES, AttributeView, attributes_of
from learner.environments.episode import EndState, Episode, EpisodeGroup, EpisodeStats, TokenSequence
from learner.policy.model import load_tokenizer
from learner.prompts.prompts import Prompt
from learner.rewards.scoring import Scorer
from learner.rewards.workers import EpisodeResults, RewardWorkers
from protocol.codec import pack, unpack
from protocol.model_files import resolve_model
from tests.learner.environments.scripted_player import play_group, script_of
from tests.learner.rewards.scored_groups import STATE
from tests.learner.runs import make_run

REWARDS = "tests.learner.environments.environment_rewards"
PROMPT = Prompt(prompt_id=0, prompt="p", token_ids=[1], columns={})


class Result(str, Enum):  # noqa: UP042  str() of a StrEnum is its text, so it would show nothing
    WON = "won"


class Rich:
    """An instance with one attribute of every kind."""

    of_the_class = "all have it"

    def __init__(self) -> None:
        self.number, self.text, self.nothing, self.flag = 3, "three", None, True
        self.board = [[1, 2], (3, {"x": 4.5, 7: "seven"})]
        self.score, self.count = np.float32(0.5), np.int64(7)
        self.result = Result.WON
        self._hidden = 1
        self.client, self.picture, self.endless = object(), np.zeros(3), [self.board]
        self.endless.append(self.endless)  # type: ignore[arg-type]
        self.too_large_a_number, self.no_text = 1 << 70, "\udc80"
        self.keyed = {(1, 2): 3}

    @property
    def derived(self) -> int:
        return self.number + 1

    @property
    def broken(self) -> int:
        raise KeyError("no")

    def method(self) -> None:
        """Not an attribute."""


def test_plain_data_is_available_and_other_attributes_are_omitted() -> None:
    attributes = attributes_of(Rich())
    assert attributes == {
        "board": [[1, 2], [3, {"x": 4.5, 7: "seven"}]], "count": 7, "derived": 4, "flag": True, "nothing": None,
        "number": 3,
        "of_the_class": "all have it", "result": "won", "score": 0.5, "text": "three",
    }  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(attributes)) == attributes
    assert [type(attributes[name]) for name in ("score", "count", "result")] == [float, int, str]
    assert attributes_of(None) == {}


def test_attributes_over_the_size_limit_are_omitted() -> None:
    class Large:
        def __init__(self) -> None:
            self.a, self.b, self.c, self.d = 1, "x" * (MAX_BYTES - 100), "y" * 200, "z" * 20

    attributes = attributes_of(Large())
    assert list(attributes) == ["a", "b", "d"]
    assert len(msgspec.msgpack.encode(attributes)) <= MAX_BYTES


def test_an_omitted_attribute_is_an_error_with_the_reason_and_no_attribute_can_be_set() -> None:
    environment = AttributeView({"counter": 3, "target": 4})
    assert environment.counter == 3
    with pytest.raises(
        AttributeError,
        match=r"no 'step' here: the instance lives in another process.*plain data.*no methods.*counter, target",
    ):
        environment.step(1)
    with pytest.raises(AttributeError, match=r"for this instance: none\. Keep"):
        _ = AttributeView({}).counter
    with pytest.raises(AttributeError, match="'counter' cannot be set"):
        environment.counter = 5
    assert not hasattr(environment, "client")
    assert copy.deepcopy(environment).target == 4


def test_attributes_are_recorded_at_the_reward_only_if_a_function_needs_them() -> None:
    group, _ = play_group(script_of("ab", "stop"), asks_attributes=True)
    again = unpack(pack(group), EpisodeGroup)
    assert [episode.attributes for episode in again.episodes] == [{"done": True}] * 2
    group, _ = play_group(script_of("ab", "stop"))
    assert [episode.attributes for episode in group.episodes] == [None, None]
    group, _ = play_group(script_of("a", "exit"), factory="Treacherous", asks_attributes=True)
    assert [episode.attributes for episode in group.episodes] == [None, None]


def test_only_functions_that_name_environments_get_them() -> None:
    held = [{"counter": 1}, {"counter": 5}]
    names = ["counters", "counters_awaited", "counters_if_any", "takes_anything"]
    asking = [f"{REWARDS}:{name}" for name in names[:3]]
    with RewardWorkers(RewardConfig(functions=tuple(f"{REWARDS}:{name}" for name in names))) as workers:
        assert workers.with_environments == set(asking)
        ids = [[1], [1]]
        given = workers.submit(PROMPT, ["a", "b"], ids, STATE, EpisodeResults([0.0, 0.0], held)).result(60)
        none_is_there = workers.submit(PROMPT, ["a", "b"], ids, STATE).result(60)
    assert given.by_function == {name: [1.0, 5.0] for name in names} | {"takes_anything": [0.0, 0.0]}
    assert none_is_there.by_function["counters_if_any"] == [-1.0, -1.0], "reward functions must get None, as in TRL"
    assert "missing 1 required positional argument: 'environments'" in str(none_is_there.functions[0].message)


def episode(state: EndState, counter: int | None) -> Episode:
    branch = TokenSequence(
        token_ids=np.array([1, 2], np.int32), behavior_logprobs=np.zeros(2, np.float32), versions=[(0, 2)],
        finish_reason="stop"
    )  # fmt: skip
    attributes = None if counter is None else {"counter": counter}
    return Episode(branches=[branch], stats=EpisodeStats(state=state, num_turns=1), attributes=attributes)


def test_an_aborted_episode_does_not_cost_the_rewards_of_its_group(tmp_path: Path) -> None:
    """The instance of an aborted episode is gone, so a function that read it would fail for the whole group."""
    functions = [f"{REWARDS}:counters_logged"]
    run = make_run(tmp_path, "tcp://127.0.0.1:1", environment={"factory": "guess"}, reward={"functions": functions})
    episodes = [episode("finished", 3), episode("env_error", None), episode("max_turns", 4)]
    with RewardWorkers(run.learner.reward) as workers:
        scorer = Scorer(run.learner, load_tokenizer(resolve_model("tiny:digits")), workers)
        rewards = asyncio.run(scorer.score(PROMPT, episodes, step=0))
    assert rewards.rewards == [3.0, None, 4.0]
    assert rewards.by_function == {"counters_logged": [3.0, None, 4.0]}
    assert rewards.logged_extra == {"counter": [3, None, 4]}
    assert math.isclose(rewards.mean or 0.0, 3.5)
