"""Arguments of the commands that start a whole run: `slipstream colocate` and `slipstream ray`.

    run.toml [switches] [--key value ...] ─▶ configs of all sides, checked ─▶ Launch: the arguments of each side

Invariant: an invalid config or flag of any side is refused before any process is started.
"""

import logging
from pathlib import Path

import msgspec

from deploy.placement import DeployConfig, DeployRun
from inference_server.config import ServerRun
from learner.config import LearnerRun
from protocol import console
from protocol.config import load_config, to_toml
from protocol.errors import ConfigError
from protocol.former_keys import renamed_flags

log = logging.getLogger(__name__)

SWITCHES = {
    "--resume": "continue the run in run_dir",
    "--dry-run": "print the config with all keys, and start nothing",
}


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """A run to start: its configs, and the arguments of each kind of process."""

    config: DeployConfig
    server_run: ServerRun
    learner_run: LearnerRun
    server: tuple[str, ...]
    """Arguments of every server: config file, flags, switches."""
    learner: tuple[str, ...]
    """Arguments of every rank, without --resume."""
    resume: bool

    def resume_switch(self, *, again: bool) -> tuple[str, ...]:
        """Return --resume if the user gave it, or if a rank that ran before (`again`) has left a run."""
        has_started = (Path(self.learner_run.run_dir) / "config.toml").exists()
        return ("--resume",) if self.resume or (again and has_started) else ()

    def make_logs(self) -> Path:
        """Create the log directory. Raises ConfigError if it cannot be written."""
        run_dir = Path(self.learner_run.run_dir)
        try:
            (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run_dir = {run_dir} cannot be written: {error}; choose another with --run-dir"
            ) from error
        return run_dir / "logs"


def read_arguments(arguments: list[str], program: str, purpose: str) -> Launch | None:
    """Return the run to start, or None after --dry-run has printed it.

    Raises:
        ConfigError: If the config or a flag is invalid.
    """
    if not arguments or {"-h", "--help"} & set(arguments):
        load_config(DeployRun, ["--help"], program, SWITCHES | console.SWITCHES, purpose)  # prints and exits
    switches = [argument for argument in arguments if argument in SWITCHES]
    manner = [argument for argument in arguments if argument in console.SWITCHES]
    arguments = [argument for argument in arguments if argument not in (*SWITCHES, *console.SWITCHES)]
    config_file, flags_of = arguments[:1], flags_by_section(arguments[1:])
    config = load_config(DeployRun, config_file + flags_of["deploy"], program, SWITCHES | console.SWITCHES).deploy
    learner_run = load_config(LearnerRun, config_file + flags_of["learner"], program)
    first_endpoint = ["--endpoint", learner_run.servers[0]]  # every server gets its own later
    server_run = load_config(ServerRun, config_file + flags_of["server"] + first_endpoint, program)
    if "--dry-run" in switches:
        # Each process reads the sections of the other processes as they are in the file.
        own = {"learner": msgspec.to_builtins(learner_run.learner), "deploy": msgspec.to_builtins(config)}
        print(to_toml(msgspec.structs.replace(server_run, **own)))
        if note := learner_run.idle_keys_note():
            log.warning(note)
        return None
    return Launch(
        config=config, server_run=server_run, learner_run=learner_run, resume="--resume" in switches,
        server=(*config_file, *flags_of["server"], *adapter_flags(learner_run, server_run), *manner),
        learner=("train", *config_file, *flags_of["learner"], *manner),
    )  # fmt: skip


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


def flags_by_section(flags: list[str]) -> dict[str, list[str]]:
    """Split the flags by section. Flags without a section, like `--seed`, go to all."""
    of: dict[str, list[str]] = {"server": [], "learner": [], "deploy": []}
    targets = list(of)
    for flag in flags:
        if flag.startswith("--"):
            ((name,), _) = renamed_flags([flag])  # a former name may be of another section
            section = name.removeprefix("--").partition(".")[0]
            targets = [section] if section in of and "." in name else list(of)
        for target in targets:
            of[target].append(flag)
    return of
