"""The schedule of faults: a pure function of the seed, so that a campaign can be repeated.

A campaign consists of legs. Each leg is one run with its own config. A fault waits for a number of steps, then for the
n-th visit of a state.

Invariant: no fault depends on the wall clock.
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
    "server", "engine core", "worker", "learner", "reward worker", "link", "call", "list", "environment", "rival",
    "reference",
]  # fmt: skip
"""environment: the environment or the agent. reference: the server of the reference. rival: no process is hit; another
learner asks for the server."""
Kind = Literal[
    "kill", "stop", "stop, then kill", "hang up", "cut", "stall", "hang", "leave", "drain",
    "ask", "ask in a cut", "ask after a death",
]  # fmt: skip
"""hang up: the terminal closes, so the process and its children receive SIGHUP. ask in a cut: while the learner's link
is cut. ask after a death: between the learner's death and its restart."""

FAULTS_PER_LEG = 25
WORKER_FAULTS_SHARE = 0.1
"""With vLLM: share of faults that hit one of two tensor-parallel workers, in a separate leg. A single worker is the
engine core."""
STEPS_PER_FAULT = 4
CHECKPOINT_EVERY = 3
NUM_MOMENTS = 30
"""A random moment is one of the next NUM_MOMENTS messages that a process receives."""
DURATIONS_S = (0.3, 1.0, 4.0)
"""Durations of stops, cuts, stalls, absences from the list and rivals. The last exceeds the longest tolerated silence
of a peer."""
STEPS_WITHOUT_END = 1_000_000
"""Steps of a run on several servers. It continues while a server restarts, and is interrupted after the last fault."""


class State(msgspec.Struct, frozen=True):
    """A place in one process's code where the process stops while the fault happens.

    For the engine: a call that never returns, while its process lives. For an environment: a call of its method, which
    commits the fault itself.
    """

    process: Process
    name: str
    provoked_by: Literal["server killed", "learner killed", "byte flipped"] | None = None
    """What must happen first. A healthy run does not reach such a state."""
    num_times: int = 1
    """Number of visits that a fault may choose from: all broadcasts of a push are one state."""
    overlap_weight_loading: bool | None = None
    """The value of server.overlap_weight_loading that the state requires. None: either."""
    without: Target | None = None
    """A target that does not exist yet in this state."""

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
"""Faults of legs with an environment or an agent."""
ANSWERED = State("learner", "before an answer is kept", num_times=8)
OF_EVALUATIONS: tuple[tuple[State, Target, Kind], ...] = (
    (ANSWERED, "learner", "kill"), (ANSWERED, "server", "kill"), (ANSWERED, "engine core", "kill"),
    (State("learner", "before evaluation is noted", num_times=2), "learner", "kill"),
    (State("learner", "before answers are forgotten", num_times=2), "learner", "kill"),
)  # fmt: skip
"""Faults of legs with evaluations."""
SCORING = State("learner", "scoring for the reference", num_times=16)
REFILLING = State("learner", "refilling the reference")
OF_REFERENCES: tuple[tuple[State, Target, Kind], ...] = (
    (SCORING, "reference", "kill"), (SCORING, "reference", "stop"), (REFILLING, "reference", "kill"),
    (SCORING, "learner", "kill"), (SCORING, "reference", "hang up"), (SCORING, "reference", "stop, then kill"),
    (REFILLING, "learner", "kill"),
)  # fmt: skip
"""Faults of legs whose reference, a copy of the policy, is on a server."""
ENDS_IN_ORDER: tuple[Kind, ...] = ("drain", "hang up")
"""Kinds that request a shutdown: a server drains, a learner finishes its step and writes a checkpoint."""
DRAIN: Kind = "drain"
"""Shut down one of several servers and start another in its place: half of the faults that hit one of several
servers."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One fault. `nth` counts visits of `state` after step `after_step`."""

    after_step: int
    state: State
    nth: int
    target: Target
    kind: Kind
    seconds: float
    """Duration of a stop, a cut, a stall, an absence or a rival. 0 for every other kind, and for every fault to an
    environment: only the learner can end those."""
    server: int | None = None
    """Which of several servers is hit, or has the state."""

    @property
    def ends_a_process(self) -> bool:
        """Whether it ends a server or the learner, which then has to be restarted."""
        ends_target = self.kind in ("kill", "stop, then kill", *ENDS_IN_ORDER)
        return self.kind == "ask after a death" or (self.target in ("server", "learner", "reference") and ends_target)

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
    """The run plays episodes with an environment or an agent. None: it samples completions."""
    has_evaluations: bool = False
    """Whether the run evaluates every few steps, pinned unless weight sync overlaps with training."""
    has_reference: bool = False
    """Whether the run has a reference on a server, refreshed every few steps."""

    @property
    def steps(self) -> int:
        """Enough steps for every fault, some of which are late, and a few steps without faults."""
        return STEPS_WITHOUT_END if self.num_servers > 1 else STEPS_PER_FAULT * (len(self.faults) + 5)


def schedule(
    seed: int, num_faults: int, engine: Engine, num_servers: int = 1, player: Player | None = None,
    has_evaluations: bool = False, has_reference: bool = False,
) -> list[Leg]:  # fmt: skip
    """Return the legs of a campaign. Every state is used once before any is used again.

    With several servers, faults also hit the server list and drain a server. With a player, evaluations or a reference,
    half of the faults hit those. In none of these cases does a server have several workers.
    """
    is_several = num_servers > 1
    kind = (f"/{num_servers}" if is_several else "") + (f"/{player}" if player is not None else "")
    dice = random.Random(
        f"{seed}/{num_faults}/{engine}{kind}" + "/is evaluated" * has_evaluations + "/reference" * has_reference
    )
    decks: dict[bool, list[State]] = {True: [], False: []}
    targets: tuple[Target, ...] = (*TARGETS[engine], "list") if is_several else TARGETS[engine]
    has_workers = engine == "real" and not (is_several or player is not None or has_evaluations or has_reference)
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
        if has_reference:
            faults[::2] = _of(OF_REFERENCES, dice, [fault.after_step for fault in faults[::2]])
        if is_several:
            faults = [msgspec.structs.replace(fault, server=dice.randrange(num_servers)) for fault in faults]
        leg = _leg(dice, len(legs), faults, num_workers=1, overlap_weight_loading=overlap_weight_loading)
        legs.append(
            msgspec.structs.replace(
                leg,
                num_servers=num_servers,
                player=player,
                has_evaluations=has_evaluations,
                has_reference=has_reference,
            )
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
        number=number, seed=dice.randrange(2**31), num_workers=num_workers,
        overlap_weight_loading=overlap_weight_loading,
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
    """Return one of `possible` for each step; each is used once before any is used again."""
    order = dice.sample(possible, len(possible))
    faults = []
    for step, (state, target, kind) in zip(steps, itertools.cycle(order), strict=False):
        nth = dice.randint(1, state.num_times)
        is_stop = target == "reference" and kind.startswith("stop")
        seconds = dice.choice(DURATIONS_S) if is_stop else 0.0
        faults.append(Fault(after_step=step, state=state, nth=nth, target=target, kind=kind, seconds=seconds))
    return faults


def _target(dice: random.Random, state: State, targets: tuple[Target, ...]) -> Target:
    """Return the target: half of the time the process that stops at the state, if it is a target."""
    if state.process in targets and dice.random() < 0.5:
        return state.process
    return dice.choice([target for target in targets if target not in (state.process, "call", state.without)])
