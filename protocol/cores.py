"""Binding of a process to cores, before torch or vLLM is imported.

Two processes whose OpenMP threads spin on the same cores slow each other down tenfold, so each gets cores of its own.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger(__name__)


def bind_cores(positions: tuple[int, ...] | None) -> None:
    """Run on these positions in the list of cores this process may use, with as many OpenMP threads; None: change nothing.

    Positions beyond the last core wrap around, so that a recipe for two cores also runs on one.
    """
    if positions is None:
        return
    allowed = sorted(os.sched_getaffinity(0))
    cores = {allowed[position % len(allowed)] for position in positions}
    if max(positions) >= len(allowed):
        log.warning("cpu_cores = %s, but only %d cores may be used; sharing core(s) %s", positions, len(allowed), cores)
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))


@contextmanager
def bound_to_cores(positions: tuple[int, ...] | None) -> Iterator[None]:
    """Bind this thread meanwhile, and for good the processes and threads that it starts."""
    before = os.sched_getaffinity(0)
    bind_cores(positions)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
