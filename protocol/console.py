"""Console of all commands: output and its switches, arguments, and the end with a user error.

    log records, final error ─▶ stderr        other lines, such as the summary of a step ─▶ stdout

The output is text, or with --json-logs a JSON object per line. With --quiet, it has only warnings and errors.
Invariant: with --json-logs, every line that a run writes is JSON. Only terminals get colors.
"""

import argparse
import difflib
import io
import json
import logging
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NoReturn, TextIO

import msgspec

from protocol.errors import USER_ERROR, ConfigError, SlipstreamError
from protocol.installation import install_command

log = logging.getLogger(__name__)
FORMAT = "%(asctime)s %(levelname)s %(message)s"
"""Format of a log record for people."""
QUIET, JSON_LOGS = "--quiet", "--json-logs"
SWITCHES = {QUIET: "print only warnings and errors", JSON_LOGS: "print one JSON object per line"}
SWITCHES_HELP = "All commands take " + " and ".join(f"{name} ({what})" for name, what in SWITCHES.items()) + "."
COLORS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m", logging.CRITICAL: "\033[31m"}
RESET_COLOR = "\033[0m"
PROGRESS_EVERY_S = 1.0 if sys.stderr.isatty() else 10.0
"""Seconds between two updates of a progress bar. In a file, each update is a line."""


class OutputMode(msgspec.Struct, frozen=True):
    """Output mode of this process."""

    is_quiet: bool = False
    is_json: bool = False

    @property
    def has_bars(self) -> bool:
        """True if progress bars are shown. They are neither warnings nor JSON."""
        return not (self.is_quiet or self.is_json)


_output_mode = OutputMode()


def output_mode() -> OutputMode:
    return _output_mode


def counted(count: int, noun: str) -> str:
    """Return a count with its noun. Example: counted(1, "group") == "1 group", counted(0, "group") == "0 groups"."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def pop_switches(arguments: Sequence[str]) -> list[str]:
    """Set the output mode from the switches, and return the other arguments."""
    global _output_mode
    _output_mode = OutputMode(is_quiet=QUIET in arguments, is_json=JSON_LOGS in arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # stderr's default: some locales do not have "Δ"
    return [argument for argument in arguments if argument not in SWITCHES]


def start_logging(format_for_people: str = FORMAT, level: int = logging.INFO) -> None:
    """Configure logging for the whole process.

    `level` is the level of the root logger. With --quiet, everything below warnings is dropped regardless.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonFormatter() if _output_mode.is_json else HumanFormatter(format_for_people, supports_color(sys.stderr))
    )
    if _output_mode.is_quiet:
        handler.setLevel(logging.WARNING)
    logging.basicConfig(level=level, handlers=[handler])


def supports_color(stream: TextIO) -> bool:
    """Return whether to write colors to a stream.

    It must be a terminal that supports colors, and NO_COLOR must be unset (https://no-color.org).
    """
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say(line: str, fields: Mapping[str, float] | None = None) -> None:
    """Print a line outside the log, such as the summary of a step.

    `fields` holds its numbers, which only the JSON includes. If the reader of the output has left, as in
    `slipstream train run.toml | head`, the run goes on without it.
    """
    if not _output_mode.is_quiet:
        _write(_object("INFO", line, time.time(), fields or {}) if _output_mode.is_json else line)


def relay(process: str, line: str) -> None:
    """Print a line of another process of this run, with that process's name. Its output has the same mode."""
    if not _output_mode.is_json:
        _write(f"{process:>8} | {line}")
        return
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if isinstance(fields, dict):
        _write(json.dumps({"process": process} | fields, ensure_ascii=False))
    else:  # printed by a library
        _write(_object("INFO", line, time.time(), {"process": process}))


def _write(line: str) -> None:
    """Write a line to stdout, or continue without stdout if its reader, terminal or disk space is gone."""
    try:
        print(f"{line}\n", end="", flush=True)
    except OSError as error:
        _discard_output()
        log.warning("the output cannot be written (%s); continuing without it (the run directory has all steps)", error)


def print_error(error: object) -> None:
    """Print the final error of a program, which its user has to resolve."""
    print(_object("ERROR", str(error), time.time(), {}) if _output_mode.is_json else f"error: {error}", file=sys.stderr)


@contextmanager
def exit_on_user_error(extra: Callable[[], str] = lambda: "learner") -> Iterator[None]:
    """Print an error that the user can resolve without a traceback, and exit with its code.

    Exit with code 0 if the reader of the output has left, as in `slipstream doctor run.toml | head`. `extra`
    returns the name of the extra that has the packages of the command.
    """
    try:
        yield
    except BrokenPipeError:
        if not _has_reader_left():
            raise
        sys.exit(0)
    except SlipstreamError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        print_error(f"{error.name} is not installed; install it with: {install_command(extra())}")
        sys.exit(USER_ERROR)
    finally:
        _flush_output()


def _has_reader_left() -> bool:
    """Return whether the output is a pipe that nobody reads, since a run has other pipes that may break."""
    if sys.stdout is None:  # closed from the start, as by `>&-`
        return False
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _flush_output() -> None:
    """Write what is left of the output, unless its reader has left; a flush at exit would print that error.

    The exit code stays, and so does an error that ends the program.
    """
    try:
        print(end="", flush=True)  # unlike `sys.stdout.flush`, this allows a closed output
    except BrokenPipeError:
        _discard_output()


def _discard_output() -> None:
    """Redirect the output to nowhere, because the text that is left would fail again at the next flush."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def unknown_command(name: str, known: Iterable[str]) -> ConfigError:
    """Return the error for a command that does not exist."""
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]}?" if near else "see `slipstream --help`"
    return ConfigError(f"unknown command {name!r}; expected one of {', '.join(names)}; {hint}")


class ArgumentParser(argparse.ArgumentParser):
    """Parser of the arguments of a command, whose errors are those of its user."""

    def __init__(self, prog: str, description: str | None) -> None:
        super().__init__(
            prog, description=description, epilog=SWITCHES_HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        )  # fmt: skip

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see {self.prog} --help")


class HumanFormatter(logging.Formatter):
    """Formatter of lines with a time, and optional color for warnings and errors."""

    def __init__(self, form: str, has_color: bool) -> None:
        super().__init__(form, datefmt="%H:%M:%S")
        self._has_color = has_color

    def format(self, record: logging.LogRecord) -> str:
        line, color = super().format(record), COLORS.get(record.levelno)
        return f"{color}{line}{RESET_COLOR}" if color and self._has_color else line


class JsonFormatter(logging.Formatter):
    """Formatter of JSON objects with time, level, logger and message.

    The message includes the traceback, if there is one.
    """

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        return _object(record.levelname, message, record.created, {"logger": record.name})


def _object(level: str, message: str, seconds: float, fields: Mapping[str, object]) -> str:
    """Return one line of JSON, with null for NaN or inf."""
    whole = {"time": seconds, "level": level, "message": message} | dict(fields)
    return json.dumps(json.loads(json.dumps(whole), parse_constant=lambda _: None), ensure_ascii=False)
