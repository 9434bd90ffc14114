"""What a campaign found, as one JSON object."""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from tests.chaos.audit import Prompts, Received
from tests.chaos.schedule import Engine, Leg
from tests.chaos.stops import Stop
from tests.chaos.struck import Struck

NUM_TOLD = 5
NUM_LONGEST = 3
TRACEBACK = " with exit code 1: "
"""Python's code for an exception that nobody has caught; an error that is told ends with 2."""
MAX_LEFT_OUT_SHARE = 0.1
MAX_STOP_S = 10.0
"""That training may stand still while a server is left."""


class LegReport(msgspec.Struct, frozen=True, kw_only=True):
    """One run and its audits."""

    leg: Leg
    struck: list[Struck]
    hangs: list[str]
    died: list[str]
    undrained: list[str]
    taken_away: list[str]
    prompts: Prompts
    received: Received
    stops: list[Stop]
    """Of a run on several servers: the longest, the longest first."""


class Spread(msgspec.Struct, frozen=True):
    """Of some seconds."""

    median: float | None
    max: float | None
    count: int
    longest: list[str]
    """In words: the faults that took longest, the longest first."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The campaign. `lost` to `versions_wrong` must be 0, few faults left out, and of several servers none waited for."""

    seed: int
    engine: Engine
    servers: int
    targets: list[str]
    faults: int
    faults_asked: int
    faults_left_out: int
    """Those that could not be done: their state did not come up, or their target did not exist."""
    by_kind: dict[str, int]
    by_state: dict[str, int]
    prompts_expected: int
    prompts_consumed_once: int
    lost: int
    duplicated: int
    overtaken: int
    hangs: int
    versions_wrong: int
    completions_checked: int
    episode_ends: dict[str, int]
    """Where the policy plays: how many that have come ended how."""
    episodes_misjudged: int
    """With a reward although they say nothing about the policy, or without although they do; or ended otherwise than they must have."""
    evaluations_due: int
    """Where the policy is evaluated: steps after which it was to be, with the first."""
    evaluations_left_out: int
    """Of those: the evaluation before was still under way. Never where a run pins."""
    evaluations_wrong: int
    """Not there, there twice, of other weights, or with a prompt that counts not once or not as it was answered."""
    crashes: int
    """Processes that nobody had struck and that ended in a traceback."""
    undrained: int
    """Servers and learners that were told to end and did not in order and in time."""
    taken_away: int
    """Servers that welcomed a rival while the run had them."""
    ended_by_themselves: dict[str, int]
    """Processes that nobody had struck; each was started again."""
    notice_s: Spread
    """From the fault until the learner took the server for lost, where it lasted long enough for that."""
    server_notice_s: Spread
    """The same until the server could not reach the learner."""
    recover_s: Spread
    """From the moment what was struck could work again until a step with new groups was done."""
    start_s: Spread
    """From the start of a killed process to that moment."""
    longest_stop_s: float | None
    """In which no step was done although a server, and the learner, was there; None with one server, for which others wait."""
    longest_stops: list[str]
    """In words: the faults beside the longest stops."""
    seconds: float
    faults_per_minute: float
    problems: list[str]
    """In words, with the leg; the first of each kind."""

    @property
    def is_clean(self) -> bool:
        num_wrong = self.lost + self.duplicated + self.overtaken + self.hangs + self.versions_wrong + self.crashes
        num_wrong += self.undrained + self.taken_away + self.episodes_misjudged + self.evaluations_wrong
        has_stopped = self.longest_stop_s is not None and self.longest_stop_s > MAX_STOP_S
        return (
            num_wrong == 0
            and not has_stopped
            and self.faults_left_out <= max(1, MAX_LEFT_OUT_SHARE * self.faults_asked)
        )


