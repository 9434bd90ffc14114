"""The audit of episodes: what was done to those who played them, how the learner says that each ended, and what it kept of that.

    environment.py tells whom it struck ─▶ the learner tells how his episode ended ─▶ its group as it was received

Pure. An episode that was struck need not end: the learner may have been killed meanwhile, and plays it again. That one ends which must is
seen to by others: without it the run stands still.
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
"""Of an episode, by what was done to the process that played it."""
STRUCK: tuple[EndState, ...] = ("env_error", "tool_timeout")
"""Only of such an episode; one may also last too long because a server was struck."""
Groups = Sequence[tuple[str, AnyGroup]]


def ends_of(groups: Groups) -> Counter[str]:
    """How many ended how."""
    return Counter(episode.course.state for _, group in _played(groups) for episode in group.episodes)


def audit_episodes(groups: Groups, events: Sequence[Event], player: Player) -> list[str]:
    """Return in words what is wrong: `groups` as they were received, by name, `events` of all processes."""
    return [*_wrong_ends(events, player), *_wrongly_kept(groups, events), *_wrongly_rated(groups)]


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
                    f"group {end.group}: {strike.name} of who played an episode, which {end.name}, not {wanted}"
                )
    wrong += [
        f"group {end.group}: an episode {end.name}, although nobody was struck that played it"
        for end in ended
        if end not in struck and end.name.removeprefix(ENDED) in STRUCK
    ]
    return wrong


def _wrongly_kept(groups: Groups, events: Sequence[Event]) -> list[str]:
    """Episodes that were kept with another end than they had; a group may be played again under its name."""
    ended: dict[str, Counter[str]] = {}
    for event in events:
        if event.name.startswith(ENDED):
            ended.setdefault(event.group, Counter())[event.name.removeprefix(ENDED)] += 1
    return [
        f"group {name}: {count} episodes more were kept as {state} than ended so"
        for name, group in _played(groups)
        for state, count in (ends_of([(name, group)]) - ended.get(group.group_id, Counter())).items()
    ]


def _wrongly_rated(groups: Groups) -> list[str]:
    return [
        f"group {name}: an episode ended as {episode.course.state} with the reward {episode.reward}"
        for name, group in _played(groups)
        for episode in group.episodes
        if not _is_rated_rightly(episode)
    ]


def _is_rated_rightly(episode: Episode) -> bool:
    return (episode.reward is not None) == (episode.course.state in REWARDED)


def _played(groups: Groups) -> list[tuple[str, EpisodeGroup]]:
    return [(name, group) for name, group in groups if isinstance(group, EpisodeGroup)]
