"""Does the faults of one leg and starts what has died again, until the run ends.

    wait for the step ▸ provoke, if the state needs it ▸ trap ▸ strike ▸ start again ▸ see that work goes on ▸ next fault

Every wait has a deadline; one that passes while nothing moves is a hang, and ends the leg with the stacks of both processes
in their logs.
"""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec

from tests.chaos.process import is_stopped, strike
from tests.chaos.run import Run
from tests.chaos.schedule import Fault, Leg
from tests.chaos.traps import set_trap

POLL_S = 0.01
HANG_S = 60.0
"""More than every deadline in the config of a run together, so whatever takes longer waits for nothing."""
FLIPPED_BROADCAST = 5
"""The third bucket's: the first two are loaded by then, so the weights are torn."""
NOTICE_S = 10.0
"""Later than that a peer that is told lost is told so for another reason."""
MAX_DEATHS = 20
"""Of themselves, in one leg; more, and it would go on for ever."""


class Hang(Exception):
    """A wait that came to its deadline."""


class Struck(msgspec.Struct, kw_only=True):
    """What became of one fault."""

    fault: Fault
    is_done: bool = False
    """False: the state did not come up, or the target did not exist at the moment."""
    struck_at: float = 0.0
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
        self.struck: list[Struck] = []
        self.hangs: list[str] = []
        self.died: list[str] = []
        """Processes that ended although nobody had struck them."""
        self._is_over = False

    def supervise(self) -> None:
        try:
            for number, fault in enumerate(self._leg.faults):
                self._until(lambda fault=fault: self._run.steps_done >= fault.after_step, f"step {fault.after_step}")
                if self._is_over:
                    break
                self._inflict(number, fault)
            self._until(lambda: False, "the end of the run")
        except Hang as hang:
            self.hangs.append(str(hang))
            self._run.say(f"hang: {hang}")
            for process in (self._run.server, self._run.learner):
                strike(process.pid, signal.SIGUSR1)
            time.sleep(1.0)
        for struck in self.struck:
            struck.notice_s = self._notice_s(struck)

    # --- one fault

    def _inflict(self, number: int, fault: Fault) -> None:
        struck = Struck(fault=fault)
        self.struck.append(struck)
        self._run.say(f"fault {number}: {fault}")
        trap = set_trap(self._run.directory, fault.state.process, fault.state.name, fault.nth, number)
        self._provoke(fault, number)
        self._until(lambda: self._is_caught(fault) and not trap.exists(), f"the state of: {fault}", fruitless_s=15.0)
        if trap.exists():
            trap.unlink(missing_ok=True)
            self._run.say(f"fault {number}: its state did not come up")
        elif not self._is_over:
            self._strike(struck)
            if struck.is_done:
                self._see_work_go_on(struck)
        self._say(f"leg {self._leg.number} fault {number}: {_told(struck)}")

    def _is_caught(self, fault: Fault) -> bool:
        return is_stopped(getattr(self._run, fault.state.process).pid)

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

    def _strike(self, struck: Struck) -> None:
        """Do the fault while the process of the state stands still, and undo what can be undone."""
        fault, run = struck.fault, self._run
        holder = getattr(run, fault.state.process)
        victim = run.find(fault.target)
        struck.struck_at = time.monotonic()
        with self._goes_on(holder.pid, unless=victim):
            if fault.target == "link":
                (run.link.cut if fault.kind == "cut" else run.link.stall)()
            elif victim is None:
                return
            else:
                strike(victim, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        struck.is_done = True
        if fault.seconds:
            time.sleep(fault.seconds)
        if fault.target == "link":
            run.link.restore()
        elif victim is not None and fault.kind != "kill":
            strike(victim, signal.SIGKILL if fault.kind == "stop, then kill" else signal.SIGCONT)
        self._bring_back(struck)

    @contextmanager
    def _goes_on(self, holder: int, unless: int | None) -> Iterator[None]:
        yield
        if holder != unless:
            strike(holder, signal.SIGCONT)

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
                struck.recover_s = consumed.time_s - struck.back_at
            return consumed is not None

        self._until(goes_on, f"work to go on after: {struck.fault}")

    # --- waiting

    def _until(self, is_so: Callable[[], bool], what: str, fruitless_s: float | None = None) -> None:
        """Wait until it is so, the run is over, or (quietly) after `fruitless_s` in which steps were done. Raises Hang."""
        started = time.monotonic()
        while not is_so() and not self._is_over:
            self._start_what_died()
            now = time.monotonic()
            moved_at = max((event.time_s for event in self._run.read_events()[-50:]), default=0.0)
            if fruitless_s is not None and now - started > fruitless_s and now - moved_at < 1.0:
                return
            if now - max(started, moved_at) > HANG_S or now - started > 3 * HANG_S:
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
            self.died.append(f"{name} with exit code {code}")
            run.say(f"the {name} ended by itself with exit code {code}")
            if len(self.died) > MAX_DEATHS:
                raise Hang(f"{MAX_DEATHS} processes ended by themselves")
            setattr(run, name, getattr(run, f"start_{name}")())

    # --- findings

    def _notice_s(self, struck: Struck) -> float | None:
        """How long the other side took to tell that its peer is lost; None where it had no time to."""
        fault = struck.fault
        if not struck.is_done or fault.target not in ("server", "learner", "link"):
            return None
        lost = self._run.first("learner lost" if fault.target == "learner" else "server lost", struck.struck_at)
        notice_s = lost.time_s - struck.struck_at if lost else NOTICE_S
        return notice_s if notice_s < NOTICE_S else None


def _told(struck: Struck) -> str:
    recovered = f"recovered in {struck.recover_s:.1f} s" if struck.recover_s is not None else "not done"
    return f"{struck.fault}: {recovered}"
