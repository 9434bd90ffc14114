"""A whole run whose episodes an agent plays, against the real server with a transformers model in place of vLLM."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from learner.config import LearnerRun
from learner.environments.episode import EpisodeGroup, TokenSequence
from learner.rollouts.ledger import Ledger
from learner.train import train
from protocol.codec import unpack
from tests.learner.environments.games import playing_run
from tests.learner.ledgers import consumed_groups
from tests.learner.model_engine import tiny_server
from tests.learner.runs import metrics_of

USER = "tests.learner.gateway.user_agents"
AGENT = {"factory": None, "max_turns": 4, "max_concurrent": 8}


def groups_of(run: LearnerRun) -> list[EpisodeGroup]:
    return [unpack(payload, EpisodeGroup) for _, payload in consumed_groups(run)]


def up_to_the_last_turn(branch: TokenSequence) -> tuple[list[int], list[float], list[bool]]:
    """What the environment says last, an agent tells nobody."""
    is_sampled = branch.is_sampled_T
    end = int(np.flatnonzero(is_sampled)[-1]) + 1
    return branch.token_ids[:end].tolist(), branch.behaviour_logprobs[:end].tolist(), is_sampled[:end].tolist()


def test_a_game_played_by_an_agent_trains_as_the_same_game_as_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ledger, "forget_payloads", lambda ledger, step: None)
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
