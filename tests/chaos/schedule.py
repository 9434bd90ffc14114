"""What is done to whom and when: a pure function of the seed, so that a campaign can be had again.

A campaign is cut into legs, each a run of its own with a config of its own. A fault waits for a number of steps and then
for a state to be reached for the n-th time, never for a wall clock.
"""

import itertools
import random
from collections.abc import Sequence
from typing import Literal

import msgspec

Engine = Literal["fake", "real"]
Player = Literal["environment", "agent"]
Process = Literal["server", "learner", "engine", "environment"]
Target = Literal[
    "server", "engine core", "worker", "learner", "reward worker", "link", "call", "list", "environment", "rival"
]
"""environment: or the agent, whoever plays. rival: nobody is struck, but others ask for the server."""
Kind = Literal[
    "kill", "stop", "stop, then kill", "hang up", "cut", "stall", "hang", "leave", "drain",
    "ask", "ask in a cut", "ask after a death",
]  # fmt: skip
"""hang up: the terminal is closed, so the process and its children get a SIGHUP. ask in a cut: while the learner's link is cut;
ask after a death: between the death of the learner and its next start."""

FAULTS_PER_LEG = 25
WORKER_FAULTS_SHARE = 0.1
"""With vLLM: faults to one of two tensor-parallel workers, in a leg of their own. With one, the worker is the engine core."""
STEPS_PER_FAULT = 4
CHECKPOINT_EVERY = 3
NUM_MOMENTS = 30
"""A random moment is one of the next so many messages that a process gets."""
DURATIONS_S = (0.3, 1.0, 4.0)
"""Of a stop, a cut, a stall, an absence from the list and rivals; the last is longer than what a peer's silence may last."""
STEPS_WITHOUT_END = 1_000_000
"""Of a run on several servers: it goes on while one of them is brought back, and is ended when all faults are done."""


class State(msgspec.Struct, frozen=True):
    """A place in the code of one process, at which it stands still while the fault happens; of the engine: a call into it, which
    never ends, while its process lives; of an environment: a call of its method, which does the fault itself."""

    process: Process
    name: str
    provoked_by: Literal["server killed", "learner killed", "byte flipped"] | None = None
    """What must happen first, for states that a healthy run does not come to."""
    num_times: int = 1
    """It may be caught at any of so many visits: the broadcasts of a push are one state."""
    overlap_weight_loading: bool | None = None
    """Set where the state exists only with, or without, server.overlap_weight_loading."""
    without: Target | None = None
    """Whoever is not there yet."""

    @property
    def label(self) -> str:
        return f"{self.process} {self.name}"


STATES = (
    State("server", "starting", "server killed"),
    State("server", "greeting", "learner killed"),
    State("server", "generating", num_times=4),
    State("server", "delivering", num_times=4),
    State("server", "pausing"),
    State("server", "receiving"),
    State("server", "loading", overlap_weight_loading=True),
    State("server", "resuming"),
    State("server", "torn", "byte flipped", overlap_weight_loading=False),
    State("engine", "pause"),
    State("engine", "load_push"),
    State("learner", "starting", "learner killed", without="reward worker"),
    State("learner", "resuming", "learner killed"),
    State("learner", "beginning", "learner killed"),
    State("learner", "admitting"),
    State("learner", "before receive is committed", num_times=4),
    State("learner", "between commit and ack", num_times=4),
    State("learner", "before score is committed", num_times=4),
    State("learner", "before step is committed"),
    State("learner", "before ready"),
    State("learner", "joining", "server killed"),
    State("learner", "forming", "server killed"),
    State("learner", "mid-bucket", num_times=8),
    State("learner", "before done"),
    State("learner", "checkpoint written, not renamed"),
    State("learner", "checkpoint renamed"),
)
MOMENTS = (State("server", "moment", num_times=NUM_MOMENTS), State("learner", "moment", num_times=NUM_MOMENTS))

