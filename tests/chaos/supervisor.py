"""Does the faults of one leg and starts what has died again, until the run ends.

    wait for the step ▸ provoke, if the state needs it ▸ trap ▸ strike ▸ start again ▸ see that work goes on ▸ next fault

Every wait has a deadline; one that passes while nothing moves is a hang, and ends the leg with the stacks of all processes
in their logs. Of several servers one is struck at a time, and only while it and another are ready; when all faults are done and
every server is ready again, the run is interrupted.
"""

import math
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.chaos.events import since
from tests.chaos.outages import Harm, Remedy
from tests.chaos.place import Place
from tests.chaos.process import Process, hang_up, is_stopped, strike
from tests.chaos.rivals import RIVAL, ask
from tests.chaos.run import DRAIN_TIMEOUT_S, Run
from tests.chaos.schedule import DRAIN, ENDS_IN_ORDER, Fault, Kind, Leg
from tests.chaos.struck import Struck, first_up, notice_s, work_goes_on
from tests.chaos.traps import flip_of, set_trap

POLL_S = 0.02
SIGNALS: dict[Kind, signal.Signals] = {"kill": signal.SIGKILL, DRAIN: signal.SIGTERM}
"""That a process ends of; it is only stopped by other faults."""
HANG_S = 120.0
"""More than every deadline in the config of a run together and a start of vLLM, so whatever takes longer waits for nothing."""
WORKERS_START_S = 120.0
"""What vLLM may need more to start several workers, or several servers, on a busy machine."""
FLIPPED_BROADCAST = 5
"""The third bucket's: the first two are loaded by then, so the weights are torn."""
FRUITLESS_STEPS = 12
"""A state that the run has not come to in so many steps will hardly come; several servers share what leads to it."""
FRUITLESS_S = 120.0
"""The same of a state that needs another start of one of several servers, beside which the run goes on."""
STEPS_BETWEEN, STEPS_IN_PEACE = 2, 10
"""Of a run on several servers: between faults, and after all."""
MAX_TRIES = 3
"""Of a fault whose state does not come up, or whose target does not exist at the moment."""
MAX_DEATHS = 20
"""Of themselves, in one leg; more, and it would go on for ever."""


class Hang(Exception):
    """A wait that came to its deadline."""


