"""One run under fault: its config, its processes, its link, and the events they tell. Nothing here decides what happens."""

import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from learner.config import LearnerRun
from protocol.config import to_toml
from tests.chaos.process import FAKE_SERVER, LEARNER, SERVER, Process, start_as_user, start_forked
from tests.chaos.schedule import CHECKPOINT_EVERY, Engine, Leg, Target
from tests.chaos.traps import Event
from tests.link import Link

FAKE: dict[str, Any] = {
    "groups_per_step": 2, "max_staleness": 2, "optimizer": {"learning_rate": 2e-3},
    "data": {"task": "reverse", "num_digits": 4, "num_prompts": 16},
    "sampling": {"num_completions": 3, "max_tokens": 5},
    "reward": {"functions": ["share_right", "exact_match"], "weights": [1.0, 0.0]},
}  # fmt: skip
REAL = FAKE | {
    "groups_per_step": 4,
    "data": {"task": "reverse", "num_digits": 8, "num_prompts": 64},
    "sampling": {"num_completions": 8, "max_tokens": 9},
}
REAL_SERVER = {
    "max_concurrent_sequences": 256, "kv_cache_memory_mib": 64, "block_size": 32, "enforce_eager": True,
    # With "keep" a token's logprob is of a mixture of versions, which the audit could not compute.
    "kv_on_push": "recompute",
}  # fmt: skip
PUSH_TIMEOUT_S = 20.0
"""More than work may take to go on, so that whoever can only wait for it shows."""
PAUSE_TIMEOUT_S = 10.0
"""More than a stop lasts, so that only a call that hangs takes so long."""


class Run:
    """The processes of one leg. `directory` gets everything: run/, logs, traps, events."""

    def __init__(self, leg: Leg, engine: Engine, directory: Path) -> None:
        self.directory, self._engine = directory, engine
        directory.mkdir(parents=True)
        self.config = make_config(leg, engine, directory)
        self._config_file = directory / "run.toml"
        self._config_file.write_text(to_toml(self.config))
        self.link = Link()
        self.events: list[Event] = []
        self._num_bytes_read = 0
        self.server = self.start_server()
        self.learner = self.start_learner()

    def start_server(self) -> Process:
        self.link.server_port = _free_port()  # the one before may be somebody else's by now
        address = f"tcp://127.0.0.1:{self.link.server_port}"
        log, arguments = self.directory / "server.log", [str(self._config_file), "--endpoint", address]
        if self._engine == "real":
            return start_as_user(SERVER, self.directory, log, arguments)
        return start_forked(FAKE_SERVER, self.directory, log, arguments)

    def start_learner(self) -> Process:
        is_begun = (self.directory / "run" / "config.toml").exists()
        log, resume = self.directory / "learner.log", ["--resume"] if is_begun else []
        arguments = [str(self._config_file), *resume, "--endpoint", f"tcp://127.0.0.1:{self.link.port}"]
        start = start_as_user if self._engine == "real" else start_forked
        return start(LEARNER, self.directory, log, arguments)

    def find(self, target: Target) -> int | None:
        """Return the process id of a target; None for the link, and where there is none now."""
        match target:
            case "server":
                return self.server.pid
            case "learner":
                return self.learner.pid
            case "engine core":
                return self.server.child("EngineCore")
            case "worker":
                return self.server.child("Worker_TP")
            case "reward worker":
                return self.learner.child("spawn_main")
            case "link":
                return None

    def read_events(self) -> list[Event]:
        """Return all events so far."""
        path = self.directory / "events"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._num_bytes_read)
                lines = file.read().splitlines(keepends=True)
            whole = [line for line in lines if line.endswith(b"\n")]
            self._num_bytes_read += sum(map(len, whole))
            self.events += [msgspec.json.decode(line, type=Event) for line in whole]
        return self.events

    def first(self, name: str, since_s: float) -> Event | None:
        """Return the first event of this name after a time."""
        return next((event for event in self.read_events() if event.name == name and event.time_s > since_s), None)

    @property
    def steps_done(self) -> int:
        return max((event.number for event in self.read_events() if event.name == "consumed"), default=0)

    def last_words(self, name: str) -> str:
        """Return the last line of the log of the server or the learner."""
        lines = (self.directory / f"{name}.log").read_text(errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def say(self, text: str) -> None:
        with (self.directory / "faults.log").open("a") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def close(self) -> None:
        for process in (self.learner, self.server):
            process.end()
        self.link.close()


def make_config(leg: Leg, engine: Engine, directory: Path) -> LearnerRun:
    """The config of both processes; each is told its port by a flag."""
    learner = (REAL if engine == "real" else FAKE) | {
        "steps": leg.steps, "checkpoint": {"every_steps": CHECKPOINT_EVERY}, "active_sampling": leg.active_sampling,
        "push": {"timeout_s": PUSH_TIMEOUT_S, "overlap": leg.push_overlap},
        "report": {"trackers": [], "dashboard_port": 0}, "connect_timeout_s": 240.0, "group_deadline_s": 60.0,
    }  # fmt: skip
    server = (REAL_SERVER if engine == "real" else {}) | {
        "max_engine_restarts": 100, "pause_timeout_s": PAUSE_TIMEOUT_S, "http_port": 0, "receive_overlap": leg.receive_overlap, "tensor_parallel_size": leg.num_workers,
    }  # fmt: skip
    table = {
        "model": "tiny:digits", "run_dir": str(directory / "run"), "dtype": "float32",
        "seed": leg.seed % 1000, "learner": learner, "server": server,
    }  # fmt: skip
    return msgspec.convert(table, LearnerRun)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        return holder.getsockname()[1]
