"""The answers so far of an evaluation beside a run, on disk, so that a learner that is killed asks for each prompt once.

    alongside.py ─▶ begin, answer by answer ─▶ RUN_DIR/evaluation.partial.jsonl ─▶ read again by a resume ─▶ forgotten when it is noted

Invariant: the file holds whole answers to one set of questions, asked after one step; a last line that was cut off is none.
"""

from pathlib import Path
from typing import Any

import msgspec

from learner.evaluation.asking import Answered
from learner.storage.disk import writing
from learner.storage.lines import Lines, whole_lines

FILE = "evaluation.partial.jsonl"


class Begun(msgspec.Struct, frozen=True):
    """The first line."""

    step: int
    asked: str
    """The digest of the questions."""


class Line(msgspec.Struct, frozen=True):
    """Any other."""

    place: int
    answered: Answered


class UnderWay:
    """Of the one evaluation of a run that is being asked."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self._lines: Lines | None = None

    def begin(self, begun: Begun) -> None:
        """Raises DiskError."""
        self.forget()
        self._append(begun)

    def add(self, place: int, answered: Answered) -> None:
        """Raises DiskError."""
        self._append(Line(place, answered))

    def left(self) -> tuple[Begun, dict[int, Answered]] | None:
        """What an earlier learner left, and its answers by place; None where there is nothing, or nothing that can be read."""
        if not self._path.is_file():
            return None
        try:
            first, *lines = self._path.read_bytes()[: whole_lines(self._path)].splitlines()
            begun = msgspec.json.decode(first, type=Begun)
            found = [msgspec.json.decode(line, type=Line) for line in lines]
        except (ValueError, msgspec.DecodeError):  # written by another version of Slipstream, or without a whole line
            return None
        return begun, {line.place: line.answered for line in found}

    def forget(self) -> None:
        """Raises DiskError."""
        self.close()
        with writing(self._path):
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None

    def _append(self, record: msgspec.Struct) -> None:
        if self._lines is None:
            self._lines = Lines(self._path)
        line: dict[str, Any] = msgspec.to_builtins(record)
        self._lines.append(line)
