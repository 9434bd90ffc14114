"""Whole runs with an environment, against the real server with a transformers model in place of vLLM: every token is replayed."""

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from learner.config import LearnerRun
from learner.environments.builtin import HIGHER, LOWER, NO_DIGIT, RIGHT
from learner.environments.episode import Episode, EpisodeGroup
from learner.policy.model import load_tokenizer
from learner.prompts.prompts import Prompts
from learner.rollouts.ledger import Ledger
from learner.train import train
from protocol.codec import unpack
from protocol.model_files import resolve_model
from tests.learner.ledgers import consumed_groups
from tests.learner.model_engine import VersionedEngine, tiny_server, tiny_servers
from tests.learner.runs import make_run, metrics_of, rows_of

USER = "tests.learner.environments.user_environments"
DIGITS = "0123456789"
TOLERANCE = 1e-5


@pytest.fixture(autouse=True)
def payloads_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ledger, "forget_payloads", lambda ledger, step: None)


def playing_run(tmp_path: Path, *endpoints: str, steps: int = 4, factory: str = "guess", **learner: Any) -> LearnerRun:
    settings = {
        "steps": steps,
        "data": {"task": "guess", "num_prompts": 32},
        "reward": {"functions": ["environment_reward"]},
        "sampling": {"group_size": 4, "max_tokens": 2, "stop": list(DIGITS)},
        "environment": {"factory": factory, "max_turns": 4, "max_concurrent": 8, "timeout_s": 5.0},
    }
    return make_run(tmp_path, *endpoints, **settings | learner)


def groups_of(run: LearnerRun) -> list[tuple[EpisodeGroup, int]]:
    """What the ledger has of the consumed groups, each with its secret."""
    prompts = Prompts(run.learner.data, load_tokenizer(resolve_model("tiny:digits")), run.seed)
    groups = consumed_groups(run)
    assert groups
    return [
        (unpack(payload, EpisodeGroup), prompts.prompt_at(row.position).columns["secret"]) for row, payload in groups
    ]


def said_by(secret: int, text: str) -> str:
    """The rules of the game once more."""
    if text[-1:] not in set(DIGITS):
        return NO_DIGIT
    return RIGHT if int(text[-1]) == secret else HIGHER if int(text[-1]) < secret else LOWER


def assert_played_by_the_rules(episode: Episode, secret: int) -> None:
    """Sampled and unsampled tokens take turns, and each answer is that of the turn before it."""
    tokenizer = load_tokenizer(resolve_model("tiny:digits"))
    (branch,) = episode.branches
    texts, was_sampled = [""], True
    for token, is_sampled in zip(branch.token_ids.tolist(), branch.is_sampled_T.tolist(), strict=True):
        if is_sampled != was_sampled:
            texts.append("")
        texts[-1] += tokenizer.decode([token], skip_special_tokens=True)
        was_sampled = is_sampled
    turns, answers = texts[::2], texts[1::2]
    assert len(turns) == episode.course.num_turns
    assert answers == [said_by(secret, turn) for turn in turns][: len(answers)]
    assert len(turns) - len(answers) == (episode.course.state == "length")
    is_found = bool(answers) and answers[-1] == RIGHT
    assert is_found == (episode.course.state == "finished") and episode.reward == float(is_found)
    assert (branch.behaviour_logprobs[~branch.is_sampled_T] == 0).all()


def test_every_episode_of_a_run_is_played_by_the_rules_and_trained_on_with_the_servers_logprobs(tmp_path: Path) -> None:
    with tiny_server() as server:
        run = playing_run(tmp_path, server.endpoint)
        train(run, resume=False)
    metrics = metrics_of(run)
    assert [line["step"] for line in metrics] == [1, 2, 3, 4]
    for line in metrics:
        assert line["policy/mismatch_abs_logprob"] < TOLERANCE if "policy/mismatch_abs_logprob" in line else True
        assert 1 <= line["episode/turns_mean"] <= 4 and line["episode/environment_seconds"] > 0
        states = {name for name in line if name in ("episode/finished", "episode/length", "episode/max_turns")}
        assert sum(line[name] for name in states) == 12
        assert 0 <= line["reward/environment_reward"] <= 1
        assert line["staleness/max"] <= 2
    assert any("policy/mismatch_abs_logprob" in line for line in metrics)
    assert len(groups_of(run)) == 12
    for group, secret in groups_of(run):
        assert len(group.episodes) == 4
        for episode in group.episodes:
            assert_played_by_the_rules(episode, secret)


