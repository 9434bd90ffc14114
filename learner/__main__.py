"""The commands of the learner: `slipstream train`, `check`, `evaluate`, `doctor`, `self-test`, `report`, `runs`,
`export`, `new`.

`learner COMMAND` is another name of `slipstream COMMAND`. All commands take --quiet and --json-logs.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from protocol import console
from protocol.errors import TRANSIENT_ERROR, ConfigError, ParityError, SlipstreamError
from protocol.installation import version_line

if TYPE_CHECKING:
    from learner.config import LearnerRun

log = logging.getLogger(__name__)

ENVIRONMENT = {
    # Huge pages triple the speed of the weight copy for a sync.
    "THP_MEM_ALLOC_ENABLE": "1",
    # Gloo would print a C++ stack trace for every lost rank, which rank_watch.py reports in one line.
    "TORCH_CPP_LOG_LEVEL": "FATAL",
}
"""Environment variables that torch reads on import. Values set by the user take precedence."""

END_S = 20.0
"""Time for the process to end after training has failed."""

USAGE = """\
usage: learner COMMAND ..., which is `slipstream COMMAND ...`
commands: {commands}
`slipstream --help` explains them"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command; a user error ends it without a traceback."""
    words = console.pop_switches(sys.argv[1:] if arguments is None else arguments)
    console.start_logging()
    for library in ("httpx", "accelerate", "datasets"):  # they log a line for every file
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        with console.exit_on_user_error():
            if status := run_command(words):
                sys.exit(status)
    except KeyboardInterrupt:
        sys.stdout.flush()
        # A normal exit would wait for the threads that write a pending checkpoint.
        os._exit(130)


def run_command(words: list[str]) -> int | None:
    """Return the exit status of a command; None: 0."""
    match words:
        case [] | ["-h" | "--help"]:
            print(USAGE.format(commands=", ".join(COMMANDS)))
        case ["--version"]:
            print(version_line("learner"))
        case [name, *arguments] if name in COMMANDS and "--version" in arguments:
            print(version_line("learner"))
        case [name, *arguments] if name in COMMANDS:
            return COMMANDS[name](arguments)
        case [name, *_]:
            raise console.unknown_command(name, COMMANDS)
    return None


def new_command(arguments: list[str]) -> None:
    parser = console.ArgumentParser("slipstream new", "Write a task of your own to begin with.")
    parser.add_argument("directory", type=Path, metavar="DIR", help="new directory of the task")
    directory = parser.parse_args(arguments).directory
    from learner.starter.starter import write_starter

    print(write_starter(directory))


def train_command(arguments: list[str]) -> None:
    from learner.config import LearnerRun
    from protocol.config import load_config, to_toml

    flags = {
        "--resume": "continue the run in run_dir",
        "--dry-run": "print the config with all keys, and start nothing",
    }
    switches = flags.keys() & arguments
    arguments = [argument for argument in arguments if argument not in switches]
    run = load_config(LearnerRun, arguments, "slipstream train", flags | console.SWITCHES)
    if "--dry-run" in switches:
        print(to_toml(run))
        if note := run.idle_keys_note():
            log.warning(note)
        return
    _prepare_to_compute(run)
    from learner.train import train

    try:
        run_dir = train(run, resume="--resume" in switches)
    except BaseException as error:
        end_by_force_after(END_S, error.exit_code if isinstance(error, SlipstreamError) else TRANSIENT_ERROR)
        raise
    if run_dir is None:
        return
    try:
        report_end(run_dir)
    except SlipstreamError as error:  # the run itself has succeeded
        log.warning("the report of the run could not be written: %s", error)


def end_by_force_after(seconds: float, code: int) -> None:
    """End this process in time even if a thread hangs, for which Python would wait at exit.

    Such a thread writes a checkpoint to a file system that does not answer. A supervisor would wait too, instead
    of starting the learner again.
    """

    def end() -> None:
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=end, name="end-by-force", daemon=True).start()


