"""The parts of a chaos campaign: schedule, traps, audits and report."""

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import pytest

from learner.rollouts.ledger import Ledger
from tests.chaos.audit import Prompts, Received, audit_prompts, audit_references
from tests.chaos.fault_result import FaultResult, notice_s
from tests.chaos.process import LEARNER, ROOT, SERVER
from tests.chaos.report import LegReport, Report, make_report
from tests.chaos.run import Run
from tests.chaos.schedule import OF_EPISODES, STATES, Fault, Kind, Target, schedule
from tests.chaos.stops import Stop
from tests.chaos.traps import Event, Traps, set_trap
from tests.learner.ledgers import receive
from tests.learner.runs import make_run

pytestmark = pytest.mark.system

NUM_STEPS, GROUPS_PER_STEP, NUM_PROMPTS, SEED = 5, 2, 4, 3


def test_the_same_seed_gives_the_same_faults_and_another_seed_gives_others() -> None:
    assert schedule(7, 60, "fake") == schedule(7, 60, "fake")
    assert schedule(7, 60, "fake") != schedule(8, 60, "fake")


def test_a_campaign_visits_every_state_and_has_the_requested_number_of_faults() -> None:
    legs = schedule(0, 130, "real")
    faults = [fault for leg in legs for fault in leg.faults]
    assert len(faults) == 130
    assert {state.label for state in STATES} < {fault.state.label for fault in faults}
    targets = {"server", "engine core", "worker", "learner", "reward worker", "link", "call", "rival"}
    assert {fault.target for fault in faults} == targets
    assert {("server", "hang up"), ("learner", "hang up")} < {(fault.target, fault.kind) for fault in faults}
    assert {fault.state.name for fault in faults if fault.kind == "hang"} == {"pause", "load_push"}
    for leg in legs:
        assert all((fault.target == "worker") == (leg.num_workers == 2) for fault in leg.faults)
        assert all(fault.state.overlap_weight_loading in (None, leg.overlap_weight_loading) for fault in leg.faults)
        assert max(fault.after_step for fault in leg.faults) < leg.steps


def test_no_fault_targets_a_process_that_does_not_exist_in_that_state() -> None:
    legs = [leg for num_servers in (1, 3) for leg in schedule(5, 1000, "fake", num_servers)]
    pairs = {(fault.state.label, fault.target) for leg in legs for fault in leg.faults}
    assert ("learner resuming", "reward worker") in pairs
    assert ("learner starting", "reward worker") not in pairs


