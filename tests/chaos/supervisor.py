"""The supervisor of one leg: commits its faults and restarts dead processes until the run ends.

    wait for the step ▸ provoke, if the state needs it ▸ trap ▸ strike ▸ restart ▸ wait for recovery ▸ next fault

Of several servers, one is hit at a time, and only while it and another are ready. After the last fault, once every
server is ready again, such a run is interrupted.

Invariant: every wait has a deadline. A deadline that passes without progress is a hang: it ends the leg, with the
stacks of all processes in their logs.
"""

import math
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.chaos.events import since
from tests.chaos.fault_result import FaultResult, first_up, has_recovered, notice_s
from tests.chaos.outages import Harm, Remedy
from tests.chaos.place import Place
from tests.chaos.process import Process, hang_up, is_stopped, strike
from tests.chaos.rivals import RIVAL, ask
from tests.chaos.run import DRAIN_TIMEOUT_S, Run
from tests.chaos.schedule import DRAIN, ENDS_IN_ORDER, Fault, Kind, Leg
from tests.chaos.traps import flip_of, set_trap

POLL_S = 0.02
SIGNALS: dict[Kind, signal.Signals] = {"kill": signal.SIGKILL, DRAIN: signal.SIGTERM}
"""Signals that end a process. Every other fault only stops it."""
HANG_S = 120.0
"""Longer than a start of vLLM and all deadlines in the config of a run together: a longer wait has nothing to wait
for."""
WORKERS_START_S = 120.0
"""Additional time that vLLM may need to start several workers or servers on a busy machine."""
FLIPPED_BROADCAST = 5
"""A broadcast of the third bucket. The first two are loaded by then, so the weights are torn."""
FRUITLESS_STEPS = 12
"""Steps to wait for a state before giving up. Several servers share the causes of a state, so each reaches it less
often."""
FRUITLESS_S = 120.0
"""Seconds to wait for a state that needs a restart of one of several servers while the run continues."""
STEPS_BETWEEN, STEPS_WITHOUT_FAULTS = 2, 10
"""Steps of a run on several servers between faults, and after the last fault."""
MAX_TRIES = 3
"""Tries of a fault whose state is not reached, or whose target does not exist at the moment."""
MAX_DEATHS = 20
"""Limit of processes that end without a fault in one leg. Without a limit the leg could run forever."""


class Hang(Exception):
    """A wait that reached its deadline."""