def doctor_command(arguments: list[str]) -> int:
    """Return the exit status: 1 if there is any problem."""
    if "--server" in arguments:
        raise ConfigError("--server is not a flag of the learner's doctor; use `slipstream doctor --server run.toml`")
    run, as_json = _selected_run(
        arguments, "slipstream doctor",
        "Look for what would keep a run from starting, with remedies. `slipstream doctor --server` examines the "
        "server's side, on its machine.",
    )  # fmt: skip
    from learner.doctor.doctor import examine
    from protocol.doctor import print_findings

    return print_findings(examine(run.in_effect()), as_json=as_json)


def check_command(arguments: list[str]) -> int:
    """Return the exit status: 1 if there is any problem."""
    rest = [argument for argument in arguments if argument != "--trial"]
    run, as_json = _selected_run(
        rest, "slipstream check",
        "Show the first prompts as the model gets them, with rewards; then do as the doctor does.",
        {"--trial": "also run the first steps, and estimate how long the whole run would take"},
    )  # fmt: skip
    _prepare_to_compute(run)
    from learner.doctor.check import check
    from protocol.doctor import print_findings

    return print_findings(check(run, with_trial=rest != arguments), as_json=as_json)


def evaluate_command(arguments: list[str]) -> None:
    run, as_json = _selected_run(
        arguments,
        "slipstream evaluate",
        "Ask a server the prompts of [learner.evaluation], rate its answers, and print means with intervals.",
    )
    import msgspec

    from learner.evaluation.evaluate import evaluate
    from learner.evaluation.results import format_evaluation

    for made in evaluate(run.in_effect()):
        print(msgspec.json.encode(made).decode() if as_json else format_evaluation(made))


def _selected_run(
    arguments: list[str], program: str, purpose: str, flags: Mapping[str, str] | None = None
) -> "tuple[LearnerRun, bool]":
    """Return the run, and whether to answer in JSON."""
    from learner.config import LearnerRun
    from protocol.config import load_config

    rest = [argument for argument in arguments if argument != "--json"]
    flags = dict(flags or {}) | {"--json": "print JSON"} | console.SWITCHES
    return load_config(LearnerRun, rest, program, flags, purpose), rest != arguments


def _prepare_to_compute(run: "LearnerRun") -> None:
    """Bind cores and set variables; call this before torch is imported.

    OpenMP reads its thread count only once.
    """
    from protocol.hardware import bind_cores, share_of_cores

    cores = run.learner.cpu_cores
    if cores is None:
        cores = share_of_cores(
            "learner", run.server, () if run.endpoints_from else run.servers,
            num_processes=int(os.environ.get("LOCAL_WORLD_SIZE", 1)), rank=int(os.environ.get("LOCAL_RANK", 0)),
        )  # fmt: skip
    bind_cores(cores)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def self_test_command(arguments: list[str]) -> None:
    run, as_json = _selected_run(
        arguments,
        "slipstream self-test",
        "Measure the noise between a running server and this learner, with nothing learned.",
    )
    _prepare_to_compute(run)
    import msgspec

    from learner.doctor.noise import format_measurement, problems
    from learner.doctor.self_test import self_test

    measured = self_test(run)
    found = problems(measured)
    result = {"measured": measured, "problems": found}
    print(msgspec.json.encode(result).decode() if as_json else format_measurement(measured))
    if found:
        raise ParityError("\n       ".join(found))
    if not as_json:
        rest = "" if measured.is_quantized else ", and nothing in this run acts on the noise that is left"
        print(f"server and learner agree{rest}")


def report_command(arguments: list[str]) -> None:
    parser = console.ArgumentParser("slipstream report", "Write the report of a run, or compare several runs.")
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR", help="one run, or several to compare")
    parser.add_argument("--json", action="store_true", help="print one JSON object and write nothing")
    options = parser.parse_intermixed_args(arguments)
    if len(options.run_dirs) == 1:
        report(options.run_dirs[0], as_json=options.json)
    else:
        compare_runs(options.run_dirs, as_json=options.json)


