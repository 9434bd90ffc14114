"""Whole runs with an environment or an agent on the real server, with a transformers model instead of vLLM."""

import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from inference_server.engine.interface import Sampled
from learner.environments.episode import EndState
from learner.rollouts.ledger import Ledger
from learner.train import train
from protocol.messages import Sampling
from tests.learner.environments.games import assert_played_by_the_rules, groups_of, playing_run
from tests.learner.model_engine import VersionedEngine, tiny_server, tiny_servers
from tests.learner.runs import metrics_of, rows_of

AGENT = {"agent": "tests.learner.gateway.user_agents:guess"}
IS_DONE = "tests.learner.environments.environment_rewards:is_done"
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def payloads_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "forget_payloads", lambda ledger, step: None)


@pytest.mark.parametrize(
    ("player", "functions"),
    [
        ({"factory": "guess"}, ["environment_reward", IS_DONE]),
        ({"factory": "guess_by_turn"}, ["environment_reward", IS_DONE]),
        (AGENT, ["environment_reward"]),
    ],
    ids=["environment", "environment with credit by turn", "agent"],
)
def test_every_episode_follows_the_rules_on_one_server_and_is_trained_once_with_its_logprobs(
    tmp_path: Path, player: dict[str, Any], functions: list[str]
) -> None:
    environment = {"max_turns": 4, "max_concurrent": 4} | player
    is_by_turn = player.get("factory") == "guess_by_turn"
    settings: dict[str, Any] = {"environment": environment, "reward": {"functions": functions}}
    settings["advantage"] = {"credit": "turn"} if is_by_turn else {}
    engines = [VersionedEngine(), VersionedEngine()]
    with tiny_servers(*engines) as both:
        endpoints = [server.endpoint for server in both]
        train(playing_run(tmp_path, *endpoints, steps=2, **settings), resume=False)
        run = playing_run(tmp_path, *endpoints, steps=4, **settings)
        train(run, resume=True)
        # groups of the run's last moments may lack an acknowledgement
        assert all(server.running.server.status()["groups_unacked"] < len(server.engine.salts) / 4 for server in both)
    metrics = metrics_of(run)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    for line in metrics:
        assert line["policy/mismatch_abs_logprob"] < TOLERANCE if "policy/mismatch_abs_logprob" in line else True
        assert 1 <= line["episode/turns_mean"] <= 4 and line["episode/environment_seconds"] > 0
        ends = {state: line[f"episode/{state}"] for state in get_args(EndState)}
        assert sum(ends[state] for state in ("finished", "length", "max_turns")) == sum(ends.values()) == 12
        assert 0 <= line["reward/environment_reward"] <= 1
        assert player == AGENT or line["reward/is_done"] == pytest.approx(line["reward/environment_reward"])
        assert is_by_turn == ("reward/turn_mean" in line) == ("reward/turn_1" in line) and "reward/turn_5" not in line
        assert 0 < line["episode/anchored_frac"] <= 1
        assert line["staleness/max"] <= 2
    assert any("policy/mismatch_abs_logprob" in line for line in metrics)
    assert [slot for (slot,) in rows_of(run, "slot", "state = 'consumed'")] == list(range(12))
    for group, secret in groups_of(run):
        assert len(group.episodes) == 4
        for episode in group.episodes:
            assert_played_by_the_rules(episode, secret, is_agent=player == AGENT)
            assert all((turn.reward is not None) == is_by_turn for turn in episode.turns[:-1])
            assert len(episode.turns) == episode.stats.num_turns
    for engine in engines:
        later = [salt for salt in engine.salts if salt]
        stayed = [salt for salt in later if salt.startswith(engine.name)]
        assert len(engine.salts) > len(later) > 0
        assert len(stayed) > 0.8 * len(later)


class MortalEngine(VersionedEngine):
    """Calls `die` at a later turn of an episode, from version 2 on, and never answers that turn."""

    die: Callable[[], None]

    async def generate(
        self, prompt_token_ids: np.ndarray, sampling: Sampling, salt: str, experts_from: int | None
    ) -> AsyncIterator[Sampled]:
        await self.opened()
        if salt and (self.version or 0) >= 2:  # a first turn has no salt
            self.release.clear()
            self.die()
        async for sampled in super().generate(prompt_token_ids, sampling, salt, experts_from):
            yield sampled


def test_no_episode_is_lost_when_a_server_dies_between_turns(tmp_path: Path) -> None:
    mortal, survivor = MortalEngine(), VersionedEngine()
    with tiny_servers(mortal, survivor) as (one, other):
        mortal.die = one.die
        run = playing_run(tmp_path, one.endpoint, other.endpoint, steps=6)
        train(run, resume=False)
    assert not mortal.release.is_set(), "no later turn was pending"
    assert 2 <= mortal.versions[-1] < 6 and survivor.versions == list(range(7))
    assert rows_of(run, "max(attempt), count(*)", "state = 'consumed'") == [(0, 18)]
    for group, secret in groups_of(run):
        for episode in group.episodes:
            assert_played_by_the_rules(episode, secret)


def test_a_run_completes_and_counts_environments_that_hang_die_raise_or_fail_to_start(tmp_path: Path) -> None:
    copy = shutil.copy(Path(__file__).with_name("user_environments.py"), tmp_path)
    settings = {"factory": f"{copy}:Fickle", "max_turns": 2, "max_concurrent": 8, "timeout_s": 1.5}
    with tiny_server() as server:
        run = playing_run(tmp_path, server.endpoint, environment=settings, max_group_attempts=20)
        train(run, resume=False)
    ends: Counter[str] = Counter()
    for line in metrics_of(run):
        ends.update({name: int(value) for name, value in line.items() if name.startswith("episode/")})
    assert ends["episode/tool_timeout"] and ends["episode/env_error"] and ends["episode/failed_calls"]
    episodes = [episode for group, _ in groups_of(run) for episode in group.episodes]
    num_lost = metrics_of(run)[-1]["episode/lost"]
    assert num_lost >= ends["episode/tool_timeout"] + ends["episode/env_error"] + 12 * 4 - len(episodes)
    assert len(episodes) < 12 * 4, "no episode failed to start"
    rewarded = ("finished", "length", "max_turns")
    assert all((episode.reward is not None) == (episode.stats.state in rewarded) for episode in episodes)
    assert len(rows_of(run, "slot", "state = 'consumed'")) == 12
