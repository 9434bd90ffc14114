"""Servers and learner on one node: `slipstream colocate run.toml [switches] [--key value ...]`.

    switches: --resume, --dry-run, --quiet, --json-logs
    place by `[deploy]` ─▶ start all ─▶ prefix output ─▶ forward signals ─▶ when one exits: stop all, or restart it

If there is no GPU and the config names no cores, each side gets half of the cores.
All output is also written to RUN_DIR/logs/.
"""

import logging
import os
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from deploy.placement import DeployConfig, DeployRun, ProcessSpec, rank_places, server_places
from deploy.supervisor import SupervisedProcess, Supervisor
from inference_server.config import ServerRun
from learner.config import LearnerRun
from protocol import console
from protocol.config import load_config, to_toml
from protocol.errors import ConfigError
from protocol.hardware import halves, has_gpu
from protocol.installation import module_command

log = logging.getLogger(__name__)

PROGRAM = "slipstream colocate"
SWITCHES = {
    "--resume": "continue the run in run_dir",
    "--dry-run": "print the config with all keys, and start nothing",
}


PURPOSE = """Run servers and learner on this node until the learner is done, placed by [deploy].

Keys of [server] and [learner] are flags too: `slipstream serve --help` and `slipstream train --help` list them.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all processes until the learner is done, then exit with its code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    console.pop_switches(arguments)  # they stay in the arguments, because `colocate` passes them on
    console.start_logging()
    with console.exit_on_user_error():
        sys.exit(colocate(arguments))


def colocate(arguments: list[str]) -> int:
    """Run all processes; return the learner's exit code, or 1 if a server exited first.

    Raises:
        ConfigError: If the config or a flag is invalid.
    """
    if not arguments or {"-h", "--help"} & set(arguments):
        load_config(DeployRun, ["--help"], PROGRAM, SWITCHES | console.SWITCHES, PURPOSE)  # prints and exits
    switches = [argument for argument in arguments if argument in SWITCHES]
    manner = [argument for argument in arguments if argument in console.SWITCHES]
    arguments = [argument for argument in arguments if argument not in (*SWITCHES, *console.SWITCHES)]
    config_file, flags_of = arguments[:1], flags_by_section(arguments[1:])
    config = load_config(DeployRun, config_file + flags_of["deploy"], PROGRAM, SWITCHES | console.SWITCHES).deploy
    learner_run = load_config(LearnerRun, config_file + flags_of["learner"], PROGRAM)
    first_endpoint = ["--endpoint", learner_run.servers[0]]  # every server gets its own later
    server_run = load_config(ServerRun, config_file + flags_of["server"] + first_endpoint, PROGRAM)
    if "--dry-run" in switches:
        # Each process reads the sections of the other processes as they are in the file.
        own = {"learner": msgspec.to_builtins(learner_run.learner), "deploy": msgspec.to_builtins(config)}
        print(to_toml(msgspec.structs.replace(server_run, **own)))
        if note := learner_run.idle_keys_note():
            log.warning(note)
        return 0
    config = with_cores(config, server_run, learner_run)
    node = Node(
        config=config, learner_run=learner_run, logs=make_logs(Path(learner_run.run_dir)),
        server=(
            *module_command("inference_server"), *config_file, *flags_of["server"],
            *adapter_flags(learner_run, server_run), *manner
        ),
        learner=(
            *module_command("learner"), "train", *config_file, *flags_of["learner"],
            *evaluation_flags(learner_run, server_run), *manner
        ),
        resume="--resume" in switches,
    )  # fmt: skip
    servers = {place.name: partial(node.start, node.server, place) for place in server_places(config, server_run)}
    rank_places(config, learner_run, port=0)  # raises ConfigError before any process is started
    return Supervisor(servers, node.start_learner, config).run()


def evaluation_flags(learner_run: LearnerRun, server_run: ServerRun) -> tuple[str, ...]:
    """Return flags with the evaluation URL, whose port may be from a server flag.

    Raises:
        ConfigError: If evaluations are on and the server has no HTTP port.
    """
    run = msgspec.structs.replace(learner_run, server=learner_run.server | {"http_port": server_run.server.http_port})
    run.check()
    evaluation = run.learner.evaluation
    if not evaluation.every_steps or evaluation.url is not None:
        return ()
    return ("--learner.evaluation.url", run.evaluation_url)


def adapter_flags(learner_run: LearnerRun, server_run: ServerRun) -> tuple[str, ...]:
    """Return flags with the rank of the learner's adapter, if it is from a learner flag and not in the file."""
    learner = learner_run.learner
    rank = 0 if learner.weight_sync.lora == "merged" else learner.lora.rank
    if server_run.server.max_lora_rank is not None or rank == server_run.lora_rank:
        return ()
    return ("--server.max-lora-rank", str(rank))


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """Config and commands for starting the processes of a node."""

    config: DeployConfig
    learner_run: LearnerRun
    logs: Path
    server: tuple[str, ...]
    learner: tuple[str, ...]
    """Command of each kind of process, without the flags of its ProcessSpec."""
    resume: bool

    def start(self, command: tuple[str, ...], place: ProcessSpec) -> SupervisedProcess:
        return SupervisedProcess(
            place.name, (*command, *place.flags), place.environment, self.logs / f"{place.name}.log"
        )

    def start_learner(self, *, again: bool) -> list[SupervisedProcess]:
        """Start all ranks, with a port for their rendezvous that is free now."""
        has_started = (Path(self.learner_run.run_dir) / "config.toml").exists()
        switch = ("--resume",) if self.resume or (again and has_started) else ()
        places = rank_places(self.config, self.learner_run, free_port())
        return [self.start((*self.learner, *switch), place) for place in places]


def flags_by_section(flags: list[str]) -> dict[str, list[str]]:
    """Split the flags by section. Flags without a section, like `--seed`, go to all."""
    of: dict[str, list[str]] = {"server": [], "learner": [], "deploy": []}
    targets = list(of)
    for flag in flags:
        if flag.startswith("--"):
            section = flag.removeprefix("--").partition(".")[0]
            targets = [section] if section in of and "." in flag else list(of)
        for target in targets:
            of[target].append(flag)
    return of


def with_cores(config: DeployConfig, server_run: ServerRun, learner_run: LearnerRun) -> DeployConfig:
    """Give each side half of the cores, unless any are assigned or there is a GPU."""
    num_cores = len(os.sched_getaffinity(0))
    of_config = (config.server_gpus, config.learner_gpus, config.server_cores, config.learner_cores)
    is_assigned = any((*of_config, server_run.server.cpu_cores, learner_run.learner.cpu_cores))
    if is_assigned or has_gpu() or num_cores < 2:
        return config
    of = halves(num_cores)
    return msgspec.structs.replace(config, server_cores=(of["server"],), learner_cores=(of["learner"],))


def make_logs(run_dir: Path) -> Path:
    """Create the log directory. Raises ConfigError if it cannot be written."""
    try:
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"run_dir = {run_dir} cannot be written: {error}; choose another with --run-dir") from error
    return run_dir / "logs"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


if __name__ == "__main__":
    main()
