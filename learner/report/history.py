"""The metrics of a run as the live dashboard keeps them: encoded, and thinned to a maximum size.

    metrics.jsonl ─▶ read_history, in a thread ─▶ History ◀─ add: each new step
                                                     ├▶ event ─▶ the tiles
                                                     └▶ LiveCharts, in a thread ─▶ JSON for charts.js

Invariant: the size does not grow with the run, and only the kept steps of a long file are decoded.
"""

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from learner.report.charts import Chart, evaluations_of_metrics, run_charts
from learner.report.summary import RunDirectoryError
from learner.report.templates import json_of
from protocol.former_keys import current_metrics

MAX_POINTS = 500
NUM_NEWEST = 10
"""Number of the newest steps that are always kept: dashboard.js averages them in the tiles."""
LOOK_UP_EVERY = 1000
"""Number of lines between two checks whether to give up."""
CHARTS_EVERY_S = 2.0
GOLDEN = 0x9E3779B1
"""2^32 ÷ the golden ratio."""
STEP = re.compile(rb'\{"step": (\d+)[,}]')

StepMetrics = Mapping[str, float]


def is_kept(step: int, stride: int) -> bool:
    """Return whether a step is among the share of 1/stride that the page gets.

    These steps are spread evenly, but at no fixed distance: it could be in phase with something that the run does
    at every n-th step, such as a checkpoint. Multiplicative hashing by the golden ratio (Knuth, TAOCP 3, 6.4) does
    this. If the stride doubles, steps are only removed.
    """
    return ((step - 1) * GOLDEN & 0xFFFFFFFF) * stride < 1 << 32


class History:
    """The NUM_NEWEST newest steps and up to MAX_POINTS steps of a run, spread evenly, encoded once.

    A step that is not newer than the newest one replaces all steps from it on: the run was resumed before it.
    """

    def __init__(self, stride: int = 1) -> None:
        self.newest_step = 0
        self.newest: StepMetrics = {}
        self._stride = stride
        self._point_of: dict[int, bytes] = {}
        self._newest_points: dict[int, bytes] = {}

    def add(self, step: int, metrics: StepMetrics) -> bytes:
        """Add a step and return its encoding for the page."""
        if step <= self.newest_step:
            self._point_of = {kept: point for kept, point in self._point_of.items() if kept < step}
            self._newest_points = {kept: point for kept, point in self._newest_points.items() if kept < step}
        self.newest_step, self.newest = step, metrics
        point = self._newest_points[step] = encoded(step, metrics)
        if len(self._newest_points) > NUM_NEWEST:
            del self._newest_points[min(self._newest_points)]
        if is_kept(step, self._stride):
            self._point_of[step] = point
        while len(self._point_of) >= MAX_POINTS:
            self._stride *= 2
            self._point_of = {kept: p for kept, p in self._point_of.items() if is_kept(kept, self._stride)}
        return point

    def points(self) -> bytes:
        """Return the newest step and those spread evenly, as a JSON array."""
        newest = {step: point for step, point in self._newest_points.items() if step == self.newest_step}
        return _array(self._point_of | newest)

    def event(self) -> bytes:
        """Return all steps as an event for the page."""
        return b"event: history\ndata: " + _array(self._point_of | self._newest_points) + b"\n\n"


def _array(point_of: dict[int, bytes]) -> bytes:
    return b"[" + b",".join(point_of[step] for step in sorted(point_of)) + b"]"


class LiveCharts:
    """The charts of the history as JSON.

    They are made for all clients together, only after a new step and at most once per CHARTS_EVERY_S.
    """

    def __init__(self, history: Callable[[], History]) -> None:
        self._history, self._lock = history, asyncio.Lock()
        self._points, self._charts, self._made_at = b"", b"", -CHARTS_EVERY_S

    async def newest(self) -> bytes:
        async with self._lock:
            if self._history().points() != self._points:
                await asyncio.sleep(self._made_at + CHARTS_EVERY_S - time.monotonic())
                points = self._history().points()
                charts = await asyncio.to_thread(encoded_charts, points)
                self._points, self._charts, self._made_at = points, charts, time.monotonic()
            return self._charts


def encoded_charts(points: bytes) -> bytes:
    metrics = msgspec.json.decode(points)
    charts = run_charts(metrics, evaluations_of_metrics(metrics)) if metrics else []
    return json_of([chart for chart in charts if isinstance(chart, Chart)]).encode()


def encoded(step: int, metrics: StepMetrics) -> bytes:
    """Encode a step as JSON with six digits, and null for NaN or inf."""
    digits = {
        # All digits of whole numbers: some are steps of evaluations.
        name: float(value) if float(value).is_integer() else float(f"{value:.6g}")
        for name, value in metrics.items()
        if isinstance(value, int | float) and name != "time"  # a Unix timestamp needs more digits
    }
    return msgspec.json.encode({**digits, "step": step})


def read_history(path: Path, give_up: Callable[[], bool]) -> History:
    """Read the steps recorded so far.

    Raises:
        RunDirectoryError: A line is not a step.
        OSError: The file cannot be read.
        TimeoutError: If `give_up` returns true.
    """
    if not path.is_file():
        return History()
    with path.open("rb") as file:
        offset_of = _offsets(file, path, give_up)
        stride = 1
        while sum(is_kept(step, stride) for step in offset_of) >= MAX_POINTS:
            stride *= 2
        history, newest = History(stride), set(sorted(offset_of)[-NUM_NEWEST:])
        for step, offset in offset_of.items():
            if step in newest or is_kept(step, stride):
                file.seek(offset)
                history.add(step, current_metrics(json.loads(file.readline())))
    return history


def _offsets(file: BinaryIO, path: Path, give_up: Callable[[], bool]) -> dict[int, int]:
    """Map each step to the offset of its line, in order.

    Steps that a resume undid and a torn last line are left out.
    """
    offset_of: dict[int, int] = {}
    newest, offset = -1, 0
    for number, line in enumerate(file, start=1):
        if number % LOOK_UP_EVERY == 0 and give_up():
            raise TimeoutError(f"{path} was not read to its end in time; it is long, or its disk slow")
        if line.endswith(b"\n"):
            step = _step_of(line, path, number)
            if step <= newest:
                offset_of = {kept: at for kept, at in offset_of.items() if kept < step}
            offset_of[step], newest = offset, step
        offset += len(line)
    return offset_of


def _step_of(line: bytes, path: Path, number: int) -> int:
    found = STEP.match(line)
    if found is None:
        raise RunDirectoryError(
            f"{path}, line {number}: expected a step, found {line[:60]!r}; remove or repair that line"
        )
    return int(found[1])
