"""Fixtures of the learner's tests."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from accelerate import Accelerator


@pytest.fixture
def accelerator() -> "Iterator[Accelerator]":
    """On the CPU, without what the accelerator of another test has left in the process."""
    # Here, because most tests beside it do not need the seconds that the import takes.
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield Accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)
