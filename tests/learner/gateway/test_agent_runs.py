"""Whole runs whose episodes agents play, against the real server with a transformers model in place of vLLM."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.config import LearnerRun
from learner.environments.episode import EpisodeGroup, TokenSequence
from learner.rollouts.ledger import Ledger
from learner.train import train
from protocol.codec import unpack
from tests.learner.environments.test_playing_runs import playing_run
from tests.learner.ledgers import consumed_groups
from tests.learner.model_engine import VersionedEngine, tiny_server, tiny_servers
from tests.learner.runs import metrics_of, rows_of

USER = "tests.learner.gateway.user_agents"
AGENT = {"factory": None, "max_turns": 4, "max_concurrent": 8}
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def payloads_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "forget_payloads", lambda ledger, step: None)


def groups_of(run: LearnerRun) -> list[EpisodeGroup]:
    return [unpack(payload, EpisodeGroup) for _, payload in consumed_groups(run)]


def up_to_the_last_turn(branch: TokenSequence) -> tuple[list[int], list[float], list[bool]]:
    """What the environment says last, an agent tells nobody."""
    is_sampled = branch.is_sampled_T
    end = int(np.flatnonzero(is_sampled)[-1]) + 1
    return branch.token_ids[:end].tolist(), branch.behaviour_logprobs[:end].tolist(), is_sampled[:end].tolist()


def test_a_game_played_by_an_agent_trains_as_the_same_game_as_an_environment(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 3, "max_staleness": 0, "groups_per_step": 2}
    sampling = {"group_size": 4, "max_tokens": 2, "stop": list("0123456789"), "seeded": True}
    runs = []
    for name, more in (("environment", {}), ("agent", {"environment": AGENT | {"agent": f"{USER}:guess"}})):
        with tiny_server() as server:
            run = playing_run(tmp_path / name, server.endpoint, **settings, sampling=sampling, **more)
            train(run, resume=False)
        runs.append(run)
    by_environment, by_agent = map(groups_of, runs)
    assert len(by_environment) == len(by_agent) == 6
    for group, other in zip(by_environment, by_agent, strict=True):
        for episode, played in zip(group.episodes, other.episodes, strict=True):
            ((branch,), (same,)) = episode.branches, played.branches
            (tokens, logprobs, is_sampled), of_agent = up_to_the_last_turn(branch), up_to_the_last_turn(same)
            assert (tokens, is_sampled) == (of_agent[0], of_agent[2])
            np.testing.assert_allclose(logprobs, of_agent[1], atol=1e-4)  # the steps before were rounded in other ways
            assert episode.reward == played.reward
            assert episode.course.num_turns == played.course.num_turns
            assert (episode.course.state == "length") == (played.course.state == "length")
    for line, same in zip(*map(metrics_of, runs), strict=True):
        for name in ("reward/mean", "loss/policy", "optim/grad_norm", "episode/turns_mean"):
            assert line[name] == pytest.approx(same[name], rel=1e-4, abs=1e-6), name


def test_a_server_that_dies_between_the_turns_of_agents_costs_no_episode(tmp_path: Path) -> None:
    mortal, survivor = VersionedEngine(), VersionedEngine()
    with tiny_servers(mortal, survivor) as (one, other):

        def hold_turns_and_die() -> None:
            mortal.release.clear()
            threading.Timer(0.5, one.die).start()

        mortal.on_version[2] = hold_turns_and_die
        environment = AGENT | {"agent": f"{USER}:guess"}
        run = playing_run(tmp_path, one.endpoint, other.endpoint, steps=6, environment=environment)
        train(run, resume=False)
    assert 2 <= mortal.versions[-1] < 6 and survivor.versions == list(range(7))
    assert rows_of(run, "max(attempt), count(*)", "state = 'consumed'") == [(0, 18)]
    assert metrics_of(run)[-1]["episode/lost"] == 0
    states = Counter(episode.course.state for group in groups_of(run) for episode in group.episodes)
    assert states.keys() <= {"finished", "length"} and states.total() == 18 * 4


def test_agents_that_raise_hang_and_die_are_counted_and_the_run_is_complete(tmp_path: Path) -> None:
    environment = AGENT | {"agent": f"{USER}:fickle_guess", "episode_deadline_s": 12.0}
    with tiny_server() as server:
        run = playing_run(tmp_path, server.endpoint, environment=environment, max_group_attempts=20)
        train(run, resume=False)
    ends: Counter[str] = Counter()
    for line in metrics_of(run):
        ends.update({name: int(value) for name, value in line.items() if name.startswith("episode/")})
        if "policy/mismatch_abs_logprob" in line:
            assert line["policy/mismatch_abs_logprob"] < TOLERANCE
    assert ends["episode/env_error"] and ends["episode/finished"]
    assert metrics_of(run)[-1]["episode/lost"] >= ends["episode/env_error"] + ends["episode/deadline"]
    assert len(rows_of(run, "slot", "state = 'consumed'")) == 12
    for group in groups_of(run):
        for episode in group.episodes:
            assert (episode.reward is not None) == (episode.course.state in ("finished", "length", "max_turns"))
            (branch,) = episode.branches
            assert branch.prompt_token_ids is not None, "the agent asks with a prompt of its own"
