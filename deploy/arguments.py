"""Arguments of the commands that start a whole run: `slipstream colocate` and `slipstream ray`.

    run.toml [switches] [--key value ...] ─▶ configs of all sides, checked ─▶ Launch: the arguments of each side

Invariant: an invalid config or flag of any side, or a `run_dir` that contains another run, is refused before any
process is started.
"""

import logging
import re
from pathlib import Path
from typing import Any

import msgspec

from deploy.placement import DeployConfig, DeployRun
from inference_server.config import ServerRun
from learner.config import LearnerRun
from protocol import console
from protocol.config import OTHER_SECTIONS, load_config, to_toml, with_other_sections
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
    environment: dict[str, str]
    """Environment of every process: flags of the sections of the others."""
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
        ConfigError: The config or a flag is invalid, or `run_dir` contains a run that --resume does not continue.
    """
    if not arguments or {"-h", "--help"} & set(arguments):
        load_config(DeployRun, ["--help"], program, SWITCHES | console.SWITCHES, purpose)  # prints and exits
    switches = [argument for argument in arguments if argument in SWITCHES]
    manner = [argument for argument in arguments if argument in console.SWITCHES]
    arguments = [argument for argument in arguments if argument not in (*SWITCHES, *console.SWITCHES)]
    config_file, flags_of = arguments[:1], flags_by_section(arguments[1:])
    deploy_run = load_config(DeployRun, config_file + flags_of["deploy"], program, SWITCHES | console.SWITCHES)
    config, first_endpoint = deploy_run.deploy, ["--endpoint", deploy_run.servers[0]]  # each server gets its own later
    server_run = load_config(ServerRun, config_file + flags_of["server"] + first_endpoint, program)
    sections = {"server": keys_from_flags("server", flags_of["server"], server_run.server)}
    learner_run = load_config(LearnerRun, config_file + flags_of["learner"], program, others=sections)
    sections["learner"] = keys_from_flags("learner", flags_of["learner"], learner_run.learner)
    server_run = with_other_sections(server_run, sections)
    if "--dry-run" in switches:
        # The config of a side has its own section in full, and of the others what is in the file or a flag.
        own = {"learner": msgspec.to_builtins(learner_run.learner), "deploy": msgspec.to_builtins(config)}
        print(to_toml(msgspec.structs.replace(server_run, endpoint=learner_run.endpoint, **own)))
        if note := learner_run.idle_keys_note():
            log.warning(note)
        return None
    if "--resume" not in switches:
        learner_run.require_new_run_dir()  # `resume_switch` takes a run that appears later for that of this launch
    return Launch(
        config=config, server_run=server_run, learner_run=learner_run, resume="--resume" in switches,
        server=(*config_file, *flags_of["server"], *manner),
        learner=("train", *config_file, *flags_of["learner"], *manner),
        environment={OTHER_SECTIONS: msgspec.json.encode(sections).decode()},
    )  # fmt: skip


def keys_from_flags(section: str, flags: list[str], config: msgspec.Struct) -> dict[str, Any]:
    """Return the keys and inner sections of a section's config for which there are flags."""
    (words, _), values = renamed_flags(flags), msgspec.to_builtins(config)
    own = f"--{section}."
    names = [word.removeprefix(own).replace("-", "_") for word in words if word.startswith(own)]
    return {key: values[key] for key in (re.split("[.=]", name)[0] for name in names)}


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
