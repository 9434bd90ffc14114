"""Durations of tests, files and fixtures: recorded by a run, written to durations.md.

    make test ARGS="--record /tmp/test.jsonl"
    make test-system ARGS="--record /tmp/system.jsonl"
    .venv/bin/python -m tests.durations /tmp/test.jsonl /tmp/system.jsonl

The last command rewrites the tables. The columns about what a test proves are written by hand and stay with their test.
A run reads the table of files to start with the longest.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest

TABLES = Path(__file__).with_name("durations.md")
NUM_TESTS, NUM_FILES, NUM_FIXTURES = 50, 20, 10
MIN_FIXTURE_S = 0.1
INTRODUCTION = """# Durations of tests

Seconds of a run with four workers on two idle cores. `python -m tests.durations` renews the
numbers; the last two columns of the first table are written by hand.
"""
UNKNOWN = ("", "")


class Phase(msgspec.Struct, frozen=True):
    """Setup, call or teardown of a test."""

    test: str
    tier: str
    duration_s: float
    cpu_s: float
    """CPU time since the setup started, of pytest's worker and the processes it waited for."""
    fixtures: list[tuple[str, float]] = []
    """Name and seconds of each fixture that this test was the first to use. Recorded with the teardown."""


class Recorder:
    """Appends a line to a file for each phase of each test."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        phase = Phase(
            test=report.nodeid,
            tier="system" if "system" in report.keywords else "test",
            duration_s=report.duration,
            cpu_s=report.cpu_s,  # type: ignore[attr-defined]  # from tiers.py
            fixtures=[value for key, value in report.user_properties if key == "fixture" and report.when == "teardown"],
            # type: ignore[misc]
        )
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(phase) + b"\n")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record", type=Path, help="append the duration of each test to this file, for `python -m tests.durations`"
    )


def pytest_configure(config: pytest.Config) -> None:
    if (path := config.getoption("--record")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(path))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start with the longest files: a worker that ends with one leaves the other cores idle."""
    duration_s = file_durations()
    items.sort(key=lambda item: -duration_s.get(item.nodeid.partition("::")[0], 0))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    started = time.monotonic()
    result = yield
    if (duration_s := time.monotonic() - started) > MIN_FIXTURE_S:
        name = f"{fixturedef.baseid}::{fixturedef.argname}"
        request._pyfuncitem.user_properties.append(("fixture", (name, duration_s)))
    return result


def file_durations() -> dict[str, float]:
    """Return the seconds of the longest files from the table."""
    rows = (line.split("|") for line in TABLES.read_text().splitlines() if line.startswith("|"))
    return {row[3].strip(" `"): float(row[1]) for row in rows if len(row) == 5 and row[3].endswith(".py` ")}


def written_by_hand() -> dict[str, tuple[str, str]]:
    """Return the last two columns of the table of tests, by test without parameters."""
    rows = (line.split(" | ") for line in TABLES.read_text().splitlines() if "::" in line)
    return {row[3].strip("`").partition("[")[0]: (row[4], row[5].removesuffix(" |")) for row in rows if len(row) == 6}


def table(head: str, rows: Iterable[tuple[object, ...]]) -> str:
    rule = "|".join("---" for _ in head.split(" | "))
    return "\n".join([f"| {head} |", f"|{rule}|", *(f"| {' | '.join(map(str, row))} |" for row in rows)]) + "\n"


def table_of_tests(phases: list[Phase]) -> str:
    duration_s: defaultdict[str, float] = defaultdict(float)
    for phase in phases:
        duration_s[phase.test] += phase.duration_s
    last = {phase.test: phase for phase in phases}
    by_hand = written_by_hand()
    rows = [
        (
            f"{duration_s[test]:.1f}",
            f"{last[test].cpu_s:.1f}",
            last[test].tier,
            f"`{test}`",
            *by_hand.get(test.partition("[")[0], UNKNOWN),
        )
        for test in sorted(duration_s, key=lambda test: -duration_s[test])[:NUM_TESTS]
    ]
    return table("s | CPU s | Tier | Test | Proves | Proved elsewhere by", rows)


def table_of_files(phases: list[Phase]) -> str:
    duration_s: defaultdict[str, float] = defaultdict(float)
    tests: defaultdict[str, set[str]] = defaultdict(set)
    for phase in phases:
        file = phase.test.partition("::")[0]
        duration_s[file] += phase.duration_s
        tests[file].add(phase.test)
    longest = sorted(duration_s, key=lambda file: -duration_s[file])[:NUM_FILES]
    return table("s | Tests | File", [(f"{duration_s[file]:.0f}", len(tests[file]), f"`{file}`") for file in longest])


def table_of_fixtures(phases: list[Phase]) -> str:
    slowest = sorted(((duration_s, name) for phase in phases for name, duration_s in phase.fixtures), reverse=True)
    return table("s | Fixture", [(f"{duration_s:.1f}", f"`{name}`") for duration_s, name in slowest[:NUM_FIXTURES]])


def tables_of(phases: list[Phase]) -> str:
    tests = f"## The slowest {NUM_TESTS} tests\n\n{table_of_tests(phases)}"
    files = f"## The longest {NUM_FILES} files\n\n{table_of_files(phases)}"
    fixtures = f"## The slowest {NUM_FIXTURES} fixtures\n\n{table_of_fixtures(phases)}"
    return "\n".join([INTRODUCTION, tests, files, fixtures])


if __name__ == "__main__":
    lines = [line for path in sys.argv[1:] for line in Path(path).read_bytes().splitlines()]
    TABLES.write_text(tables_of([msgspec.json.decode(line, type=Phase) for line in lines]))