def report(run_dir: Path, *, as_json: bool) -> None:
    import msgspec

    from learner.report.page import write_report
    from learner.report.summary import format_summary, summarize

    summary = summarize(run_dir)
    if as_json:
        print(msgspec.json.encode(summary).decode())
    else:
        print(f"\n{format_summary(summary)}\n\nreport: {write_report(run_dir)}")


def report_end(run_dir: Path) -> None:
    """Print the report of a finished run in the console's format."""
    from learner.report.page import write_report
    from learner.report.summary import format_summary, summarize

    if console.output_mode().has_bars:
        report(run_dir, as_json=False)
    else:
        console.say(f"{format_summary(summarize(run_dir))}\n\nreport: {write_report(run_dir)}")


def compare_runs(run_dirs: Sequence[Path], *, as_json: bool) -> None:
    import msgspec

    from learner.report.page import compare, comparison_text, write_comparison

    comparison, metrics = compare(run_dirs)
    if as_json:
        print(msgspec.json.encode(comparison).decode())
    else:
        print(f"{comparison_text(comparison)}\n\ncomparison: {write_comparison(comparison, metrics)}")


def runs_command(arguments: list[str]) -> None:
    parser = console.ArgumentParser("slipstream runs", "List the runs in a directory: state, step, reward.")
    parser.add_argument("directory", nargs="?", type=Path, default="runs", metavar="DIR", help='default: "runs"')
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of the table")
    options = parser.parse_args(arguments)
    import msgspec

    from learner.report.runs import as_table, list_runs

    runs = list_runs(options.directory)
    print(msgspec.json.encode(runs).decode() if options.json else as_table(runs))


def export_command(arguments: list[str]) -> None:
    parser = console.ArgumentParser(
        "slipstream export",
        "Write a checkpoint of a run as a Hugging Face model, with a model card, and push it to the hub.\n\n"
        "A LoRA run exports its adapter in peft's form, or with --merge the whole model. The same command again\n"
        "writes nothing new: it continues a push, also after README.md was edited.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="directory of the run")
    parser.add_argument("directory", nargs="?", type=Path, metavar="DIR", help="default: in RUN_DIR/exports")
    parser.add_argument("--checkpoint", metavar="C", help='"latest" (default), "best", or a step')
    parser.add_argument(
        "--best-by", metavar="RANKING",
        help="the best by a value of learner.checkpoint.best_by or a metric of an evaluation, such as "
        "evaluation/hard/reward; default for --checkpoint best: learner.checkpoint.best_by",
    )  # fmt: skip
    parser.add_argument("--merge", action="store_true", help="merge the adapter of a LoRA run into its base")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"),
        help="default: that of the run; of an adapter float32",
    )  # fmt: skip
    parser.add_argument("--base", metavar="ORG/NAME", help="name of the base model on the hub, if `model` is not one")
    parser.add_argument("--push", metavar="ORG/NAME", help="push to this repository of the hub, made private if new")
    parser.add_argument("--public", action="store_true", help="make a new repository public")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = vars(parser.parse_intermixed_args(arguments))
    as_json = options.pop("json")
    import msgspec

    from learner.publishing.publish import ExportRequest, export_run

    made = export_run(ExportRequest(**options))
    if as_json:
        print(msgspec.json.encode(made).decode())
    else:
        print(
            f"step {made.step} ({made.reason}), {made.form}: {made.directory}" + (f"\n{made.url}" if made.url else "")
        )


COMMANDS: dict[str, Callable[[list[str]], int | None]] = {
    "train": train_command,
    "evaluate": evaluate_command,
    "report": report_command,
    "runs": runs_command,
    "export": export_command,
    "new": new_command,
    "check": check_command,
    "doctor": doctor_command,
    "self-test": self_test_command,
}

if __name__ == "__main__":
    main()