@pytest.mark.parametrize(("seed", "num_faults"), [(3, 1), (3, 8), (3, 50), *((seed, 60) for seed in range(20))])
def test_every_campaign_with_vllm_hits_one_of_two_workers(seed: int, num_faults: int) -> None:
    *_, last = schedule(seed, num_faults, "real")
    assert last.num_workers == 2 and len(last.faults) == max(1, num_faults // 10)


def test_half_of_the_faults_hit_episodes_in_a_campaign_with_an_environment_and_none_in_others() -> None:
    (leg,) = schedule(7, 24, "fake", player="environment")
    states = {state.label for state, _, _ in OF_EPISODES}
    about_episodes = [fault for fault in leg.faults if fault.state.label in states]
    assert len(about_episodes) == 12
    assert {(fault.state, fault.target, fault.kind) for fault in about_episodes} == set(OF_EPISODES)
    assert leg.player == "environment" and schedule(7, 24, "fake")[0].player is None
    assert all(fault.state.label not in states for fault in schedule(7, 60, "fake")[0].faults)


def test_a_trap_is_sprung_at_its_nth_visit_and_only_once(tmp_path: Path) -> None:
    traps = Traps(tmp_path, "learner")
    trap = set_trap(tmp_path, "learner", "mid-bucket", 2, number=0)
    visits = [traps.is_sprung(state) for state in ("mid-bucket", "joining", "mid-bucket", "mid-bucket")]
    assert visits == [False, False, True, False] and not trap.exists()


def test_a_call_hangs_only_at_its_trap_while_its_process_continues(tmp_path: Path) -> None:
    class Engine:
        async def pause(self) -> str:
            return "paused"

    async def run() -> None:
        engine, traps = Engine(), Traps(tmp_path, "engine")
        traps.make_hang(engine, "pause")
        set_trap(tmp_path, "engine", "pause", 2, number=0)
        assert await engine.pause() == "paused"
        hanging = asyncio.create_task(engine.pause())
        await asyncio.sleep(0)
        assert await engine.pause() == "paused" and not hanging.done()
        hanging.cancel()

    asyncio.run(run())


@pytest.mark.parametrize("module", [LEARNER, SERVER])
def test_each_trap_is_at_a_function_that_the_product_has(module: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", module, str(tmp_path), "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- the audit of prompts --------------------------------------------------------------------------------------------


def make_ledger(path: Path) -> Path:
    """Write the ledger of a run without faults: five steps of two groups each, over epochs of four prompts."""
    orders = [np.random.default_rng([SEED, epoch]).permutation(NUM_PROMPTS).tolist() for epoch in range(3)]
    ledger = Ledger(path)
    for slot in range(NUM_STEPS * GROUPS_PER_STEP):
        epoch, place = divmod(slot, NUM_PROMPTS)
        group_id = f"{slot}.0"
        ledger.admit(slot=slot, attempt=0, position=slot, epoch=epoch, prompt_id=orders[epoch][place], version=0)
        receive(ledger, group_id, b"group", 0, 5)
        ledger.score(group_id, "[]", 0.5)
    for step in range(1, NUM_STEPS + 1):
        first = (step - 1) * GROUPS_PER_STEP
        ledger.consume([(f"{slot}.0", 0) for slot in range(first, first + GROUPS_PER_STEP)], step)
    ledger.close()
    return path


def audit_after(tmp_path: Path, *doctoring: str) -> Prompts:
    path = make_ledger(tmp_path / "ledger.db")
    with sqlite3.connect(path) as db:
        for sql in doctoring:
            assert db.execute(sql).rowcount != 0
    return audit_prompts(path, num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP, num_prompts=NUM_PROMPTS, seed=SEED)


def test_a_run_without_faults_has_a_clean_audit(tmp_path: Path) -> None:
    audit = audit_after(tmp_path)
    assert (audit.expected, audit.consumed_once) == (10, 10)
    assert not (audit.lost or audit.duplicated or audit.overtaken)


def test_the_audit_finds_a_prompt_that_was_lost(tmp_path: Path) -> None:
    audit = audit_after(tmp_path, "DELETE FROM groups WHERE slot = 3")
    assert any("of epoch 0" in text for text in audit.lost) and "step 2 has 1 groups, not 2" in audit.lost


def test_the_audit_finds_a_prompt_that_waits_after_later_prompts_were_consumed(tmp_path: Path) -> None:
    audit = audit_after(tmp_path, "UPDATE groups SET state = 'scored', step = NULL WHERE slot = 3")
    assert any("of epoch 0" in text for text in audit.lost)


def test_the_audit_finds_a_prompt_that_was_consumed_twice(tmp_path: Path) -> None:
    audit = audit_after(
        tmp_path,
        "DROP INDEX one_live_group_per_slot",
        "INSERT INTO groups SELECT '2.1', slot, 1, position, epoch, prompt_id, state, reason, admitted_version, "
        "oldest_version, 5, staleness, num_tokens, reward_mean, rewards, admitted_at, received_at, scored_at, "
        "consumed_at, payload_file, payload_offset, payload_bytes FROM groups WHERE slot = 2",
    )
    assert len(audit.duplicated) == 1 and audit.consumed_once == 9


def test_the_audit_finds_a_wrong_prompt(tmp_path: Path) -> None:
    audit = audit_after(tmp_path, "UPDATE groups SET prompt_id = (prompt_id + 1) % 4 WHERE slot = 5")
    assert len(audit.lost) == len(audit.duplicated) == 1


def test_the_audit_finds_a_slot_that_was_overtaken(tmp_path: Path) -> None:
    audit = audit_after(
        tmp_path, "UPDATE groups SET step = 4 WHERE slot = 3", "UPDATE groups SET step = 2 WHERE slot = 6"
    )
    assert audit.overtaken and not (audit.lost or audit.duplicated)


def test_the_audit_accepts_a_slot_that_was_skipped_for_good(tmp_path: Path) -> None:
    audit = audit_after(
        tmp_path, "UPDATE groups SET state = 'dropped', reason = 'no_signal', step = NULL WHERE slot = 7"
    )
    assert audit.lost == ["step 4 has 1 groups, not 2"]


# --- the report ------------------------------------------------------------------------------------------------------


class FinishedRun:
    """Replaces a run that is over: the events of its processes."""

    first = Run.first

    def __init__(self, *events: tuple[float, str]) -> None:
        self.events = [Event(time_s=time_s, process="", pid=1, name=name) for time_s, name in events]

    def read_events(self) -> list[Event]:
        return self.events


def result_of(target: Target, kind: Kind) -> FaultResult:
    """Return a fault at second 10 whose target could work again at second 14."""
    fault = Fault(after_step=1, state=STATES[0], nth=1, target=target, kind=kind, seconds=4.0)
    return FaultResult(fault=fault, struck_at=10.0, back_at=14.0)


@pytest.mark.parametrize(
    ("target", "kind", "events", "expected_s"),
    [
        ("learner", "stop", [(9.0, "learner lost"), (12.5, "learner lost")], 2.5),
        ("learner", "stop", [(14.5, "learner lost")], None),
        ("learner", "kill", [(17.0, "learner lost")], 7.0),
        ("learner", "kill", [(15.0, "server found"), (24.0, "learner lost")], None),
        ("server", "kill", [(10.4, "server lost"), (15.0, "server found")], 0.4),
        ("server", "kill", [(15.0, "server found"), (17.0, "server lost")], None),
        ("server", "kill", [(31.0, "server lost")], None),
        ("server", "drain", [(10.4, "server lost")], None),
        ("reward worker", "kill", [(10.4, "server lost")], None),
    ],
)
def test_the_loss_of_a_peer_is_noticed_only_if_it_was_connected_and_before_it_is_back(
    target: Target, kind: Kind, events: list[tuple[float, str]], expected_s: float | None
) -> None:
    noticed = notice_s(cast(Run, FinishedRun(*events)), result_of(target, kind), until_s=30.0)
    assert noticed == (expected_s if expected_s is None else pytest.approx(expected_s))


def report_of(
    num_faults: int, results: list[FaultResult], died: Sequence[str] = (), stops: Sequence[Stop] = (),
    undrained: Sequence[str] = (), taken_away: Sequence[str] = (),
) -> Report:  # fmt: skip
    leg = msgspec.structs.replace(
        schedule(0, 1, "fake")[0], faults=tuple([result_of("link", "cut").fault] * num_faults)
    )
    prompts = Prompts(expected=1, consumed_once=1, lost=[], duplicated=[], overtaken=[])
    found = LegReport(
        leg=leg, results=results, hangs=[], died=list(died), undrained=list(undrained),
        taken_away=list(taken_away), prompts=prompts,
        received=Received(completions_checked=1, versions_wrong=[], episode_ends={}, episodes_misjudged=[],
            evaluations=None),
        stops=list(stops),
    )  # fmt: skip
    return make_report(0, "fake", [found], 1.0)


def test_the_report_names_the_faults_with_the_longest_times() -> None:
    results = [result_of("server", "kill"), result_of("learner", "stop"), result_of("link", "cut")]
    for number, each in enumerate(results):
        each.notice_s, each.recover_s = 1.0 + number, 8.0 - number
    report = report_of(3, results)
    assert (report.recover_s.max, report.recover_s.median) == (8.0, 7.0)
    assert report.recover_s.longest[0] == f"8.00 s: leg 0: {results[0].fault}"
    assert report.notice_s.longest == [f"3.00 s: leg 0: {results[2].fault}", f"1.00 s: leg 0: {results[0].fault}"]
    assert report.server_notice_s.longest == [f"2.00 s: leg 0: {results[1].fault}"]


@pytest.mark.parametrize(
    ("num_faults", "num_skipped", "is_clean"), [(8, 1, True), (8, 2, False), (100, 10, True), (100, 11, False)]
)
def test_a_campaign_that_skipped_many_faults_is_not_clean(num_faults: int, num_skipped: int, is_clean: bool) -> None:
    report = report_of(num_faults, [result_of("link", "cut")] * (num_faults - num_skipped))
    assert (report.faults_left_out, report.is_clean) == (num_skipped, is_clean)


def test_a_campaign_in_which_a_process_ended_in_a_traceback_is_not_clean() -> None:
    reported = report_of(1, [result_of("link", "cut")], died=["learner with exit code 1: error: no server answers"])
    crashed = report_of(1, [result_of("link", "cut")], died=["server with exit code 1: TypeError: bad operand"])
    assert reported.is_clean and not crashed.is_clean
    assert crashed.problems == ["leg 0: crash: server with exit code 1: TypeError: bad operand"]


def test_a_campaign_in_which_a_server_did_not_shut_down_cleanly_is_not_clean() -> None:
    report = report_of(1, [result_of("server", "drain")], undrained=["exit code -15 after 0.1 s: stopping"])
    assert not report.is_clean and report.undrained == 1
    assert report.problems == ["leg 0: not drained: exit code -15 after 0.1 s: stopping"]


def test_a_campaign_in_which_a_rival_got_a_server_of_the_run_is_not_clean() -> None:
    report = report_of(1, [result_of("rival", "ask")], taken_away=["1 of 9 Hellos were welcomed"])
    assert not report.is_clean and report.taken_away == 1
    assert report.problems == ["leg 0: taken away: 1 of 9 Hellos were welcomed"]


@pytest.mark.parametrize(("seconds", "is_clean"), [(9.9, True), (10.1, False)])
def test_a_campaign_in_which_training_stopped_although_a_server_was_up_is_not_clean(
    seconds: float, is_clean: bool
) -> None:
    report = report_of(1, [result_of("link", "cut")], stops=[Stop(seconds, 9.0, 9.0 + seconds), Stop(1.0, 30.0, 31.0)])
    assert (report.longest_stop_s, report.is_clean) == (seconds, is_clean)
    assert report.longest_stops[0].startswith(f"{seconds:.2f} s: leg 0: cut link for 4 s")
    assert [f"stop: {report.longest_stops[0]}"] == report.problems or is_clean
    assert report_of(1, [result_of("link", "cut")]).longest_stop_s is None


def test_the_audit_finds_a_step_with_another_reference(tmp_path: Path) -> None:
    metrics, config = (
        tmp_path / "metrics.jsonl",
        make_run(tmp_path, reference={"kind": "every", "every_steps": 2}, kl={"coef": 0.1}),
    )
    versions = [(1, 0), (2, 2), (1, 0), (2, 2), (3, 0)]  # a resume repeats two steps
    metrics.write_text("".join(f'{{"step": {step}, "reference/version": {version}.0}}\n' for step, version in versions))
    assert audit_references(metrics, config) == ["after step 3 the reference has version 0, not 2"]
