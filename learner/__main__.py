"""Commands of the learner: new, check, train, evaluate, doctor, self-test, report, runs.

    learner new DIR
    learner check run.toml [--trial] [--json] [--key value ...]
    learner train run.toml [--resume] [--key value ...]
    learner evaluate run.toml [--json] [--key value ...]
    learner doctor run.toml [--json] [--key value ...]
    learner self-test run.toml [--json] [--key value ...]
    learner report RUN_DIR [RUN_DIR ...] [--json]
    learner runs [DIR] [--json]

Multiple ranks: `accelerate launch -m learner train run.toml`. All commands take --quiet and --json-logs.
"""

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from protocol import console
from protocol.errors import ConfigError, ParityError, SlipstreamError
from protocol.installation import install_command, version_line

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

USAGE = """usage: learner new DIR                                                    a task of your own to begin with
       learner check run.toml [--trial] [--json] [--key value ...]      prompts, rewards and what the run would do; then the doctor;
                                                                        --trial: its first steps, and how long all would take
       learner train run.toml [--resume] [--dry-run] [--key value ...]   train; --help lists the keys
       learner evaluate run.toml [--json] [--key value ...]             how good a server's policy is, with intervals
       learner doctor run.toml [--json] [--key value ...]               what would keep the run from beginning, and remedies
       learner self-test run.toml [--json] [--key value ...]            the noise between the server and this learner
       learner report RUN_DIR [--json]                                  the report of a run
       learner report RUN_DIR RUN_DIR ... [--json]                      several runs side by side, and in what their configs differ
       learner runs [DIR] [--json]                                      the runs in a directory ("runs"): state, step, reward
       learner --version
with any of them: --quiet (only warnings and errors), --json-logs (one JSON object a line)"""


def main() -> None:
    """Run one command; a user error exits with code 2 and without a traceback."""
    words = console.take_switches(sys.argv[1:])
    console.start_logging("%(asctime)s %(levelname)s %(message)s")
    for library in ("httpx", "accelerate", "datasets"):  # they log a line for every file
        logging.getLogger(library).setLevel(logging.ERROR)
    try:
        match words:
            case ["train", *arguments]:
                train_command(arguments)
            case ["doctor", *arguments]:
                sys.exit(doctor_command(arguments))
            case ["check", *arguments]:
                sys.exit(check_command(arguments))
            case ["evaluate", *arguments]:
                evaluate_command(arguments)
            case ["self-test", *arguments]:
                self_test_command(arguments)
            case ["report", run_dir, *flags] if set(flags) <= {"--json"} and not run_dir.startswith("-"):
                report_command(Path(run_dir), as_json="--json" in flags)
            case ["report", *words] if len([w for w in words if not w.startswith("-")]) > 1:
                compare_command(words)
            case ["runs", *flags] if set(flags) <= {"--json"}:
                runs_command(Path("runs"), as_json="--json" in flags)
            case ["runs", directory, *flags] if set(flags) <= {"--json"} and not directory.startswith("-"):
                runs_command(Path(directory), as_json="--json" in flags)
            case ["new", directory] if not directory.startswith("-"):
                new_command(Path(directory))
            case ["--version"]:
                print(version_line("learner"))
            case ["-h" | "--help"] | [] | ["report" | "runs" | "new", "-h" | "--help"]:
                print(USAGE)
            case arguments:
                raise ConfigError(f"unknown command {' '.join(arguments)!r}\n{USAGE}")
    except SlipstreamError as error:
        console.say_error(error)
        sys.exit(2)
    except ModuleNotFoundError as error:
        console.say_error(f"{error.name} is not installed; install it with: {install_command('learner')}")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.stdout.flush()
        # A normal exit would wait for the threads that write a pending checkpoint.
        os._exit(130)


def new_command(directory: Path) -> None:
    from learner.starter.starter import write_starter

    print(write_starter(directory))


def train_command(arguments: list[str]) -> None:
    from learner.config import LearnerRun
    from protocol.config import load_config, to_toml, until_its_reader_leaves

    switches = {"--resume", "--dry-run"} & set(arguments)
    arguments = [argument for argument in arguments if argument not in switches]
    run = load_config(LearnerRun, arguments, "learner train", switches=f"[--resume] [--dry-run] {console.IN_USAGE}")
    if "--dry-run" in switches:
        with until_its_reader_leaves():
            print(to_toml(run))
        if note := run.note_on_idle_keys():
            log.warning(note)
        return
    _prepare_to_compute(run)
    from learner.train import train

    run_dir = train(run, resume="--resume" in switches)
    if run_dir is None:
        return
    try:
        tell_end(run_dir)
    except SlipstreamError as error:  # the run itself has succeeded
        log.warning("the report of the run could not be written: %s", error)