def test_a_resumed_run_plays_what_is_missing_and_no_group_twice(tmp_path: Path) -> None:
    with tiny_server() as server:
        train(playing_run(tmp_path, server.endpoint, steps=2), resume=False)
        run = playing_run(tmp_path, server.endpoint, steps=4)
        train(run, resume=True)
    assert [line["step"] for line in metrics_of(run)] == [1, 2, 3, 4]
    assert [slot for (slot,) in rows_of(run, "slot", "state = 'consumed'")] == list(range(12))
    for group, secret in groups_of(run):
        for episode in group.episodes:
            assert_played_by_the_rules(episode, secret)


def test_a_server_that_dies_between_turns_costs_no_episode(tmp_path: Path) -> None:
    mortal, survivor = VersionedEngine(), VersionedEngine()
    with tiny_servers(mortal, survivor) as (one, other):

        def hold_turns_and_die() -> None:
            mortal.release.clear()
            threading.Timer(0.5, one.die).start()

        mortal.on_version[2] = hold_turns_and_die
        run = playing_run(tmp_path, one.endpoint, other.endpoint, steps=6)
        train(run, resume=False)
    assert 2 <= mortal.versions[-1] < 6 and survivor.versions == list(range(7))
    assert rows_of(run, "max(attempt), count(*)", "state = 'consumed'") == [(0, 18)]
    for group, secret in groups_of(run):
        for episode in group.episodes:
            assert_played_by_the_rules(episode, secret)


def test_turns_stay_at_their_server_and_say_its_salt(tmp_path: Path) -> None:
    engines = [VersionedEngine(), VersionedEngine()]
    with tiny_servers(*engines) as both:
        train(playing_run(tmp_path, *(server.endpoint for server in both)), resume=False)
        # what came in the run's last moments may not have been acknowledged
        assert all(server.running.server.status()["groups_unacked"] < len(server.engine.salts) / 4 for server in both)
    for engine in engines:
        later = [salt for salt in engine.salts if salt]
        stayed = [salt for salt in later if salt.startswith(engine.name)]
        assert len(engine.salts) > len(later) > 0
        assert len(stayed) > 0.8 * len(later)


def test_environments_that_hang_die_and_raise_are_counted_and_the_run_is_complete(tmp_path: Path) -> None:
    settings = {"factory": f"{USER}:Fickle", "max_turns": 2, "max_concurrent": 8, "timeout_s": 3.0}
    with tiny_server() as server:
        run = playing_run(tmp_path, server.endpoint, environment=settings, max_group_attempts=20)
        train(run, resume=False)
    ends: Counter[str] = Counter()
    for line in metrics_of(run):
        ends.update({name: int(value) for name, value in line.items() if name.startswith("episode/")})
    assert ends["episode/tool_timeout"] and ends["episode/env_error"] and ends["episode/failed_calls"]
    assert metrics_of(run)[-1]["episode/lost"] >= ends["episode/tool_timeout"] + ends["episode/env_error"]
    rated = [
        (episode.reward is not None) == (episode.course.state in ("finished", "length", "max_turns"))
        for group, _ in groups_of(run)
        for episode in group.episodes
    ]
    assert rated and all(rated)
    assert len(rows_of(run, "slot", "state = 'consumed'")) == 12


def test_episodes_that_do_not_even_begin_are_counted_too(tmp_path: Path) -> None:
    settings = {"factory": f"{USER}:Unwilling", "max_turns": 2, "max_concurrent": 8, "timeout_s": 5.0}
    with tiny_server() as server:
        run = playing_run(tmp_path, server.endpoint, environment=settings, max_group_attempts=20)
        train(run, resume=False)
    episodes = [episode for group, _ in groups_of(run) for episode in group.episodes]
    assert {episode.course.state for episode in episodes} <= {"max_turns", "length"}
    assert metrics_of(run)[-1]["episode/lost"] >= 12 * 4 - len(episodes) > 0


def test_the_keys_of_an_environment_contradict_what_it_cannot_have() -> None:
    import msgspec

    with pytest.raises(msgspec.ValidationError, match=r"environment_reward.*set environment\.factory"):
        playing_run(Path("none"), environment={})
    with pytest.raises(
        msgspec.ValidationError, match=r"overlong_buffer_tokens = 1 with learner\.environment\.factory = 'guess'"
    ):
        playing_run(Path("none"), reward={"functions": ["environment_reward"], "overlong_buffer_tokens": 1})
    with pytest.raises(msgspec.ValidationError, match="max_turns = 0 must be at least 1"):
        playing_run(Path("none"), environment={"factory": "guess", "max_turns": 0})
