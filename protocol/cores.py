"""Binding of a process to cores, before torch or vLLM is imported.

Two processes whose OpenMP threads spin on the same cores slow each other down tenfold. Each process therefore
gets its own cores.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import msgspec

from protocol.endpoint import is_loopback, split_endpoint
from protocol.hardware import has_gpu

log = logging.getLogger(__name__)

Side = Literal["server", "learner"]
Cores = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(min_length=1)]
"""Positions in the list of cores that a process may use."""

OTHER: dict[Side, Side] = {"server": "learner", "learner": "server"}


def halves(num_cores: int) -> dict[Side, tuple[int, ...]]:
    """Return the positions of each side on a machine without a GPU."""
    half = num_cores // 2
    return {"server": tuple(range(half)), "learner": tuple(range(half, num_cores))}


def share_of_cores(
    side: Side,
    section_of_other: dict[str, Any],
    endpoints: Sequence[str],
    *,
    num_processes: int = 1,
    rank: int | None = None,
) -> tuple[int, ...] | None:
    """Return the cores of a side whose config names none, or None for all cores.

    On a machine without a GPU, a side gets its half, or the cores that the other side's section leaves. It
    gets None if its processes outnumber these cores. `rank` selects the part of one process. Without a
    loopback endpoint, the other side runs elsewhere, and the result is None. The choice is logged.
    """
    num_cores = len(os.sched_getaffinity(0))
    if has_gpu() or not any(is_loopback(split_endpoint(endpoint)[0]) for endpoint in endpoints):
        return None
    taken = section_of_other.get("cpu_cores") or []
    left = tuple(i for i in range(num_cores) if i not in {position % num_cores for position in taken})
    positions = left if taken and left else halves(num_cores)[side]
    if len(positions) < num_processes:
        return None
    if not rank:
        log.info(
            "using core(s) %s of %d, so that the %s has its own; %s.cpu_cores overrides this",
            ", ".join(map(str, positions)), num_cores, OTHER[side], side,
        )  # fmt: skip
    return positions if rank is None else positions[rank::num_processes]


def bind_cores(positions: tuple[int, ...] | None) -> None:
    """Bind this process to cores, with one OpenMP thread per core.

    The positions refer to the list of cores that this process may use. None: change nothing. Positions beyond
    the last core wrap around, so that a recipe for two cores also runs on one.
    """
    if positions is None:
        return
    allowed = sorted(os.sched_getaffinity(0))
    cores = {allowed[position % len(allowed)] for position in positions}
    if max(positions) >= len(allowed):
        log.warning(
            "cpu_cores = %s, but only %d cores are available; sharing core(s) %s", positions, len(allowed), cores
        )
    os.sched_setaffinity(0, cores)
    os.environ["OMP_NUM_THREADS"] = str(len(cores))


@contextmanager
def bound_to_cores(positions: tuple[int, ...] | None) -> Iterator[None]:
    """Bind this thread to cores within the block.

    Processes and threads that it starts there stay bound.
    """
    before = os.sched_getaffinity(0)
    bind_cores(positions)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
