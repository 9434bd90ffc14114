"""Fixtures of the learner's tests."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from accelerate import Accelerator


@pytest.fixture(autouse=True)
def same_path_of_modules() -> Iterator[None]:
    """A file that a test has the learner import adds its directory, where the next test would find its modules."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture
def accelerator() -> "Iterator[Accelerator]":
    """On the CPU, without what the accelerator of another test has left in the process."""
    # Here, because most tests beside it do not need the seconds that the import takes.
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
