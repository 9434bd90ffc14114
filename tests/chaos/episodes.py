"""The audit of episodes: each ends and is kept as the fault to its process demands.

    environment.py records the fault ─▶ the learner records how the episode ended ─▶ the group as received

Pure. An episode need not end after a fault: the learner may have been killed meanwhile, and plays it again. An episode
that never ends stops the run, which the supervisor reports as a hang.
"""

from collections import Counter
from collections.abc import Sequence

from learner.environments.episode import REWARDED, AnyGroup, EndState, Episode, EpisodeGroup
from tests.chaos.events import since
from tests.chaos.schedule import Player
from tests.chaos.traps import Event

ENDED = "ended as "
ENDS: dict[Player, dict[str, EndState]] = {
    "environment": {"kill": "env_error", "stop": "tool_timeout", "hang": "tool_timeout"},
    "agent": {"kill": "env_error", "stop": "deadline", "hang": "deadline"},
}
"""Expected end state by the fault to the episode's process."""
STRUCK: tuple[EndState, ...] = ("env_error", "tool_timeout")
"""End states that only such a fault explains. "deadline" may also follow from a fault to a server."""
Groups = Sequence[tuple[str, AnyGroup]]


def ends_of(groups: Groups) -> Counter[str]:
    """Return the number of episodes by end state."""
    return Counter(episode.stats.state for _, group in _played(groups) for episode in group.episodes)


def audit_episodes(groups: Groups, events: Sequence[Event], player: Player) -> list[str]:
    """Return a description of each problem. `groups`: as received, with names; `events`: of all processes."""
    return [*_wrong_ends(events, player), *_wrongly_kept(groups, events), *_wrong_rewards(groups)]


def _wrong_ends(events: Sequence[Event], player: Player) -> list[str]:
    ended = [event for event in events if event.name.startswith(ENDED)]
    wrong, struck = [], set()
    for strike in (event for event in events if event.process == "environment"):
        end = next((event for event in since(ended, strike.time_s) if event.number == strike.pid), None)
        if end is not None:
            struck.add(end)
            wanted = ENDS[player][strike.name]
            if end.name != ENDED + wanted:
                wrong.append(
                    f"group {end.group}: {strike.name} of an episode's process, which {end.name}, not {wanted}"
                )
    wrong += [
        f"group {end.group}: an episode {end.name}, although its process had no fault"
        for end in ended
        if end not in struck and end.name.removeprefix(ENDED) in STRUCK
    ]
    return wrong


def _wrongly_kept(groups: Groups, events: Sequence[Event]) -> list[str]:
    """Return the episodes that were kept with a wrong end state. A group may be played again under its name."""
    ended: dict[str, Counter[str]] = {}
    for event in events:
        if event.name.startswith(ENDED):
            ended.setdefault(event.group, Counter())[event.name.removeprefix(ENDED)] += 1
    return [
        f"group {name}: {count} more episodes were kept as {state} than ended as {state}"
        for name, group in _played(groups)
        for state, count in (ends_of([(name, group)]) - ended.get(group.group_id, Counter())).items()
    ]


def _wrong_rewards(groups: Groups) -> list[str]:
    return [
        f"group {name}: an episode ended as {episode.stats.state} with the reward {episode.reward}"
        for name, group in _played(groups)
        for episode in group.episodes
        if not _has_correct_reward(episode)
    ]


def _has_correct_reward(episode: Episode) -> bool:
    return (episode.reward is not None) == (episode.stats.state in REWARDED)


def _played(groups: Groups) -> list[tuple[str, EpisodeGroup]]:
    return [(name, group) for name, group in groups if isinstance(group, EpisodeGroup)]
