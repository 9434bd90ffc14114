"""A run of two ranks while its servers change: a third joins, the first dies, the second drains.

    servers.txt ─▶ learner, two ranks over gloo ─▶ timeline.jsonl, ledger.db, report.html

Invariant: each change waits for the previous one to appear in the timeline, never for a clock.
"""

import time
from functools import partial
from pathlib import Path

import msgspec
import pytest

import learner.servers.fleet
from learner.report.records import read_events
from protocol.config import DEFAULT_ENDPOINT, to_toml
from tests.learner.forked_learner import end_of, start_learner
from tests.learner.model_engine import tiny_server
from tests.learner.ranks import Place, places_of
from tests.learner.runs import GROUPS_PER_STEP, make_run, metrics_of, rows_of

pytestmark = pytest.mark.system

NUM_STEPS, NUM_PROMPTS = 48, 8
REREAD_EVERY_S = 0.2
"""Replaces the fleet's 5 s."""
TIMEOUT_S = 120.0


def enter_and_reread_often(place: Place) -> None:
    place.enter()
    learner.servers.fleet.REREAD_EVERY_S = REREAD_EVERY_S


def wait_for_event(timeline: Path, what: str, log: Path) -> None:
    give_up_at = time.monotonic() + TIMEOUT_S
    while what not in [event.what for event in read_events(timeline)]:
        assert time.monotonic() < give_up_at, f"the timeline has no event {what!r}\n{log.read_text()}"
        time.sleep(0.05)


def test_two_ranks_lose_no_group_while_servers_join_die_and_drain(tmp_path: Path) -> None:
    listed, config, log = tmp_path / "servers.txt", tmp_path / "run.toml", tmp_path / "run.log"
    log.touch()
    run = make_run(tmp_path, steps=NUM_STEPS, checkpoint={"every_steps": NUM_STEPS})
    run = msgspec.structs.replace(run, endpoint=DEFAULT_ENDPOINT, endpoints=(), endpoints_from=f"file:{listed}")
    config.write_text(to_toml(run))
    wait_for = partial(wait_for_event, Path(run.run_dir) / "timeline.jsonl", log=log)
    with tiny_server() as first, tiny_server() as second, tiny_server() as third:
        one, two, three = (f"the server at {server.endpoint}" for server in (first, second, third))
        listed.write_text(f"{first.endpoint}\n{second.endpoint}\n")
        ranks = [
            start_learner(("train", str(config)), log, log, partial(enter_and_reread_often, place))
            for place in places_of(2)
        ]
        try:
            wait_for(f"{one}: syncing → ready")
            wait_for(f"{two}: syncing → ready")
            listed.write_text(f"{first.endpoint}\n{second.endpoint}\n{third.endpoint}\n")
            wait_for(f"{three}: syncing → ready")
            first.die()
            wait_for(f"{one}: ready → joining")
            second.drain().result(TIMEOUT_S)
            assert [end_of(rank, log, TIMEOUT_S) for rank in ranks] == [0, 0], log.read_text()
        finally:
            for rank in ranks:
                rank.kill()
        assert all(server.engine.prompts for server in (first, second, third))
    groups = rows_of(run, "epoch, prompt_id, state")
    wanted = [divmod(index, NUM_PROMPTS) for index in range(NUM_STEPS * GROUPS_PER_STEP)]
    assert sorted(groups) == [(epoch, prompt, "consumed") for epoch, prompt in wanted], "no attempt was spent"
    for server in (one, two, three):
        assert f"parity of {server}: mean |Δ logprob| = " in log.read_text()
    last = metrics_of(run)[-1]
    assert last["step"] == NUM_STEPS and last["servers/ready"] == 1
    parity = [line["parity/abs_logprob"] for line in metrics_of(run) if "parity/abs_logprob" in line]
    assert parity and parity[-1] == pytest.approx(0, abs=1e-3)
    story = [
        "the run started", f"{three}: joining → syncing", f"{three}: syncing → ready", f"{one}: ready → joining",
        f"{two}: ready → draining", f"{two}: draining → gone",
    ]  # fmt: skip
    page, place = (Path(run.run_dir) / "report.html").read_text().partition("<h2>Events (UTC)</h2>")[2], 0
    for what in story:
        place = page.find(f"<td>{what}</td>", place)
        assert place >= 0, f"{what}: missing or out of order in {page}"