def make_report(seed: int, engine: Engine, legs: Sequence[LegReport], seconds: float) -> Report:
    struck = [each for leg in legs for each in leg.struck]
    names = {id(each): f"leg {leg.leg.number}: {each.fault}" for leg in legs for each in leg.struck}
    asked = sum(len(leg.leg.faults) for leg in legs)
    lost, duplicated, overtaken, hangs, wrong, misjudged, evaluations, crashes, undrained, taken_away = (
        [f"leg {leg.leg.number}: {kind}: {text}" for leg in legs for text in texts(leg)]
        for kind, texts in (
            ("lost", lambda leg: leg.prompts.lost),
            ("duplicated", lambda leg: leg.prompts.duplicated),
            ("overtaken", lambda leg: leg.prompts.overtaken),
            ("hang", lambda leg: leg.hangs),
            ("wrong version", lambda leg: leg.received.versions_wrong),
            ("misjudged", lambda leg: leg.received.episodes_misjudged),
            ("evaluation", lambda leg: leg.received.evaluations.wrong if leg.received.evaluations else []),
            ("crash", lambda leg: [died for died in leg.died if TRACEBACK in died]),
            ("not drained", lambda leg: leg.undrained),
            ("taken away", lambda leg: leg.taken_away),
        )
    )
    stops = sorted(((stop.seconds, _in_words(leg, stop)) for leg in legs for stop in leg.stops), reverse=True)
    too_long = [f"stop: {text}" for seconds, text in stops if seconds > MAX_STOP_S]
    evaluated = [leg.received.evaluations for leg in legs if leg.received.evaluations is not None]
    return Report(
        seed=seed,
        engine=engine,
        servers=max(leg.leg.num_servers for leg in legs),
        targets=sorted({each.fault.target for each in struck}),
        faults=len(struck),
        faults_asked=asked,
        faults_left_out=asked - len(struck),
        by_kind=_counted(f"{each.fault.target}: {each.fault.kind}" for each in struck),
        by_state=_counted(each.fault.state.label for each in struck),
        prompts_expected=sum(leg.prompts.expected for leg in legs),
        prompts_consumed_once=sum(leg.prompts.consumed_once for leg in legs),
        lost=len(lost),
        duplicated=len(duplicated),
        overtaken=len(overtaken),
        hangs=len(hangs),
        versions_wrong=len(wrong),
        completions_checked=sum(leg.received.completions_checked for leg in legs),
        episode_ends=dict(sum((Counter(leg.received.episode_ends) for leg in legs), Counter())),
        episodes_misjudged=len(misjudged),
        evaluations_due=sum(found.due for found in evaluated),
        evaluations_left_out=sum(found.left_out for found in evaluated),
        evaluations_wrong=len(evaluations),
        crashes=len(crashes),
        undrained=len(undrained),
        taken_away=len(taken_away),
        ended_by_themselves=_counted(died for leg in legs for died in leg.died),
        notice_s=_spread((each.notice_s, names[id(each)]) for each in struck if each.fault.target != "learner"),
        server_notice_s=_spread((each.notice_s, names[id(each)]) for each in struck if each.fault.target == "learner"),
        recover_s=_spread((each.recover_s, names[id(each)]) for each in struck),
        start_s=_spread((each.start_s, names[id(each)]) for each in struck),
        longest_stop_s=round(stops[0][0], 2) if stops else None,
        longest_stops=[text for _, text in stops[:NUM_LONGEST]],
        seconds=round(seconds, 1),
        faults_per_minute=round(60 * len(struck) / seconds, 1),
        problems=[
            problem
            for kind in (
                hangs,
                lost,
                duplicated,
                overtaken,
                wrong,
                misjudged,
                evaluations,
                crashes,
                undrained,
                taken_away,
                too_long,
            )
            for problem in kind[:NUM_TOLD]
        ],
    )


def _in_words(leg: LegReport, stop: Stop) -> str:
    """With the last fault before its end."""
    before = [each for each in leg.struck if each.struck_at < stop.until_s]
    fault = f": {before[-1].fault}" if before else ", before any fault"
    return f"{stop.seconds:.2f} s: leg {leg.leg.number}{fault}"


def _counted(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _spread(seconds: Iterable[tuple[float | None, str]]) -> Spread:
    known = sorted(((each, name) for each, name in seconds if each is not None), reverse=True)
    if not known:
        return Spread(None, None, 0, [])
    return Spread(
        median=round(statistics.median(each for each, _ in known), 2),
        max=round(known[0][0], 2),
        count=len(known),
        longest=[f"{each:.2f} s: {name}" for each, name in known[:NUM_LONGEST]],
    )
