"""The limit of open files: raised for many processes, and an error with the key if it cannot be."""

import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from learner.sandbox.open_files import NUM_OTHER_FILES, reserve_open_files
from learner.sandbox.start import ScriptChild
from protocol.errors import ConfigError

Limits = tuple[int, int]


@pytest.fixture
def allow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], list[Limits]]]:
    """Replace the limits of this process, whose hard limit could not be restored. Return the limits, set last."""
    limits: list[Limits] = []

    def replace(soft: int, hard: int) -> list[Limits]:
        limits[:] = [(soft, hard)]
        monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
        monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
        return limits

    yield replace


@pytest.mark.parametrize(
    ("soft", "hard", "max_concurrent", "expected"),
    [
        (1024, 524288, 500, 65536),
        (1024, 4096, 500, 4096),
        (1024, resource.RLIM_INFINITY, 500, 65536),
        (1024, resource.RLIM_INFINITY, 40000, 120000 + NUM_OTHER_FILES),
        (100000, 524288, 500, 100000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 500, resource.RLIM_INFINITY),
    ],
)
def test_the_soft_limit_is_raised_as_far_as_needed_and_allowed(
    allow: Callable[[int, int], list[Limits]], soft: int, hard: int, max_concurrent: int, expected: int
) -> None:
    limits = allow(soft, hard)
    reserve_open_files(max_concurrent, 3, "agents")
    assert limits[-1] == (expected, hard)


def test_more_processes_than_the_hard_limit_allows_are_refused_with_the_key(
    allow: Callable[[int, int], list[Limits]],
) -> None:
    allow(1024, 1024)
    reserve_open_files(320, 3, "agents (max_concurrent)")
    expected = r"321 agents \(max_concurrent\) need at least 1027 .* allows 1024; .* 320 or less"
    with pytest.raises(ConfigError, match=expected):
        reserve_open_files(321, 3, "agents (max_concurrent)")


def test_a_lack_of_open_files_is_not_blamed_on_the_interpreter() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            ScriptChild("python", Path("script.py"), [], [])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