TARGETS: dict[Engine, tuple[Target, ...]] = {
    "fake": ("server", "learner", "reward worker", "link", "call", "rival"),
    "real": ("server", "engine core", "learner", "reward worker", "link", "call", "rival"),
}
KINDS: dict[Target, tuple[Kind, ...]] = {
    "server": ("kill", "kill", "stop", "stop, then kill", "hang up"),
    "engine core": ("kill", "stop"),
    "worker": ("kill", "stop"),
    "learner": ("kill", "kill", "stop", "stop, then kill", "hang up"),
    "reward worker": ("kill", "stop"),
    "link": ("cut", "stall"),
    "call": ("hang",),
    "list": ("leave",),
    "rival": ("ask", "ask in a cut", "ask after a death"),
}
ASKED, BETWEEN_TURNS = State("environment", "asked", num_times=8), State("learner", "between turns", num_times=8)
OF_EPISODES: tuple[tuple[State, Target, Kind], ...] = (
    (ASKED, "environment", "kill"), (ASKED, "environment", "stop"), (ASKED, "environment", "hang"),
    (BETWEEN_TURNS, "server", "kill"),
)  # fmt: skip
"""Where the policy plays."""
ANSWERED = State("learner", "before an answer is kept", num_times=8)
OF_EVALUATIONS: tuple[tuple[State, Target, Kind], ...] = (
    (ANSWERED, "learner", "kill"), (ANSWERED, "server", "kill"), (ANSWERED, "engine core", "kill"),
    (State("learner", "before evaluation is noted", num_times=2), "learner", "kill"),
    (State("learner", "before answers are forgotten", num_times=2), "learner", "kill"),
)  # fmt: skip
"""Where the policy is evaluated."""
ENDS_IN_ORDER: tuple[Kind, ...] = ("drain", "hang up")
"""What a process is told to end by, and does: a server drains, a learner finishes its step and writes a checkpoint."""
DRAIN: Kind = "drain"
"""One of several servers is told to end, and another takes its place: half of what is done to the process of one of several."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. `nth` counts visits of `state` after the run has come to `after_step`."""

    after_step: int
    state: State
    nth: int
    target: Target
    kind: Kind
    seconds: float
    """How long a stop, a cut, a stall or an absence lasts, or a rival asks; 0 for a kill, a call that hangs, what ends in order
    and all that befalls an environment, which only the learner can end."""
    server: int | None = None
    """Of several: the one that is struck, or whose state it is."""

    @property
    def ends_a_process(self) -> bool:
        """A server or learner, which is to be started again."""
        is_told_or_killed = self.kind in ("kill", "stop, then kill", *ENDS_IN_ORDER)
        return self.kind == "ask after a death" or (self.target in ("server", "learner") and is_told_or_killed)

    def __str__(self) -> str:
        lasting = f" for {self.seconds:g} s" if self.seconds else ""
        of = f" (server {self.server})" if self.server is not None else ""
        return f"{self.kind} {self.target}{of}{lasting} at {self.state.label} ({self.nth}) after step {self.after_step}"


class Leg(msgspec.Struct, frozen=True, kw_only=True):
    """One run with its faults."""

    number: int
    seed: int
    num_workers: int
    overlap_weight_loading: bool
    sync_overlap: bool
    dynamic_sampling: bool
    faults: tuple[Fault, ...]
    num_servers: int = 1
    player: Player | None = None
    """The policy plays instead of answering once: with an environment, or asked by an agent."""
    has_evaluations: bool = False
    """The policy is evaluated every few steps: pinned, unless pushes overlap with steps."""

    @property
    def steps(self) -> int:
        """Long enough for every fault, although some come late, and some steps in peace."""
        return STEPS_WITHOUT_END if self.num_servers > 1 else STEPS_PER_FAULT * (len(self.faults) + 5)


