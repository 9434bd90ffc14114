"""Fixtures of the learner's tests."""

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from accelerate import Accelerator


@pytest.fixture(autouse=True)
def same_path_of_modules() -> Iterator[None]:
    """Restore sys.path: an imported user file adds its directory, where later tests would find its modules."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture
def accelerator() -> "Iterator[Accelerator]":
    """Return an accelerator on the CPU, without state of the accelerators of other tests."""
    # Imported here, because most tests do not need it and the import takes seconds.
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
