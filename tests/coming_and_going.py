"""A run of two ranks whose servers change under it: the third comes, the first dies, the second is taken out of the list.

    servers.txt ─▶ learner, two ranks over gloo ─▶ timeline.jsonl, ledger.db, report.html

The same story for any servers; each turn of it waits for the timeline to have told the one before, never for a clock.
"""

import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import msgspec

import learner.servers.fleet
from learner.config import LearnerRun
from learner.report.records import read_events
from protocol.config import DEFAULT_ENDPOINT, to_toml
from tests.learner.forked_learner import end_of, start_learner
from tests.learner.ranks import Place, places_of

REREAD_EVERY_S = 0.2
"""In place of the fleet's 5 s."""
TURN_TIMEOUT_S = 120.0
END_TIMEOUT_S = 240.0


def run_while_servers_change(
    directory: Path, run: LearnerRun, endpoints: Sequence[str], kill_first: Callable[[], None]
) -> str:
    """Train to the last step with exit code 0 on both ranks; return what they logged."""
    first, second, third = endpoints
    listed, config, log = directory / "servers.txt", directory / "run.toml", directory / "run.log"
    listed.write_text(f"{first}\n{second}\n")
    run = msgspec.structs.replace(run, endpoint=DEFAULT_ENDPOINT, endpoints=(), endpoints_from=f"file:{listed}")
    config.write_text(to_toml(run))
    log.touch()
    ranks = [
        start_learner(("train", str(config)), log, log, partial(enter_and_reread_often, place))
        for place in places_of(2)
    ]
    timeline = Path(run.run_dir) / "timeline.jsonl"
    try:
        for server in (first, second):
            wait_until_told(timeline, f"the server at {server}: syncing → ready", log)
        listed.write_text(f"{first}\n{second}\n{third}\n")
        wait_until_told(timeline, f"the server at {third}: syncing → ready", log)
        kill_first()
        wait_until_told(timeline, f"the server at {first}: ready → joining", log)
        listed.write_text(f"{first}\n{third}\n")
        wait_until_told(timeline, f"the server at {second}: draining → gone", log)
        assert [end_of(rank, log, END_TIMEOUT_S) for rank in ranks] == [0, 0], log.read_text()
    finally:
        for rank in ranks:
            rank.kill()
    return log.read_text()


def assert_the_story_is_told(run: LearnerRun, endpoints: Sequence[str]) -> None:
    """In the timeline and on the page that a user reads, in its order."""
    first, second, third = endpoints
    story = [
        "the run started",
        f"the server at {third}: joining → syncing",
        f"the server at {third}: syncing → ready",
        f"the server at {first}: ready → joining",
        f"the server at {second}: ready → draining",
        f"the server at {second}: draining → gone",
    ]
    told = [event.what for event in read_events(Path(run.run_dir) / "timeline.jsonl")]
    page = (Path(run.run_dir) / "report.html").read_text().partition("<h2>Events</h2>")[2]
    told_in_turn, place = iter(told), 0
    for what in story:
        assert what in told_in_turn, f"{what}: not in its place in {told}"
        place = page.find(f"<td>{what}</td>", place)
        assert place >= 0, f"{what}: not in its place in {page}"


def assert_every_prompt_was_consumed_once(run: LearnerRun) -> None:
    """In every epoch, up to the last step."""
    config = run.learner
    with closing(sqlite3.connect(Path(run.run_dir) / "ledger.db")) as ledger:
        consumed = ledger.execute("SELECT epoch, prompt_id FROM groups WHERE state = 'consumed'").fetchall()
        states = ledger.execute("SELECT DISTINCT state FROM groups").fetchall()
    num_prompts, num_groups = config.data.num_prompts or 0, config.steps * config.groups_per_step
    assert num_groups % num_prompts == 0, "else which prompts the last epoch owes is a matter of its order"
    assert sorted(consumed) == [divmod(index, num_prompts) for index in range(num_groups)]
    assert states == [("consumed",)], "no attempt was spent, and none is left over"


def wait_until_told(timeline: Path, what: str, log: Path) -> None:
    give_up_at = time.monotonic() + TURN_TIMEOUT_S
    while what not in [event.what for event in read_events(timeline)]:
        assert time.monotonic() < give_up_at, f"not told within {TURN_TIMEOUT_S:g} s: {what}\n{log.read_text()}"
        time.sleep(0.05)


def enter_and_reread_often(place: Place) -> None:
    place.enter()
    learner.servers.fleet.REREAD_EVERY_S = REREAD_EVERY_S
