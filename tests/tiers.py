"""The tiers of tests, which are marks, and the CPU budget of the tests without a mark.

The budget is CPU time, which is nearly the same on a busy machine. It includes fixtures that the test is the first to
use, and child processes that it waited for.
"""

import re
import resource
from collections.abc import Generator
from pathlib import Path

import pytest

CPU_S = 20.0
"""Half of it is what vLLM takes to inspect a model class that it has not seen on this machine, in a child process."""
CLOCK_S = 180
OTHER_TIERS = ("system", "slow", "gpu")
ALL_OF_THE_SYSTEM = re.compile(r"^pytestmark = \[?pytest\.mark\.system\b", re.MULTILINE)
SPENT = pytest.StashKey[float]()


def has_budget(item: pytest.Item) -> bool:
    return not any(item.get_closest_marker(name) for name in OTHER_TIERS)


def cpu_s() -> float:
    """Return the CPU time of this process and of the children it has waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip files of other tiers in `make test` without importing them: vLLM alone takes each worker 10 s."""
    if "not system" not in config.getoption("markexpr") or not collection_path.match("test_*.py"):
        return None
    return bool(ALL_OF_THE_SYSTEM.search(collection_path.read_text())) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if has_budget(item) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(CLOCK_S))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[SPENT] = cpu_s()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    report.cpu_s = cpu_s() - item.stash[SPENT]  # type: ignore[attr-defined]  # since the test started
    if call.when == "call" and report.passed and has_budget(item) and report.cpu_s > CPU_S:
        report.outcome = "failed"
        limit = f"the limit of `make test` is {CPU_S:g} s"
        report.longrepr = f"it took {report.cpu_s:.1f} s of CPU; {limit}. Make it cheaper, or mark it `system`"
    return report
