"""The report of a campaign, as one JSON object."""

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from tests.chaos.audit import Prompts, Received
from tests.chaos.fault_result import FaultResult
from tests.chaos.schedule import Engine, Leg
from tests.chaos.stops import Stop

NUM_PROBLEMS = 5
NUM_LONGEST = 3
TRACEBACK = re.compile(" with exit code 1: (?!error: )")
"""Exit code of Python after an uncaught exception, without the line of a reported error."""
MAX_LEFT_OUT_SHARE = 0.1
MAX_STOP_S = 10.0
"""Longest time that training may stop while a server is available."""


class LegReport(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one run and its audits."""

    leg: Leg
    results: list[FaultResult]
    hangs: list[str]
    died: list[str]
    undrained: list[str]
    taken_away: list[str]
    prompts: Prompts
    received: Received
    stops: list[Stop]
    """The longest stops of a run on several servers, the longest first."""


class Spread(msgspec.Struct, frozen=True):
    """Statistics of durations in seconds."""

    median: float | None
    max: float | None
    count: int
    longest: list[str]
    """The faults with the longest durations, the longest first."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a campaign. See `is_clean` for the conditions of success."""

    seed: int
    engine: Engine
    servers: int
    targets: list[str]
    faults: int
    faults_asked: int
    faults_left_out: int
    """Faults that could not be committed: the run did not reach the state, or the target did not exist."""
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
    """Received episodes by end state."""
    episodes_misjudged: int
    """Episodes with a reward although they say nothing about the policy, without a reward although they do, or with a
    wrong end state."""
    evaluations_due: int
    """Steps with a due evaluation, including step 0."""
    evaluations_left_out: int
    """Due evaluations that were skipped because another was still running. None in a run that pins."""
    evaluations_wrong: int
    """Evaluations that are missing, duplicated or of other weights, and prompts that count more than once or with a
    wrong reward."""
    references_wrong: int
    """Steps with another version of the reference than without faults."""
    crashes: int
    """Processes that ended in a traceback without a fault."""
    undrained: int
    """Servers and learners whose requested shutdown was not clean or not in time."""
    taken_away: int
    """Servers that welcomed a rival while a run used them."""
    ended_by_themselves: dict[str, int]
    """Processes that ended without a fault. Each was restarted."""
    notice_s: Spread
    """From the fault until the learner considered the server lost, for faults that lasted long enough."""
    server_notice_s: Spread
    """From the fault until the server could not reach the learner."""
    recover_s: Spread
    """From the moment when the target could work again until a step with new groups was done."""
    start_s: Spread
    """From the restart of a killed process until it could work."""
    longest_stop_s: float | None
    """Longest time without a step while the learner and a server were up. None with a single server."""
    longest_stops: list[str]
    """The longest stops, each with the last fault before its end."""
    seconds: float
    faults_per_minute: float
    problems: list[str]
    """The first problems of each kind, with their legs."""

    @property
    def is_clean(self) -> bool:
        num_wrong = self.lost + self.duplicated + self.overtaken + self.hangs + self.versions_wrong + self.crashes
        num_wrong += self.undrained + self.taken_away + self.episodes_misjudged + self.evaluations_wrong
        num_wrong += self.references_wrong
        has_stopped = self.longest_stop_s is not None and self.longest_stop_s > MAX_STOP_S
        return (
            num_wrong == 0
            and not has_stopped
            and self.faults_left_out <= max(1, MAX_LEFT_OUT_SHARE * self.faults_asked)
        )


def make_report(seed: int, engine: Engine, legs: Sequence[LegReport], seconds: float) -> Report:
    results = [each for leg in legs for each in leg.results]
    names = {id(each): f"leg {leg.leg.number}: {each.fault}" for leg in legs for each in leg.results}
    num_planned = sum(len(leg.leg.faults) for leg in legs)
    lost, duplicated, overtaken, hangs, wrong, misjudged, evaluations, references, crashes, undrained, taken_away = (
        [f"leg {leg.leg.number}: {kind}: {text}" for leg in legs for text in texts(leg)]
        for kind, texts in (
            ("lost", lambda leg: leg.prompts.lost),
            ("duplicated", lambda leg: leg.prompts.duplicated),
            ("overtaken", lambda leg: leg.prompts.overtaken),
            ("hang", lambda leg: leg.hangs),
            ("wrong version", lambda leg: leg.received.versions_wrong),
            ("misjudged", lambda leg: leg.received.episodes_misjudged),
            ("evaluation", lambda leg: leg.received.evaluations.wrong if leg.received.evaluations else []),
            ("reference", lambda leg: leg.received.references_wrong),
            ("crash", lambda leg: [died for died in leg.died if TRACEBACK.search(died)]),
            ("not drained", lambda leg: leg.undrained),
            ("taken away", lambda leg: leg.taken_away),
        )
    )
    stops = sorted(((stop.seconds, _describe(leg, stop)) for leg in legs for stop in leg.stops), reverse=True)
    too_long = [f"stop: {text}" for seconds, text in stops if seconds > MAX_STOP_S]
    evaluated = [leg.received.evaluations for leg in legs if leg.received.evaluations is not None]
    return Report(
        seed=seed,
        engine=engine,
        servers=max(leg.leg.num_servers for leg in legs),
        targets=sorted({each.fault.target for each in results}),
        faults=len(results),
        faults_asked=num_planned,
        faults_left_out=num_planned - len(results),
        by_kind=_count(f"{each.fault.target}: {each.fault.kind}" for each in results),
        by_state=_count(each.fault.state.label for each in results),
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
        evaluations_left_out=sum(found.skipped for found in evaluated),
        evaluations_wrong=len(evaluations),
        references_wrong=len(references),
        crashes=len(crashes),
        undrained=len(undrained),
        taken_away=len(taken_away),
        ended_by_themselves=_count(died for leg in legs for died in leg.died),
        notice_s=_spread((each.notice_s, names[id(each)]) for each in results if each.fault.target != "learner"),
        server_notice_s=_spread((each.notice_s, names[id(each)]) for each in results if each.fault.target == "learner"),
        recover_s=_spread((each.recover_s, names[id(each)]) for each in results),
        start_s=_spread((each.start_s, names[id(each)]) for each in results),
        longest_stop_s=round(stops[0][0], 2) if stops else None,
        longest_stops=[text for _, text in stops[:NUM_LONGEST]],
        seconds=round(seconds, 1),
        faults_per_minute=round(60 * len(results) / seconds, 1),
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
                references,
                crashes,
                undrained,
                taken_away,
                too_long,
            )
            for problem in kind[:NUM_PROBLEMS]
        ],
    )


def _describe(leg: LegReport, stop: Stop) -> str:
    """Describe a stop with the last fault before its end."""
    before = [each for each in leg.results if each.struck_at < stop.until_s]
    fault = f": {before[-1].fault}" if before else ", before any fault"
    return f"{stop.seconds:.2f} s: leg {leg.leg.number}{fault}"


def _count(names: Iterable[str]) -> dict[str, int]:
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
