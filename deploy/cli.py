"""The program `slipstream`, which has all commands: `slipstream COMMAND ...`.

    first word ─▶ the module that has the command ─▶ its own parser, --help and exit status

`inference-server` and `learner` are other names of some of these commands.
Invariant: starting a command imports nothing of the others. `slipstream report` loads neither torch nor vLLM,
and `slipstream serve` nothing of the learner.
"""

import sys
from collections.abc import Sequence

from protocol import console
from protocol.installation import version_line

GROUPS = {
    "run": {
        "colocate": "run servers and learner on this machine",
        "ray": "run servers and learner on a Ray cluster",
        "serve": "run an inference server",
        "train": "run the learner",
        "evaluate": "measure how good the policy of a server is",
    },
    "look": {
        "report": "write the report of a run, or compare several runs",
        "runs": "list the runs in a directory: state, step, reward",
    },
    "publish": {
        "export": "write a checkpoint as a Hugging Face model, and push it to the hub",
    },
    "prepare": {
        "new": "write a task of your own to begin with",
        "check": "try prompts and rewards; with --trial: measure how long the run would take",
        "doctor": "find what would keep a run from starting; with --server: on the machine of the server",
        "self-test": "measure the noise between a running server and the learner",
        "plan": "predict how to divide GPUs between servers and learner",
        "keys": "make the keys of a server and a learner",
    },
}
COMMANDS = [name for group in GROUPS.values() for name in group]
SERVER = "--server"
"""Switch of `slipstream doctor`: the server's side."""
HELP, VERSION = ("-h", "--help"), "--version"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; a user error exits with code 2 and without a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    words = console.pop_switches(arguments)
    switches = [word for word in arguments if word in console.SWITCHES]
    name, rest = (words[0], words[1:]) if words else (HELP[0], [])
    with console.exit_on_user_error(lambda: name if name in ("plan", "ray") else "learner"):
        if name in HELP:
            print(usage())
        elif name not in (*COMMANDS, VERSION):
            raise console.unknown_command(name, COMMANDS)
        elif VERSION in words:
            print(version_line("slipstream"))
        else:
            start(name, [*rest, *switches])


def usage() -> str:
    lines = ["usage: slipstream COMMAND ..."]
    for group, commands in GROUPS.items():
        lines += ["", f"{group}:", *(f"  {name:<10} {summary}" for name, summary in commands.items())]
    explanation = "`slipstream COMMAND --help` explains a command; `slipstream --version` prints the version."
    return "\n".join([*lines, "", console.SWITCHES_HELP, explanation])


def start(name: str, words: list[str]) -> None:
    """Run a command by the `main` of its module."""
    match name:
        case "serve":
            from inference_server.__main__ import main as run
        case "doctor" if SERVER in words:
            from inference_server.__main__ import main as run

            words = [name, *(word for word in words if word != SERVER)]
        case "colocate":
            from deploy.colocate import main as run
        case "ray":
            from deploy.ray import main as run
        case "plan":
            from deploy.plan import main as run
        case "keys":
            from protocol.channel.keys import main as run
        case _:
            from learner.__main__ import main as run

            words = [name, *words]
    run(words)


if __name__ == "__main__":
    main()
