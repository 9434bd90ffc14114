"""One run of a campaign: its config, processes, links and events. The supervisor decides what happens to them."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from learner.config import LearnerRun
from protocol.config import to_toml
from tests.chaos.events import Events, since
from tests.chaos.place import Place
from tests.chaos.process import LEARNER, Process, start_as_user, start_forked
from tests.chaos.schedule import CHECKPOINT_EVERY, Engine, Fault, Leg, Player
from tests.chaos.traps import Event, slow_of

FAKE: dict[str, Any] = {
    "groups_per_step": 2, "max_staleness": 2, "optimizer": {"learning_rate": 2e-3},
    "data": {"task": "reverse", "num_digits": 4, "num_prompts": 16},
    "sampling": {"group_size": 3, "max_tokens": 5},
    "reward": {"functions": ["share_right", "exact_match"], "weights": [1.0, 0.0]},
    # A policy without entropy gives groups without signal, and every one of them is sampled again.
    "loss": {"entropy_coef": 0.5},
}  # fmt: skip
REAL = FAKE | {
    "groups_per_step": 4,
    "data": {"task": "reverse", "num_digits": 8, "num_prompts": 64},
    "sampling": {"group_size": 8, "max_tokens": 9},
}
PLAYED: dict[str, Any] = {
    "data": {"task": "guess", "num_prompts": 16},
    "sampling": {"group_size": 3, "max_tokens": 2, "stop": list("0123456789")},
    "reward": {"functions": ["environment_reward"]},
    "environment": {"factory": "tests.chaos.environment:DoomedGuess", "max_turns": 4, "max_concurrent": 8,
        "timeout_s": 3.0},
    "max_group_attempts": 20,
}  # fmt: skip
"""Overrides FAKE and REAL. A group of three episodes stays usable when one ends without a reward."""
EVALUATED: dict[str, Any] = {
    "at_start": True, "max_concurrent": 3, "timeout_s": 100.0,
    "sets": {"few": {"num_prompts": 5}, "many": {"num_prompts": 8}},
}  # fmt: skip
REFERENCED: dict[str, Any] = {"kind": "every", "every_steps": 4, "timeout_s": 60.0}
"""A refresh falls between two checkpoints as often as on one."""
EVALUATE_EVERY = (2, CHECKPOINT_EVERY)
"""Per seed parity. With the first, some evaluated steps have no checkpoint and are trained again; with the second, a
resume continues a partial evaluation."""
AGENT: dict[str, Any] = PLAYED | {
    "environment": {"agent": "tests.chaos.environment:doomed_agent", "max_turns": 4, "max_concurrent": 8,
        "episode_deadline_s": 12.0},
}  # fmt: skip
SETTINGS: dict[Player | None, dict[str, Any]] = {None: {}, "environment": PLAYED, "agent": AGENT}
REAL_SERVER = {
    "max_concurrent_sequences": 256, "kv_cache_memory_mib": 64, "block_size": 32, "enforce_eager": True,
    # With "keep" a token's logprob depends on a mixture of versions, which the audit cannot compute.
    "kv_cache_on_weight_sync": "recompute",
}  # fmt: skip
REFERENCE = 100
"""Number of the reference's server."""
PUSH_TIMEOUT_S = 20.0
"""Longer than recovery may take, so that a peer that only waits for this timeout shows as slow."""
DRAIN_TIMEOUT_S = 30.0
"""Longer than a shutdown may take, even while the learner is down: a server that takes this long waits for nothing."""
PAUSE_TIMEOUT_S = 10.0
"""Longer than any stop, so that only a call that hangs takes this long."""