def doctor_command(arguments: list[str]) -> int:
    """Return the exit status: 1 if there is any problem."""
    run, as_json = _run_to_look_at(
        arguments, "learner doctor", "Look for what would keep a run from beginning, and say what to do about it."
    )
    from learner.doctor.doctor import examine
    from protocol.doctor import tell

    return tell(examine(run.in_effect()), as_json=as_json)


def check_command(arguments: list[str]) -> int:
    """Return the exit status: 1 if there is any problem."""
    rest = [argument for argument in arguments if argument != "--trial"]
    run, as_json = _run_to_look_at(
        rest, "learner check", "Show the first prompts as the model gets them and what the rewards say; then do as the doctor does.",
        switches="[--trial] ",
    )  # fmt: skip
    _prepare_to_compute(run)
    from learner.doctor.check import check
    from protocol.doctor import tell

    return tell(check(run, with_trial=rest != arguments), as_json=as_json)


def evaluate_command(arguments: list[str]) -> None:
    run, as_json = _run_to_look_at(
        arguments, "learner evaluate", "Ask a server the prompts of [learner.evaluation], rate its answers, and print means with intervals."
    )  # fmt: skip
    import msgspec

    from learner.evaluation.evaluate import evaluate
    from learner.evaluation.results import as_text

    for made in evaluate(run.in_effect()):
        print(msgspec.json.encode(made).decode() if as_json else as_text(made))


def _run_to_look_at(arguments: list[str], program: str, purpose: str, switches: str = "") -> "tuple[LearnerRun, bool]":
    """Return the run, and whether to answer in JSON."""
    from learner.config import LearnerRun
    from protocol.config import load_config

    rest = [argument for argument in arguments if argument != "--json"]
    return load_config(LearnerRun, rest, program, f"{switches}[--json]", purpose), rest != arguments


def _prepare_to_compute(run: "LearnerRun") -> None:
    """Bind cores and set variables; call this before torch is imported.

    OpenMP reads its thread count only once.
    """
    from protocol.cores import bind_cores, share_of_cores

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
    run, as_json = _run_to_look_at(
        arguments, "learner self-test", "Measure the noise between a running server and this learner, with nothing learned."
    )  # fmt: skip
    _prepare_to_compute(run)
    import msgspec

    from learner.doctor.noise import as_text, problems
    from learner.doctor.self_test import self_test

    measured = self_test(run)
    found = problems(measured)
    print(msgspec.json.encode({"measured": measured, "problems": found}).decode() if as_json else as_text(measured))
    if found:
        raise ParityError("\n       ".join(found))
    if not as_json:
        print("server and learner agree, and nothing in this run acts on the noise that is left")


def report_command(run_dir: Path, *, as_json: bool) -> None:
    import msgspec

    from learner.report.page import write_report
    from learner.report.summary import as_text, summarize

    summary = summarize(run_dir)
    if as_json:
        print(msgspec.json.encode(summary).decode())
    else:
        print(f"\n{as_text(summary)}\n\nreport: {write_report(run_dir)}")


def tell_end(run_dir: Path) -> None:
    """Print the report of a finished run in the console's format."""
    from learner.report.page import write_report
    from learner.report.summary import as_text, summarize

    if console.manner().has_bars:
        report_command(run_dir, as_json=False)
    else:
        console.say(f"{as_text(summarize(run_dir))}\n\nreport: {write_report(run_dir)}")


def compare_command(words: list[str]) -> None:
    import msgspec

    from learner.report.comparison import as_text, compare, write_comparison

    flags = [word for word in words if word.startswith("-")]
    if set(flags) - {"--json"}:
        raise ConfigError(f"unknown flag {flags[0]!r} of learner report; expected --json or none\n{USAGE}")
    comparison, metrics = compare([Path(word) for word in words if not word.startswith("-")])
    if flags:
        print(msgspec.json.encode(comparison).decode())
    else:
        print(f"{as_text(comparison)}\n\ncomparison: {write_comparison(comparison, metrics)}")


def runs_command(directory: Path, *, as_json: bool) -> None:
    import msgspec

    from learner.report.runs import as_table, list_runs
    from protocol.config import until_its_reader_leaves

    runs = list_runs(directory)
    with until_its_reader_leaves():
        print(msgspec.json.encode(runs).decode() if as_json else as_table(runs))


if __name__ == "__main__":
    main()
