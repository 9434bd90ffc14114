"""The audit of episodes finds wrong end states and wrong rewards."""

import numpy as np
import pytest

from learner.environments.episode import EndState, Episode, EpisodeGroup, EpisodeStats, TokenSequence
from tests.chaos.episodes import ENDED, Groups, audit_episodes, ends_of
from tests.chaos.schedule import Player
from tests.chaos.traps import Event

pytestmark = pytest.mark.system

TARGET, OTHER = 71, 72
"""Process ids: of the fault's target, and of another process."""


def event(time_s: float, name: str, number: int = 0, pid: int = 1) -> Event:
    process = "learner" if name.startswith(ENDED) else "environment"
    return Event(time_s=time_s, process=process, pid=pid, name=name, number=number, group="0.0" if number else "")


def played(*ends: tuple[EndState, float | None]) -> Groups:
    branch = TokenSequence(
        token_ids=np.zeros(1, np.int32), behavior_logprobs=np.zeros(1, np.float32), versions=[(0, 1)],
        finish_reason="stop"
    )  # fmt: skip
    episodes = [
        Episode(branches=[branch], stats=EpisodeStats(state=state, num_turns=1), reward=reward)
        for state, reward in ends
    ]
    return [("0.0-1", EpisodeGroup(group_id="0.0", entered_version=0, episodes=episodes))]


def audit(
    kind: str, target_end: EndState, *kept: tuple[EndState, float | None], player: Player = "environment"
) -> list[str]:
    """Audit a group of two episodes, one with a fault in a process that has finished another episode before."""
    events = [
        event(0.5, f"{ENDED}finished", TARGET), event(1.0, kind, pid=TARGET),
        event(2.0, f"{ENDED}{target_end}", TARGET),
        event(3.0, f"{ENDED}finished", OTHER),
    ]  # fmt: skip
    return audit_episodes(played(*kept), events, player)


@pytest.mark.parametrize(
    ("player", "kind", "end"),
    [("environment", "kill", "env_error"), ("environment", "hang", "tool_timeout"), ("agent", "stop", "deadline")],
)
def test_the_audit_accepts_an_episode_that_ended_and_was_kept_as_its_fault_demands(
    player: Player, kind: str, end: EndState
) -> None:
    assert audit(kind, end, (end, None), ("finished", 1.0), player=player) == []
    assert ends_of(played((end, None), ("finished", 1.0))) == {end: 1, "finished": 1}


def test_the_audit_finds_an_end_state_that_does_not_follow_from_the_fault() -> None:
    (wrong,) = audit("kill", "finished", ("finished", 0.0), ("finished", 1.0))
    assert wrong == "group 0.0: kill of an episode's process, which ended as finished, not env_error"
    (wrong,) = audit("stop", "env_error", ("env_error", None), ("finished", 1.0))
    assert "not tool_timeout" in wrong


def test_the_audit_finds_an_error_of_an_episode_without_a_fault() -> None:
    (wrong,) = audit_episodes([], [event(1.0, f"{ENDED}env_error", OTHER)], "environment")
    assert wrong == "group 0.0: an episode ended as env_error, although its process had no fault"


def test_an_episode_with_a_fault_need_not_end_if_the_learner_was_killed_meanwhile() -> None:
    assert audit_episodes([], [event(1.0, "kill", pid=TARGET)], "environment") == []


def test_the_audit_finds_an_episode_that_was_kept_with_another_end_state() -> None:
    (wrong,) = audit("kill", "env_error", ("max_turns", 0.0), ("finished", 1.0))
    assert wrong == "group 0.0-1: 1 more episodes were kept as max_turns than ended as max_turns"


@pytest.mark.parametrize(("end", "reward"), [("env_error", 0.0), ("finished", None)])
def test_the_audit_finds_a_reward_that_an_end_state_forbids_and_a_missing_reward(
    end: EndState, reward: float | None
) -> None:
    wrong = audit_episodes(played((end, reward)), [event(1.0, f"{ENDED}{end}", OTHER)], "environment")
    assert f"group 0.0-1: an episode ended as {end} with the reward {reward}" in wrong