class Run:
    """The processes of one leg. `directory` receives everything: run/, logs, traps, events."""

    def __init__(self, leg: Leg, engine: Engine, directory: Path) -> None:
        self.directory, self._engine = directory, engine
        directory.mkdir(parents=True)
        self.config = make_config(leg, engine, directory)
        config_file = directory / "run.toml"
        config_file.write_text(to_toml(self.config))
        is_several = leg.num_servers > 1
        self.places = [
            Place(
                number, engine, directory / f"server-{number}" if is_several else directory, config_file,
                has_http=leg.has_evaluations,
            )
            for number in range(leg.num_servers)
        ]  # fmt: skip
        self.reference = (
            Place(REFERENCE, engine, directory / "reference", config_file, has_http=False)
            if leg.has_reference
            else None
        )
        self._listed = directory / "servers.txt"
        self._unlisted: set[int] = set()
        self._learner_arguments = [str(config_file), "--endpoint", self.places[0].endpoint]
        if self.reference is not None:
            self._learner_arguments += ["--learner.reference.endpoint", self.reference.endpoint]
        if leg.has_evaluations:
            self._learner_arguments += ["--learner.evaluation.url", self.places[0].url]
        if is_several:
            self.restore_list()
            config = msgspec.structs.replace(self.config, endpoints_from=f"file:{self._listed}")
            learner_file = directory / "learner.toml"
            learner_file.write_text(to_toml(config))
            self._learner_arguments = [str(learner_file)]
        files = {place.directory / "events": place.number for place in self.all_places}
        self.events = Events(
            {directory / "events": 0} | files, {place.link.port: place.number for place in self.places}
        )
        self.learner = self.start_learner()

    def start_learner(self) -> Process:
        has_started = (self.directory / "run" / "config.toml").exists()
        log, resume = self.directory / "learner.log", ["--resume"] if has_started else []
        start = start_as_user if self._engine == "real" else start_forked
        return start(LEARNER, self.directory, log, [*self._learner_arguments, *resume])

    @property
    def id(self) -> str:
        """The run's name on the wire, once the learner has started it."""
        return (self.directory / "run" / "run_id").read_text()

    @property
    def all_places(self) -> list[Place]:
        """All servers, with that of the reference."""
        return [*self.places, *([self.reference] if self.reference is not None else [])]

    def place(self, fault: Fault) -> Place:
        """Return the server that the fault is about."""
        if fault.target == "reference":
            assert self.reference is not None
            return self.reference
        return self.places[fault.server or 0]

    def holder(self, fault: Fault) -> Process:
        """Return the process that stops at the fault's state."""
        return self.learner if fault.state.process in ("learner", "environment") else self.place(fault).process

    def find(self, fault: Fault) -> int | None:
        """Return the process id of the fault's target; None if there is no such process now."""
        server = self.place(fault).process
        match fault.target:
            case "server" | "reference":
                return server.pid
            case "learner":
                return self.learner.pid
            case "engine core":
                return server.find_child("EngineCore")
            case "worker":
                return server.find_child("Worker_TP")
            case "reward worker":
                return self.learner.find_child("spawn_main")
            case "link" | "call" | "list" | "environment" | "rival":
                return None

    @contextmanager
    def slowly(self) -> Iterator[None]:
        """Slow the learner's steps down inside the block."""
        slow = slow_of(self.directory)
        slow.touch()
        try:
            yield
        finally:
            slow.unlink()

    def remove_from_list(self, place: Place) -> None:
        self._unlisted.add(place.number)
        self._write_list()

    def restore_list(self) -> None:
        """List every server."""
        self._unlisted.clear()
        self._write_list()

    def _write_list(self) -> None:
        aside = self._listed.with_suffix(".tmp")
        aside.write_text("".join(f"{place.endpoint}\n" for place in self.places if place.number not in self._unlisted))
        aside.rename(self._listed)

    def read_events(self) -> list[Event]:
        """Return all events so far."""
        return self.events.read()

    def first(self, name: str, since_s: float, server: int | None = None) -> Event | None:
        """Return the first event of this name after `since_s`; `server` None: of any server."""
        return next(
            (
                event
                for event in since(self.read_events(), since_s)
                if event.name == name and server in (None, event.server)
            ),
            None,
        )

    @property
    def steps_done(self) -> int:
        self.read_events()
        return self.events.num_steps

    def last_line(self, log: Path) -> str:
        """Return the last line of a log that is not empty."""
        lines = log.read_text(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def log(self, text: str) -> None:
        with (self.directory / "faults.log").open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def close(self) -> None:
        self.learner.kill()
        for place in self.all_places:
            place.close()


def make_config(leg: Leg, engine: Engine, directory: Path) -> LearnerRun:
    """Return the config of all processes. Each server gets its port by a flag."""
    learner = (REAL if engine == "real" else FAKE) | SETTINGS[leg.player] | {
        "steps": leg.steps, "checkpoint": {"every_steps": CHECKPOINT_EVERY}, "dynamic_sampling": leg.dynamic_sampling,
        "weight_sync": {"timeout_s": PUSH_TIMEOUT_S, "overlap_with_training": leg.sync_overlap},
        "report": {"trackers": [], "dashboard_port": 0}, "connect_timeout_s": 240.0, "group_idle_timeout_s": 60.0,
    }  # fmt: skip
    if leg.has_reference:
        learner |= {"reference": REFERENCED, "kl": {"coef": 0.01}}
    if leg.has_evaluations:
        learner["evaluation"] = EVALUATED | {
            "every_steps": EVALUATE_EVERY[leg.seed % 2],
            "pin_policy": not leg.sync_overlap,
        }
    server = (REAL_SERVER if engine == "real" else {}) | {
        "max_engine_restarts": 100, "pause_timeout_s": PAUSE_TIMEOUT_S, "drain_timeout_s": DRAIN_TIMEOUT_S,
        "http_port": 0,
        "overlap_weight_loading": leg.overlap_weight_loading, "tensor_parallel_size": leg.num_workers,
    }  # fmt: skip
    table = {
        "model": "tiny:digits", "run_dir": str(directory / "run"), "dtype": "float32",
        "seed": leg.seed % 1000, "learner": learner, "server": server,
    }  # fmt: skip
    return msgspec.convert(table, LearnerRun)
