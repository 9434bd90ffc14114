"""What both programs say on their consoles: lines for people, or with --json-logs one JSON object each; with --quiet warnings and errors.

    log records, `say`, `say_error` ─▶ the switches of the command line ─▶ stderr (what happens) and stdout (what was asked for)

Invariant: with --json-logs every line that a run writes is JSON; colours are for terminals alone.
"""

import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TextIO

import msgspec

QUIET, JSON_LOGS = "--quiet", "--json-logs"
SWITCHES = (QUIET, JSON_LOGS)
IN_USAGE = " ".join(f"[{switch}]" for switch in SWITCHES)
COLOURS = {logging.WARNING: "\033[33m", logging.ERROR: "\033[31m", logging.CRITICAL: "\033[31m"}
NO_COLOUR = "\033[0m"
PROGRESS_EVERY_S = 1.0 if sys.stderr.isatty() else 10.0
"""Between two drawings of a progress bar, each of which is a line in a file."""


class Manner(msgspec.Struct, frozen=True):
    """How this process speaks."""

    is_quiet: bool = False
    is_json: bool = False

    @property
    def has_bars(self) -> bool:
        """Progress bars are neither warnings nor JSON."""
        return not (self.is_quiet or self.is_json)


_manner = Manner()


def manner() -> Manner:
    return _manner


def take_switches(arguments: Sequence[str]) -> list[str]:
    """Speak as they say from now on; return the arguments without them."""
    global _manner
    _manner = Manner(is_quiet=QUIET in arguments, is_json=JSON_LOGS in arguments)
    return [argument for argument in arguments if argument not in SWITCHES]


def start_logging(format_for_people: str, level: int = logging.INFO) -> None:
    """Of the whole process; `level` is that of the root, with --quiet at least that of warnings."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if _manner.is_json else ForPeople(format_for_people, in_colour(sys.stderr)))
    if _manner.is_quiet:
        handler.setLevel(logging.WARNING)
    logging.basicConfig(level=level, handlers=[handler])


def in_colour(stream: TextIO) -> bool:
    """Whether somebody looks who can see colours, and has not said that they want none (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say(line: str, fields: Mapping[str, float] | None = None) -> None:
    """What a run tells besides its log, such as a step; `fields`: its numbers, for machines."""
    if _manner.is_quiet:
        return
    told = _object("INFO", line, time.time(), fields or {}) if _manner.is_json else line
    sys.stdout.write(told + "\n")
    sys.stdout.flush()


def say_error(error: object) -> None:
    """The last words of a program whose user has to do something."""
    print(_object("ERROR", str(error), time.time(), {}) if _manner.is_json else f"error: {error}", file=sys.stderr)


class ForPeople(logging.Formatter):
    """A time and a line; warnings and errors may be coloured."""

    def __init__(self, form: str, has_colour: bool) -> None:
        super().__init__(form, datefmt="%H:%M:%S")
        self._has_colour = has_colour

    def format(self, record: logging.LogRecord) -> str:
        line, colour = super().format(record), COLOURS.get(record.levelno)
        return f"{colour}{line}{NO_COLOUR}" if colour and self._has_colour else line


class JsonLines(logging.Formatter):
    """An object with time, level, message, and the traceback if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        return _object(record.levelname, message, record.created, {"logger": record.name})


def _object(level: str, message: str, seconds: float, fields: Mapping[str, object]) -> str:
    """One line; a number that JSON has no word for, such as nan, is null."""
    whole = {"time": seconds, "level": level, "message": message} | dict(fields)
    return json.dumps(json.loads(json.dumps(whole), parse_constant=lambda _: None), ensure_ascii=False)
