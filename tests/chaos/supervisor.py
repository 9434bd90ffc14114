"""Does the faults of one leg and starts what has died again, until the run ends.

    wait for the step ▸ provoke, if the state needs it ▸ trap ▸ strike ▸ start again ▸ see that work goes on ▸ next fault

Every wait has a deadline; one that passes while nothing moves is a hang, and ends the leg with the stacks of both processes
in their logs.
"""

import math
import signal
import time
from collections.abc import Callable

import msgspec

from tests.chaos.process import is_stopped, strike
from tests.chaos.run import Run
from tests.chaos.schedule import Fault, Leg
from tests.chaos.traps import set_trap

POLL_S = 0.01
HANG_S = 120.0
"""More than every deadline in the config of a run together and a start of vLLM, so whatever takes longer waits for nothing."""
WORKERS_START_S = 120.0
"""What vLLM may need more to start several workers on a busy machine."""
FLIPPED_BROADCAST = 5
"""The third bucket's: the first two are loaded by then, so the weights are torn."""
FRUITLESS_STEPS = 12
"""A state that the run has not come to in so many steps will hardly come."""
MAX_TRIES = 3
"""Of a fault whose state does not come up, or whose target does not exist at the moment."""
MAX_DEATHS = 20
"""Of themselves, in one leg; more, and it would go on for ever."""


class Hang(Exception):
    """A wait that came to its deadline."""


class Struck(msgspec.Struct, kw_only=True):
    """One fault that was done, and what became of it."""

    fault: Fault
    struck_at: float
    back_at: float = 0.0
    """When what was struck could work again."""
    start_s: float | None = None
    """From the start of a process to that moment."""
    notice_s: float | None = None
    recover_s: float | None = None


