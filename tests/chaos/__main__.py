"""`python -m tests.chaos [--json] [--seed S] [--faults N] [--servers M] [--environment] [--evaluation] [--engine real|fake] [--out DIR]`

Runs the system as separate processes, kills, stops and cuts off its parts at random moments and at every named state, starts
again what has died, and audits what is left. Exit code 0 only if nothing was lost, duplicated, mislabelled, crashed or hung, every
server that was told to end did so in order, every evaluation that was due counts every prompt once, no more than one fault in ten (or a single one) could not be done, and training on several
servers never stood still for more than 10 s while one of them was left.
"""

import argparse
import os
import shutil
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from tests.chaos.audit import audit_prompts
from tests.chaos.evaluations import audit_evaluations
from tests.chaos.outages import outages
from tests.chaos.report import NUM_LONGEST, LegReport, Report, make_report
from tests.chaos.run import Run
from tests.chaos.schedule import Engine, Leg, schedule
from tests.chaos.stops import Stop, stops
from tests.chaos.supervisor import Supervisor

NUM_AT_ONCE: dict[Engine, int] = {"fake": 3, "real": 1}
"""Legs at the same time: a fake one mostly waits for deadlines."""
AUDITING = threading.Lock()
"""Transformers gives models garbage for weights when several threads load one."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.partition("\n\n")[2])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=50)
    parser.add_argument("--servers", type=int, default=1, help="of each run; one of several is struck at a time")
    parser.add_argument(
        "--environment", action="store_true", help="play, and strike environments and servers between turns"
    )
    parser.add_argument("--evaluation", action="store_true", help="evaluate, and strike in the midst of evaluations")
    parser.add_argument("--engine", choices=["real", "fake"], default="real")
    parser.add_argument("--out", type=Path, help="where logs go (default: a temporary directory, kept on failure)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    arguments = parser.parse_args()
    if arguments.servers < 1:
        parser.error(f"--servers {arguments.servers} must be at least 1")
    if arguments.evaluation and (arguments.environment or arguments.servers > 1):
        parser.error("--evaluation is of one server, whose policy does not play")
    directory = arguments.out or Path(tempfile.mkdtemp(prefix="chaos-"))
    report = campaign(
        arguments.seed, arguments.faults, arguments.engine, directory, arguments.servers, arguments.environment,
        arguments.evaluation,
    )  # fmt: skip
    encoded = msgspec.json.encode(report)
    print((encoded if arguments.json else msgspec.json.format(encoded)).decode())
    if not report.is_clean:
        print(f"the logs of all processes: {directory}", file=sys.stderr)
    elif arguments.out is None:
        shutil.rmtree(directory)
    sys.exit(0 if report.is_clean else 1)


def campaign(
    seed: int, num_faults: int, engine: Engine, directory: Path, num_servers: int = 1, has_environment: bool = False,
    has_evaluations: bool = False,
) -> Report:  # fmt: skip
    """Run all legs; `directory` gets schedule.json, what is to be done, and legs.json, what became of it."""
    # Of the processes that are started; the second is about what killed ones leave behind.
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore::UserWarning:multiprocessing.resource_tracker"}
    started = time.monotonic()
    legs = schedule(seed, num_faults, engine, num_servers, has_environment, has_evaluations)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "schedule.json").write_bytes(msgspec.json.format(msgspec.json.encode(legs)))
    with ThreadPoolExecutor(max(1, NUM_AT_ONCE[engine] // num_servers)) as threads:
        reports = list(threads.map(lambda leg: run_leg(leg, engine, directory / f"leg-{leg.number}"), legs))
    (directory / "legs.json").write_bytes(msgspec.json.format(msgspec.json.encode(reports)))
    return make_report(seed, engine, reports, time.monotonic() - started)


def run_leg(leg: Leg, engine: Engine, directory: Path) -> LegReport:
    """Run one leg to its end and audit it."""
    run = Run(leg, engine, directory)
    supervisor = Supervisor(leg, run, lambda text: print(text, file=sys.stderr, flush=True))
    try:
        supervisor.supervise()
    finally:
        run.close()
    from tests.chaos.answers import AnswerAudit
    from tests.chaos.learner_process import WEIGHTS
    from tests.chaos.versions import audit_episodes, audit_versions  # torch: not in the process that only supervises

    learner = run.config.learner
    num_steps = (
        learner.steps if leg.num_servers == 1 else run.events.last_step
    )  # one is interrupted, one must end by itself
    with AUDITING:
        num_checked, wrong = audit_versions(directory, run.config)
        evaluations = None
        if leg.has_evaluations:
            evaluations = audit_evaluations(
                directory, run.config, num_steps, AnswerAudit(directory, run.config).problems
            )
    ends, misjudged = audit_episodes(directory)
    prompts = audit_prompts(
        directory / "run" / "ledger.db", num_steps=num_steps, groups_per_step=learner.groups_per_step,
        num_prompts=learner.data.num_prompts or 0, seed=run.config.seed,
    )  # fmt: skip
    if leg.num_servers > 1 and not wrong:
        shutil.rmtree(directory / WEIGHTS)  # of far more steps than a run on one server has, which waits for it
    return LegReport(
        leg=leg, struck=supervisor.struck, hangs=supervisor.hangs, died=supervisor.died, undrained=supervisor.undrained,
        prompts=prompts, num_completions_checked=num_checked, versions_wrong=wrong, stops=longest_stops(run, supervisor),
        episode_ends=ends, episodes_misjudged=misjudged, evaluations=evaluations,
    )  # fmt: skip


def longest_stops(run: Run, supervisor: Supervisor) -> list[Stop]:
    """Return the longest of a run on several servers."""
    if len(run.places) == 1:
        return []
    events = run.read_events()
    steps_s = [event.time_s for event in events if event.name == "consumed"]
    return stops(steps_s, outages(supervisor.harms, events), len(run.places))[:NUM_LONGEST]


if __name__ == "__main__":
    main()