def schedule(
    seed: int, num_faults: int, engine: Engine, num_servers: int = 1, player: Player | None = None,
    has_evaluations: bool = False,
) -> list[Leg]:  # fmt: skip
    """Share the faults out over legs. Every state comes up once before any comes up again.

    On several servers the list that names them changes too, one may be told to end, and none has several workers; nor where the policy
    plays or is evaluated, and half of the faults there are about its episodes or evaluations.
    """
    is_several = num_servers > 1
    kind = (f"/{num_servers}" if is_several else "") + (f"/{player}" if player is not None else "")
    dice = random.Random(f"{seed}/{num_faults}/{engine}{kind}" + "/is evaluated" * has_evaluations)
    decks: dict[bool, list[State]] = {True: [], False: []}
    targets: tuple[Target, ...] = (*TARGETS[engine], "list") if is_several else TARGETS[engine]
    has_workers = engine == "real" and not (is_several or player is not None or has_evaluations)
    num_of_workers = max(1, round(WORKER_FAULTS_SHARE * num_faults)) if has_workers else 0
    num_left = num_faults - num_of_workers
    legs: list[Leg] = []
    while num_left > 0:
        num_here = min(FAULTS_PER_LEG, num_left)
        num_left -= num_here
        overlap_weight_loading = (seed + len(legs)) % 2 == 1
        faults = [
            _fault(dice, decks[overlap_weight_loading], STEPS_PER_FAULT * (i + 1), overlap_weight_loading, targets)
            for i in range(num_here)
        ]
        if player is not None:
            faults[::2] = _of(OF_EPISODES, dice, [fault.after_step for fault in faults[::2]])
        if has_evaluations:
            possible = [each for each in OF_EVALUATIONS if each[1] in targets]
            faults[::2] = _of(possible, dice, [fault.after_step for fault in faults[::2]])
        if is_several:
            faults = [msgspec.structs.replace(fault, server=dice.randrange(num_servers)) for fault in faults]
        leg = _leg(dice, len(legs), faults, num_workers=1, overlap_weight_loading=overlap_weight_loading)
        legs.append(
            msgspec.structs.replace(leg, num_servers=num_servers, player=player, has_evaluations=has_evaluations)
        )
    if num_of_workers:
        faults = [
            _fault(dice, decks[False], STEPS_PER_FAULT * (i + 1), False, ("worker",)) for i in range(num_of_workers)
        ]
        legs.append(_leg(dice, len(legs), faults, num_workers=2, overlap_weight_loading=False))
    return legs


def _leg(
    dice: random.Random, number: int, faults: list[Fault], *, num_workers: int, overlap_weight_loading: bool
) -> Leg:
    return Leg(
        number=number, seed=dice.randrange(2**31), num_workers=num_workers, overlap_weight_loading=overlap_weight_loading,
        sync_overlap=dice.random() < 0.5, dynamic_sampling=dice.random() < 0.5, faults=tuple(faults),
    )  # fmt: skip


def _fault(
    dice: random.Random, deck: list[State], after_step: int, overlap_weight_loading: bool, targets: tuple[Target, ...]
) -> Fault:
    may_hang = "call" in targets
    if not any(may_hang or state.process != "engine" for state in deck):
        deck += [
            state for state in STATES if state.overlap_weight_loading in (None, overlap_weight_loading)
        ] + 4 * list(MOMENTS)
        dice.shuffle(deck)
    state = deck.pop(max(i for i, state in enumerate(deck) if may_hang or state.process != "engine"))
    target = "call" if state.process == "engine" else _target(dice, state, targets)
    kinds = KINDS[target]
    if target == "server" and "list" in targets:
        kinds += (DRAIN,) * len(kinds)
    kind = dice.choice(kinds)
    return Fault(
        after_step=after_step, state=state, nth=dice.randint(1, state.num_times), target=target, kind=kind,
        seconds=0.0 if kind in ("kill", "hang", *ENDS_IN_ORDER) else dice.choice(DURATIONS_S),
    )  # fmt: skip


def _of(possible: Sequence[tuple[State, Target, Kind]], dice: random.Random, steps: Sequence[int]) -> list[Fault]:
    """One of these after each of the steps; each once before any comes again."""
    order = dice.sample(possible, len(possible))
    faults = []
    for step, (state, target, kind) in zip(steps, itertools.cycle(order), strict=False):
        nth = dice.randint(1, state.num_times)
        faults.append(Fault(after_step=step, state=state, nth=nth, target=target, kind=kind, seconds=0.0))
    return faults


def _target(dice: random.Random, state: State, targets: tuple[Target, ...]) -> Target:
    """Half of the time the process that stands still, where it can be struck."""
    if state.process in targets and dice.random() < 0.5:
        return state.process
    return dice.choice([target for target in targets if target not in (state.process, "call", state.without)])