class Supervisor:
    """Runs one leg. `results`, `hangs`, `died`, `undrained`, `taken_away` and `harms` are its findings."""

    def __init__(self, leg: Leg, run: Run, log: Callable[[str], None]) -> None:
        self._leg, self._run, self._log = leg, run, log
        self._hang_s = HANG_S + (WORKERS_START_S if leg.num_workers * leg.num_servers > 1 else 0.0)
        self._is_several = leg.num_servers > 1
        self.results: list[FaultResult] = []
        self.hangs: list[str] = []
        self.died: list[str] = []
        """Processes that ended without a fault."""
        self.undrained: list[str] = []
        """Servers and learners whose requested shutdown was not clean."""
        self.taken_away: list[str] = []
        """Servers that welcomed a rival while the run used them."""
        self._ending: Process | None = None
        self.harms: list[Harm] = []
        self._is_over = False

    def supervise(self) -> None:
        try:
            for number, fault in enumerate(self._leg.faults):
                self._wait_for_its_turn(fault)
                tries = 0
                while not self._is_over and tries < MAX_TRIES and not self._inflict(number, fault):
                    tries += 1
            if self._is_several:
                self._interrupt()
            self._until(lambda: False, "the end of the run")
        except Hang as hang:
            self.hangs.append(str(hang))
            self._run.log(f"hang: {hang}")
            for process in (self._run.learner, *(place.process for place in self._run.all_places)):
                strike(process.pid, signal.SIGUSR1)
            time.sleep(1.0)
        until_s = math.inf
        for result in reversed(self.results):
            result.notice_s = notice_s(self._run, result, until_s)
            until_s = result.struck_at

    def _wait_for_its_turn(self, fault: Fault) -> None:
        run, step = self._run, fault.after_step
        if self._is_several and self.results:  # many steps passed while a server restarted
            step = max(step, run.steps_done + STEPS_BETWEEN)
        self._until(lambda: run.steps_done >= step, f"step {step}")

    def _interrupt(self) -> None:
        """Interrupt a run that would continue forever, once every server is ready again."""
        run = self._run

        def are_ready() -> bool:
            return len(run.events.ready) == len(run.places)

        with run.slowly():
            self._until(are_ready, "every server ready again")
        last_step = run.steps_done + STEPS_WITHOUT_FAULTS
        self._until(lambda: run.steps_done >= last_step and are_ready(), "every server ready, and steps without faults")
        strike(run.learner.pid, signal.SIGINT)

    # --- one fault

    def _inflict(self, number: int, fault: Fault) -> bool:
        """Commit a fault and wait for the recovery. Return False if the fault is impossible now."""
        run = self._run
        if fault.server is not None:
            others = set(range(len(run.places))) - {fault.server}
            with run.slowly():
                self._until(
                    lambda: fault.server in run.events.ready and bool(others & run.events.ready),
                    f"server {fault.server} and another ready before: {fault}",
                )
        run.log(f"fault {number}: {fault}")
        directory = run.place(fault).directory if fault.state.process in ("server", "engine") else run.directory
        name = fault.kind if fault.target == "environment" else fault.state.name
        trap = set_trap(directory, fault.state.process, name, fault.nth, number)
        self._provoke(fault, number)
        is_caught = self._wait_until_caught(fault, trap)
        trap.unlink(missing_ok=True)
        with run.slowly():
            result = self._strike(fault) if is_caught and not self._is_over else None
        if result is None:
            run.log(f"fault {number}: impossible now")
            return False
        self.results.append(result)
        self._until(lambda: has_recovered(run, result), f"recovery after: {result.fault}")
        recovered = f"after {result.recover_s:.1f} s" if result.recover_s is not None else "before the run ended"
        self._log(f"leg {self._leg.number}, fault {number}: {fault}: recovered {recovered}")
        return True

    def _wait_until_caught(self, fault: Fault, trap: Path) -> bool:
        def is_caught() -> bool:
            acts_alone = fault.kind == "hang" or fault.target == "environment"
            return not trap.exists() and (acts_alone or is_stopped(self._run.holder(fault).pid))

        if self._is_several and fault.state.provoked_by == "server killed":
            self._until(is_caught, f"the state of: {fault}", fruitless_s=FRUITLESS_S)
        else:
            self._until(is_caught, f"the state of: {fault}", FRUITLESS_STEPS * self._leg.num_servers)
        return not trap.exists()

    def _provoke(self, fault: Fault, number: int) -> None:
        run, place = self._run, self._run.place(fault)
        match fault.state.provoked_by:
            case "byte flipped":
                set_trap(run.directory, "learner", flip_of(place.link.port), FLIPPED_BROADCAST, number)
            case "server killed":
                strike(place.process.pid, signal.SIGKILL)
                self._restart(place)
            case "learner killed":
                strike(run.learner.pid, signal.SIGKILL)
                self._restart(None)

    def _restart(self, place: Place | None) -> None:
        """Restart a server that was killed, or the learner if `place` is None."""
        run = self._run
        self._note_harm(None if place is None else place.number, "up")
        if place is None:
            run.learner.reap()
            run.learner = run.start_learner()
        else:
            place.process.reap()
            place.start_again()

    def _note_harm(self, server: int | None, until: Remedy) -> Harm:
        harm = Harm(server=server, from_s=time.monotonic(), until=until)
        self.harms.append(harm)
        return harm

    def _strike(self, fault: Fault) -> FaultResult | None:
        """Commit the fault while its process is stopped, and undo it where possible. None: there is no target now."""
        run = self._run
        place, holder, victim = run.place(fault), run.holder(fault).pid, run.find(fault)
        result = FaultResult(fault=fault, struck_at=time.monotonic())
        if fault.target == "environment":  # it has committed the fault itself, and the learner must recover
            result.back_at = result.struck_at
            return result
        if fault.target == "rival":
            return self._let_rivals_ask(result)
        is_process = fault.target not in ("link", "call", "list")
        harm = self._harm_of(fault) if victim is not None or not is_process else None
        if fault.kind == "hang":
            return self._wait_for_next_engine(result)
        if fault.target == "link":
            (place.link.cut if fault.kind == "cut" else place.link.stall)()
        elif fault.target == "list":
            run.remove_from_list(place)
        elif victim is not None and fault.kind == "hang up":
            hang_up(victim)
        elif victim is not None:
            strike(victim, SIGNALS.get(fault.kind, signal.SIGSTOP))
        if holder != victim or fault.kind in ENDS_IN_ORDER:
            strike(holder, signal.SIGCONT)
        if is_process and victim is None:
            return None
        time.sleep(fault.seconds)
        if fault.target == "link":
            place.link.restore()
        elif fault.target == "list":
            run.restore_list()
        elif victim is not None and fault.kind not in (*SIGNALS, "hang up"):
            strike(victim, signal.SIGKILL if fault.kind == "stop, then kill" else signal.SIGCONT)
        if harm is not None and harm.until == "let go":
            harm.let_go_s = time.monotonic()
        self._recover_target(result)
        return result

    def _harm_of(self, fault: Fault) -> Harm | None:
        """Record the harm of a fault. None: the fault harms nothing that the run does not restart itself."""
        if fault.target in ("reward worker", "reference") or fault.kind == "ask":
            return None
        if fault.kind == "ask after a death":
            return self._note_harm(None, "up")
        must_restart = fault.kind in ("kill", "stop, then kill", "hang", *ENDS_IN_ORDER)
        is_engine = fault.target in ("engine core", "worker", "call")
        until: Remedy = "let go" if not must_restart else "engine up" if is_engine else "up"
        return self._note_harm(None if fault.target == "learner" else self._run.place(fault).number, until)

    def _let_rivals_ask(self, result: FaultResult) -> FaultResult | None:
        """Let rivals ask the server, not through the learner's link. None: the run does not use the server now."""
        fault, run = result.fault, self._run
        place = run.place(fault)
        strike(run.holder(fault).pid, signal.SIGCONT)

        def has_server() -> bool:
            both_started_at = max(place.process.started_at, run.learner.started_at)
            return run.first("server ready", both_started_at, place.number) is not None

        self._until(has_server, f"a server that the run uses before: {fault}", fruitless_s=FRUITLESS_S)
        if not has_server() or self._is_over:
            return None
        server, answers, harm = place.process, Counter[str](), self._harm_of(fault)
        if fault.kind == "ask after a death":
            strike(run.learner.pid, signal.SIGKILL)
        elif fault.kind == "ask in a cut":
            place.link.cut()
        else:  # while the learner is connected, a second process of its run must not get the server either
            answers += ask(place.server_endpoint, run.id, fault.seconds)
        answers += ask(place.server_endpoint, RIVAL, fault.seconds)
        place.link.restore()
        if harm is not None and harm.until == "let go":
            harm.let_go_s = time.monotonic()
        is_same = place.process is server and server.exit_code is None
        if answers["Welcome"] and is_same and not self._has_ended():
            self.taken_away.append(f"{answers['Welcome']} of {answers.total()} Hellos were welcomed: {fault}")
        self._recover_target(result)
        return result

    def _has_ended(self) -> bool:
        """Return whether the run is over, so that any learner may use its servers."""
        return self._run.learner.exit_code == 0

    def _wait_for_next_engine(self, result: FaultResult) -> FaultResult:
        """Wait until the server has replaced the engine whose call hangs."""
        run, server = self._run, result.fault.server
        self._until(
            lambda: run.first("engine up", result.struck_at, server) is not None,
            f"another engine after: {result.fault}",
        )
        up = run.first("engine up", result.struck_at, server)
        result.back_at = up.time_s if up is not None else time.monotonic()
        return result

    def _recover_target(self, result: FaultResult) -> None:
        """Restart a target that was killed, and record when it could work."""
        fault, run = result.fault, self._run
        result.back_at = time.monotonic()
        if not fault.ends_a_process:
            return
        place = run.place(fault) if fault.target in ("server", "reference") else None
        if fault.kind in ENDS_IN_ORDER:
            self._wait_for_shutdown(place, result)
        self._restart(place)
        process, started_at = (
            ("learner", run.learner.started_at) if place is None else ("server", place.process.started_at)
        )
        server = place.number if fault.target == "reference" and place is not None else fault.server

        def up_at() -> float | None:
            return first_up(run, process, server if place is not None else None, started_at)

        self._until(lambda: up_at() is not None, f"{process} up after: {fault}")
        if (at := up_at()) is not None:
            result.back_at, result.start_s = at, at - started_at

    def _wait_for_shutdown(self, place: Place | None, result: FaultResult) -> None:
        """Wait until the server, or the learner if `place` is None, has exited. Record an unclean exit."""
        process, log = (self._run.learner, "learner.log") if place is None else (place.process, "server.log")
        self._ending = process
        self._until(lambda: process.exit_code is not None, f"an exit after: {result.fault}")
        self._ending = None
        code, lasted_s = process.exit_code, time.monotonic() - result.struck_at
        if code not in ordered_exits(self._run, place) or lasted_s > DRAIN_TIMEOUT_S:
            last_line = self._run.last_line((self._run if place is None else place).directory / log)
            self.undrained.append(f"exit code {code} after {lasted_s:.1f} s: {result.fault}: {last_line}")

    # --- waiting

    def _until(
        self, is_so: Callable[[], bool], what: str, fruitless_steps: float = math.inf, fruitless_s: float = math.inf
    ) -> None:
        """Wait until `is_so`, until the run is over, or for `fruitless_steps` or `fruitless_s`. Raises Hang."""
        started = time.monotonic()
        while not is_so() and not self._is_over:
            self._restart_dead()
            now, events = time.monotonic(), self._run.read_events()
            moved_at = events[-1].time_s if events else 0.0
            num_steps = sum(event.name == "consumed" for event in since(events, started))
            if num_steps > fruitless_steps or now - started > fruitless_s:
                return
            if now - max(started, moved_at) > self._hang_s or now - started > 3 * self._hang_s:
                raise Hang(f"{now - started:.0f} s without {what}")
            time.sleep(POLL_S)

    def _restart_dead(self) -> None:
        """Notice the end of the run. Record and restart any other process that ended without a fault."""
        run = self._run
        is_ending = run.learner is self._ending
        if run.learner.exit_code == 0 and not is_ending:
            self._is_over = True
            return
        if run.learner.exit_code is not None and not is_ending:
            self._note_death("learner", run.learner.exit_code, run.directory / "learner.log")
            self._restart(None)
        for place in run.all_places:
            if place.process.exit_code is not None and place.process is not self._ending:
                self._note_death("server", place.process.exit_code, place.directory / "server.log")
                self._restart(place)

    def _note_death(self, name: str, code: int, log: Path) -> None:
        self.died.append(f"{name} with exit code {code}: {self._run.last_line(log)}")
        self._run.log(f"the {name} ended without a fault, with exit code {code}")
        if len(self.died) > MAX_DEATHS:
            raise Hang(f"{MAX_DEATHS} processes ended without a fault")


def ordered_exits(run: Run, place: Place | None) -> tuple[int | None, ...]:
    """Return the exit codes of an ordered end of a server, or of the learner if `place` is None.

    None: the run was over before. A server that was struck before it was up may have had no signal handlers yet.
    """
    if place is None:
        return 0, None, -signal.SIGHUP
    is_up = first_up(run, "server", place.number, place.process.started_at) is not None
    return (0, None) if is_up else (0, None, -signal.SIGTERM, -signal.SIGHUP)