class Supervisor:
    """Runs one leg; `struck`, `hangs` and `died` are its findings."""

    def __init__(self, leg: Leg, run: Run, say: Callable[[str], None]) -> None:
        self._leg, self._run, self._say = leg, run, say
        self._hang_s = HANG_S + (WORKERS_START_S if leg.num_workers > 1 else 0.0)
        self.struck: list[Struck] = []
        self.hangs: list[str] = []
        self.died: list[str] = []
        """Processes that ended although nobody had struck them."""
        self._is_over = False

    def supervise(self) -> None:
        try:
            for number, fault in enumerate(self._leg.faults):
                self._until(lambda fault=fault: self._run.steps_done >= fault.after_step, f"step {fault.after_step}")
                tries = 0
                while not self._is_over and tries < MAX_TRIES and not self._inflict(number, fault):
                    tries += 1
            self._until(lambda: False, "the end of the run")
        except Hang as hang:
            self.hangs.append(str(hang))
            self._run.say(f"hang: {hang}")
            for process in (self._run.server, self._run.learner):
                strike(process.pid, signal.SIGUSR1)
            time.sleep(1.0)
        until_s = math.inf
        for struck in reversed(self.struck):
            struck.notice_s = self._notice_s(struck, until_s)
            until_s = struck.struck_at

    # --- one fault

    def _inflict(self, number: int, fault: Fault) -> bool:
        """Return False if it could not be done now."""
        self._run.say(f"fault {number}: {fault}")
        trap = set_trap(self._run.directory, fault.state.process, fault.state.name, fault.nth, number)
        self._provoke(fault, number)
        self._until(lambda: self._is_caught(fault) and not trap.exists(), f"the state of: {fault}", FRUITLESS_STEPS)
        is_caught = not trap.exists()
        trap.unlink(missing_ok=True)
        struck = self._strike(fault) if is_caught and not self._is_over else None
        if struck is None:
            self._run.say(f"fault {number}: not now")
            return False
        self.struck.append(struck)
        self._see_work_go_on(struck)
        recovered = f"{struck.recover_s:.1f} s" if struck.recover_s is not None else "by its end"
        self._say(f"leg {self._leg.number}, fault {number}: {fault}: recovered in {recovered}")
        return True

    def _is_caught(self, fault: Fault) -> bool:
        return fault.kind == "hang" or is_stopped(getattr(self._run, fault.state.process).pid)

    def _provoke(self, fault: Fault, number: int) -> None:
        run = self._run
        match fault.state.provoked_by:
            case "byte flipped":
                set_trap(run.directory, "learner", "flip", FLIPPED_BROADCAST, number)
            case "server killed":
                strike(run.server.pid, signal.SIGKILL)
                run.server.reap()
                run.server = run.start_server()
            case "learner killed":
                strike(run.learner.pid, signal.SIGKILL)
                run.learner.reap()
                run.learner = run.start_learner()

    def _strike(self, fault: Fault) -> Struck | None:
        """Do the fault while the process of the state stands still, and undo what can be undone; None: nobody is there."""
        if fault.kind == "hang":
            return self._wait_for_next_engine(Struck(fault=fault, struck_at=time.monotonic()))
        run = self._run
        holder, victim = getattr(run, fault.state.process).pid, run.find(fault.target)
        struck = Struck(fault=fault, struck_at=time.monotonic())
        if fault.target == "link":
            (run.link.cut if fault.kind == "cut" else run.link.stall)()
        elif victim is not None:
            strike(victim, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        if holder != victim:
            strike(holder, signal.SIGCONT)
        if fault.target != "link" and victim is None:
            return None
        time.sleep(fault.seconds)
        if victim is None:
            run.link.restore()
        elif fault.kind != "kill":
            strike(victim, signal.SIGKILL if fault.kind == "stop, then kill" else signal.SIGCONT)
        self._bring_back(struck)
        return struck

    def _wait_for_next_engine(self, struck: Struck) -> Struck:
        """A call hangs, and nobody but its server can do anything about it."""
        self._until(
            lambda: self._run.first("engine up", struck.struck_at) is not None, f"another engine after: {struck.fault}"
        )
        up = self._run.first("engine up", struck.struck_at)
        struck.back_at = up.time_s if up is not None else time.monotonic()
        return struck

    def _bring_back(self, struck: Struck) -> None:
        """Start again what was killed, and note when it could work."""
        fault, run = struck.fault, self._run
        struck.back_at = time.monotonic()
        if fault.target not in ("server", "learner") or "kill" not in fault.kind:
            return
        getattr(run, fault.target).reap()
        setattr(run, fault.target, getattr(run, f"start_{fault.target}")())
        started_at = getattr(run, fault.target).started_at
        self._until(lambda: self._first_up(fault.target, started_at) is not None, f"{fault.target} up after: {fault}")
        up_at = self._first_up(fault.target, started_at)
        if up_at is not None:
            struck.back_at, struck.start_s = up_at, up_at - started_at

    def _first_up(self, process: str, since_s: float) -> float | None:
        events = self._run.read_events()
        return next((e.time_s for e in events if e.time_s > since_s and (e.process, e.name) == (process, "up")), None)

    def _see_work_go_on(self, struck: Struck) -> None:
        """Until a group has come and a step was trained since."""
        run = self._run

        def goes_on() -> bool:
            received = run.first("received", struck.back_at)
            consumed = run.first("consumed", received.time_s) if received else None
            if consumed is not None:
                # A server, or its engine, that ended with what was struck in it was started again later than that.
                ups = [
                    event.time_s
                    for event in run.events
                    if event.name in ("up", "engine up") and event.process == "server"
                ]
                struck.back_at = max([struck.back_at, *(up for up in ups if struck.struck_at < up < consumed.time_s)])
                struck.recover_s = consumed.time_s - struck.back_at
            return consumed is not None

        self._until(goes_on, f"work to go on after: {struck.fault}")

    # --- waiting

    def _until(self, is_so: Callable[[], bool], what: str, fruitless_steps: float = math.inf) -> None:
        """Wait until it is so, or the run is over, or has done `fruitless_steps` without. Raises Hang."""
        started = time.monotonic()
        while not is_so() and not self._is_over:
            self._start_what_died()
            now, events = time.monotonic(), self._run.read_events()
            moved_at = events[-1].time_s if events else 0.0
            steps = [event for event in events if event.name == "consumed" and event.time_s > started]
            if len(steps) > fruitless_steps:
                return
            if now - max(started, moved_at) > self._hang_s or now - started > 3 * self._hang_s:
                raise Hang(f"{now - started:.0f} s without {what}")
            time.sleep(POLL_S)

    def _start_what_died(self) -> None:
        """A run that has ended is over; any other end that nobody caused is a finding, and is mended."""
        run = self._run
        for name in ("server", "learner"):
            code = getattr(run, name).exit_code
            if code is None:
                continue
            if (name, code) == ("learner", 0):
                self._is_over = True
                return
            self.died.append(f"{name} with exit code {code}: {run.last_words(name)}")
            run.say(f"the {name} ended by itself with exit code {code}")
            if len(self.died) > MAX_DEATHS:
                raise Hang(f"{MAX_DEATHS} processes ended by themselves")
            setattr(run, name, getattr(run, f"start_{name}")())

    # --- findings

    def _notice_s(self, struck: Struck, until_s: float) -> float | None:
        """How long the other side took to tell that its peer is lost; None where it had no time to."""
        fault = struck.fault
        if fault.target not in ("server", "learner", "link"):
            return None
        lost = self._run.first("learner lost" if fault.target == "learner" else "server lost", struck.struck_at)
        # Who was not connected when it was struck could not be missed, and who is back is missed no more.
        found = self._run.first("server found", struck.struck_at)
        until_s = min(until_s, found.time_s if found else math.inf)
        if "kill" not in fault.kind:
            until_s = min(until_s, struck.back_at)
        return lost.time_s - struck.struck_at if lost and lost.time_s < until_s else None
