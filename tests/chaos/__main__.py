"""Run a chaos campaign: `python -m tests.chaos --help`.

A campaign runs the system as separate processes. It kills, stops and cuts off parts at random moments and at every
named state, restarts dead processes and audits the result. Exit code 0 requires all of these: no group is lost,
duplicated or mislabelled; no process crashed or hung; no rival got a server of a run; every requested shutdown was
clean; every due evaluation counts each prompt once; at most one fault, or 10%, was skipped; training on several servers
never stopped for more than 10 s while a server was available.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import msgspec

from tests.chaos.audit import audit_prompts, audit_received
from tests.chaos.outages import outages
from tests.chaos.process import FORKED
from tests.chaos.report import NUM_LONGEST, LegReport, Report, make_report
from tests.chaos.run import Run
from tests.chaos.schedule import Engine, Leg, Player, schedule
from tests.chaos.stops import Stop, stops
from tests.chaos.supervisor import Supervisor

NUM_AT_ONCE: dict[Engine, int] = {"fake": 4, "real": 1}
"""Concurrent legs. A fake leg mostly waits for deadlines."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--servers", type=int, default=1, help="servers of each run; faults hit one at a time")
    about = parser.add_mutually_exclusive_group()
    about.add_argument(
        "--environment", dest="player", action="store_const", const="environment",
        help="run environments; faults hit environments, and servers between turns",
    )  # fmt: skip
    about.add_argument(
        "--agent", dest="player", action="store_const", const="agent", help="like --environment, with agents"
    )
    about.add_argument("--evaluation", action="store_true", help="evaluate; faults hit during evaluations")
    about.add_argument(
        "--reference", action="store_true", help="with a reference on a server; faults hit it while it scores"
    )
    parser.add_argument("--engine", choices=["real", "fake"], default="real")
    parser.add_argument("--out", type=Path, help="log directory (default: a temporary directory, kept on failure)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    arguments = parser.parse_args()
    if arguments.servers < 1:
        parser.error(f"--servers {arguments.servers} must be at least 1")
    if (arguments.evaluation or arguments.reference) and arguments.servers > 1:
        parser.error("--evaluation and --reference support only --servers 1")
    directory = arguments.out or Path(tempfile.mkdtemp(prefix="chaos-"))
    report = campaign(
        arguments.seed, arguments.faults, arguments.engine, directory, arguments.servers, arguments.player,
        arguments.evaluation, arguments.reference,
    )  # fmt: skip
    encoded = msgspec.json.encode(report)
    print((encoded if arguments.json else msgspec.json.format(encoded)).decode())
    if not report.is_clean:
        print(f"logs of all processes: {directory}", file=sys.stderr)
    elif arguments.out is None:
        shutil.rmtree(directory)
    sys.exit(0 if report.is_clean else 1)


def campaign(
    seed: int, num_faults: int, engine: Engine, directory: Path, num_servers: int = 1, player: Player | None = None,
    has_evaluations: bool = False, has_reference: bool = False,
) -> Report:  # fmt: skip
    """Run all legs. Writes schedule.json (the planned faults) and legs.json (the results) to `directory`."""
    # Inherited by all processes. The second silences warnings about resources of killed processes.
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker"}
    started = time.monotonic()
    legs = schedule(seed, num_faults, engine, num_servers, player, has_evaluations, has_reference)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "schedule.json").write_bytes(msgspec.json.format(msgspec.json.encode(legs)))
    with ThreadPoolExecutor(NUM_AT_ONCE[engine]) as threads, ProcessPoolExecutor(1, FORKED) as auditor:
        auditor.submit(int).result()  # starts its process before any lookup of child processes (learner.sandbox.start)
        reports = list(threads.map(lambda leg: run_leg(leg, engine, directory / f"leg-{leg.number}", auditor), legs))
    (directory / "legs.json").write_bytes(msgspec.json.format(msgspec.json.encode(reports)))
    return make_report(seed, engine, reports, time.monotonic() - started)


def run_leg(leg: Leg, engine: Engine, directory: Path, auditor: Executor) -> LegReport:
    """Run one leg to its end and audit it. The slow audits run in `auditor`."""
    run = Run(leg, engine, directory)
    supervisor = Supervisor(leg, run, lambda text: print(text, file=sys.stderr, flush=True))
    try:
        supervisor.supervise()
    finally:
        run.close()
    learner = run.config.learner
    is_several = leg.num_servers > 1  # such a run is interrupted; a run on one server must end on its own
    received = auditor.submit(audit_received, directory, run.config, leg).result()
    prompts = audit_prompts(
        directory / "run" / "ledger.db", num_steps=run.events.last_step if is_several else learner.steps,
        groups_per_step=learner.groups_per_step, num_prompts=learner.data.num_prompts or 0, seed=run.config.seed,
    )  # fmt: skip
    return LegReport(
        leg=leg, results=supervisor.results, hangs=supervisor.hangs, died=supervisor.died,
        undrained=supervisor.undrained, taken_away=supervisor.taken_away, prompts=prompts, received=received,
        stops=longest_stops(run, supervisor),
    )  # fmt: skip


def longest_stops(run: Run, supervisor: Supervisor) -> list[Stop]:
    """Return the longest stops of a run on several servers; none for one server."""
    if len(run.places) == 1:
        return []
    events = run.read_events()
    steps_s = [event.time_s for event in events if event.name == "consumed"]
    return stops(steps_s, outages(supervisor.harms, events), len(run.places))[:NUM_LONGEST]


if __name__ == "__main__":
    main()