class Supervisor:
    """Runs one leg; `struck`, `hangs`, `died`, `undrained`, `taken_away` and `harms` are its findings."""

    def __init__(self, leg: Leg, run: Run, say: Callable[[str], None]) -> None:
        self._leg, self._run, self._say = leg, run, say
        self._hang_s = HANG_S + (WORKERS_START_S if leg.num_workers * leg.num_servers > 1 else 0.0)
        self._is_several = leg.num_servers > 1
        self.struck: list[Struck] = []
        self.hangs: list[str] = []
        self.died: list[str] = []
        """Processes that ended although nobody had struck them."""
        self.undrained: list[str] = []
        """Servers and learners that were told to end and did not do so in order."""
        self.taken_away: list[str] = []
        """Servers that welcomed a rival while the run had them."""
        self._told_to_end: Process | None = None
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
            self._run.say(f"hang: {hang}")
            for process in (self._run.learner, *(place.process for place in self._run.places)):
                strike(process.pid, signal.SIGUSR1)
            time.sleep(1.0)
        until_s = math.inf
        for struck in reversed(self.struck):
            struck.notice_s = notice_s(self._run, struck, until_s)
            until_s = struck.struck_at

    def _wait_for_its_turn(self, fault: Fault) -> None:
        run, step = self._run, fault.after_step
        if self._is_several and self.struck:  # while a server was brought back many steps went by
            step = max(step, run.steps_done + STEPS_BETWEEN)
        self._until(lambda: run.steps_done >= step, f"step {step}")

    def _interrupt(self) -> None:
        """End a run that would go on for ever, once it is as it was before all faults."""
        run = self._run

        def are_ready() -> bool:
            return len(run.events.ready) == len(run.places)

        with run.slowly():
            self._until(are_ready, "every server ready again")
        last_step = run.steps_done + STEPS_IN_PEACE
        self._until(lambda: run.steps_done >= last_step and are_ready(), "every server ready, and steps in peace")
        strike(run.learner.pid, signal.SIGINT)

    # --- one fault

    def _inflict(self, number: int, fault: Fault) -> bool:
        """Return False if it could not be done now."""
        run = self._run
        if fault.server is not None:
            others = set(range(len(run.places))) - {fault.server}
            with run.slowly():
                self._until(
                    lambda: fault.server in run.events.ready and bool(others & run.events.ready),
                    f"server {fault.server} and another ready before: {fault}",
                )
        run.say(f"fault {number}: {fault}")
        directory = run.place(fault).directory if fault.state.process in ("server", "engine") else run.directory
        name = fault.kind if fault.target == "environment" else fault.state.name
        trap = set_trap(directory, fault.state.process, name, fault.nth, number)
        self._provoke(fault, number)
        is_caught = self._wait_until_caught(fault, trap)
        trap.unlink(missing_ok=True)
        with run.slowly():
            struck = self._strike(fault) if is_caught and not self._is_over else None
        if struck is None:
            run.say(f"fault {number}: not now")
            return False
        self.struck.append(struck)
        self._until(lambda: work_goes_on(run, struck), f"work to go on after: {struck.fault}")
        recovered = f"{struck.recover_s:.1f} s" if struck.recover_s is not None else "by its end"
        self._say(f"leg {self._leg.number}, fault {number}: {fault}: recovered in {recovered}")
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
                self._start_again(place)
            case "learner killed":
                strike(run.learner.pid, signal.SIGKILL)
                self._start_again(None)

    def _start_again(self, place: Place | None) -> None:
        """A server that was killed, or the learner."""
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

    def _strike(self, fault: Fault) -> Struck | None:
        """Do the fault while the process of the state stands still, and undo what can be undone; None: nobody is there."""
        run = self._run
        place, holder, victim = run.place(fault), run.holder(fault).pid, run.find(fault)
        struck = Struck(fault=fault, struck_at=time.monotonic())
        if fault.target == "environment":  # it has done it itself, and the learner must see to the rest
            struck.back_at = struck.struck_at
            return struck
        if fault.target == "rival":
            return self._let_rivals_ask(struck)
        is_process = fault.target not in ("link", "call", "list")
        harm = self._harm_of(fault) if victim is not None or not is_process else None
        if fault.kind == "hang":
            return self._wait_for_next_engine(struck)
        if fault.target == "link":
            (place.link.cut if fault.kind == "cut" else place.link.stall)()
        elif fault.target == "list":
            run.take_off_the_list(place)
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
            run.list_again()
        elif victim is not None and fault.kind not in (*SIGNALS, "hang up"):
            strike(victim, signal.SIGKILL if fault.kind == "stop, then kill" else signal.SIGCONT)
        if harm is not None and harm.until == "let go":
            harm.let_go_s = time.monotonic()
        self._bring_back(struck)
        return struck

    def _harm_of(self, fault: Fault) -> Harm | None:
        """None: of a reward worker, which the learner starts again itself, and of rivals beside a healthy run."""
        if fault.target == "reward worker" or fault.kind == "ask":
            return None
        if fault.kind == "ask after a death":
            return self._note_harm(None, "up")
        has_to_start = fault.kind in ("kill", "stop, then kill", "hang", *ENDS_IN_ORDER)
        is_engine = fault.target in ("engine core", "worker", "call")
        until: Remedy = "let go" if not has_to_start else "engine up" if is_engine else "up"
        return self._note_harm(None if fault.target == "learner" else self._run.place(fault).number, until)

    def _let_rivals_ask(self, struck: Struck) -> Struck | None:
        """Let them ask the server itself, not by the learner's link; None: the run does not have it now."""
        fault, run = struck.fault, self._run
        place = run.place(fault)
        strike(run.holder(fault).pid, signal.SIGCONT)

        def has_server() -> bool:
            both_started_at = max(place.process.started_at, run.learner.started_at)
            return run.first("server ready", both_started_at, place.number) is not None

        self._until(has_server, f"a server that the run has before: {fault}", fruitless_s=FRUITLESS_S)
        if not has_server() or self._is_over:
            return None
        server, answers, harm = place.process, Counter[str](), self._harm_of(fault)
        if fault.kind == "ask after a death":
            strike(run.learner.pid, signal.SIGKILL)
        elif fault.kind == "ask in a cut":
            place.link.cut()
        else:  # while the learner is connected, nor may a second process of its run have the server
            answers += ask(place.server_endpoint, run.id, fault.seconds)
        answers += ask(place.server_endpoint, RIVAL, fault.seconds)
        place.link.restore()
        if harm is not None and harm.until == "let go":
            harm.let_go_s = time.monotonic()
        is_same = place.process is server and server.exit_code is None
        if answers["Welcome"] and is_same and not self._has_ended():
            self.taken_away.append(f"{answers['Welcome']} of {answers.total()} Hellos were welcomed: {fault}")
        self._bring_back(struck)
        return struck

    def _has_ended(self) -> bool:
        """Whether the run is over, and its servers are anybody's."""
        return self._run.learner.exit_code == 0

    def _wait_for_next_engine(self, struck: Struck) -> Struck:
        """A call hangs, and nobody but its server can do anything about it."""
        run, server = self._run, struck.fault.server
        self._until(
            lambda: run.first("engine up", struck.struck_at, server) is not None,
            f"another engine after: {struck.fault}",
        )
        up = run.first("engine up", struck.struck_at, server)
        struck.back_at = up.time_s if up is not None else time.monotonic()
        return struck

    def _bring_back(self, struck: Struck) -> None:
        """Start again what was killed, and note when it could work."""
        fault, run = struck.fault, self._run
        struck.back_at = time.monotonic()
        if not fault.ends_a_process:
            return
        place = run.place(fault) if fault.target == "server" else None
        if fault.kind in ENDS_IN_ORDER:
            self._see_it_end(place, struck)
        self._start_again(place)
        process, started_at = (
            ("learner", run.learner.started_at) if place is None else ("server", place.process.started_at)
        )
        server = fault.server if place is not None else None

        def up_at() -> float | None:
            return first_up(run, process, server, started_at)

        self._until(lambda: up_at() is not None, f"{process} up after: {fault}")
        if (at := up_at()) is not None:
            struck.back_at, struck.start_s = at, at - started_at

    def _see_it_end(self, place: Place | None, struck: Struck) -> None:
        """It ends by itself, once it has finished what it had begun. None: the learner."""
        told, log = (self._run.learner, "learner.log") if place is None else (place.process, "server.log")
        self._told_to_end = told
        self._until(lambda: told.exit_code is not None, f"an end after: {struck.fault}")
        self._told_to_end = None
        code, lasted_s = told.exit_code, time.monotonic() - struck.struck_at
        in_order = (0, None) if place is not None else (0, None, -signal.SIGHUP)
        if code not in in_order or lasted_s > DRAIN_TIMEOUT_S:  # None: the run was over before
            last_words = self._run.last_words((self._run if place is None else place).directory / log)
            self.undrained.append(f"exit code {code} after {lasted_s:.1f} s: {struck.fault}: {last_words}")

    # --- waiting

    def _until(
        self, is_so: Callable[[], bool], what: str, fruitless_steps: float = math.inf, fruitless_s: float = math.inf
    ) -> None:
        """Wait until it is so, or the run is over, or `fruitless_steps` or `fruitless_s` have gone by without. Raises Hang."""
        started = time.monotonic()
        while not is_so() and not self._is_over:
            self._start_what_died()
            now, events = time.monotonic(), self._run.read_events()
            moved_at = events[-1].time_s if events else 0.0
            num_steps = sum(event.name == "consumed" for event in since(events, started))
            if num_steps > fruitless_steps or now - started > fruitless_s:
                return
            if now - max(started, moved_at) > self._hang_s or now - started > 3 * self._hang_s:
                raise Hang(f"{now - started:.0f} s without {what}")
            time.sleep(POLL_S)

    def _start_what_died(self) -> None:
        """A run that has ended is over; any other end that nobody caused is a finding, and is mended."""
        run = self._run
        is_told = run.learner is self._told_to_end
        if run.learner.exit_code == 0 and not is_told:
            self._is_over = True
            return
        if run.learner.exit_code is not None and not is_told:
            self._note_death("learner", run.learner.exit_code, run.directory / "learner.log")
            self._start_again(None)
        for place in run.places:
            if place.process.exit_code is not None and place.process is not self._told_to_end:
                self._note_death("server", place.process.exit_code, place.directory / "server.log")
                self._start_again(place)

    def _note_death(self, name: str, code: int, log: Path) -> None:
        self.died.append(f"{name} with exit code {code}: {self._run.last_words(log)}")
        self._run.say(f"the {name} ended by itself with exit code {code}")
        if len(self.died) > MAX_DEATHS:
            raise Hang(f"{MAX_DEATHS} processes ended by themselves")
