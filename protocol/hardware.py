"""What this machine computes with, told from files alone: asked before torch may be imported, for torch reads settings once.

Both sides call the same functions, so on one machine they come to the same default of `dtype`.
"""

import os
from pathlib import Path
from typing import Literal, NamedTuple

Dtype = Literal["float32", "bfloat16"]
"""Of a computation, the finer one first."""

GPU = Path("/dev/nvidia0")
CPU_INFO = Path("/proc/cpuinfo")
ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""What keeps oneDNN, whose kernels torch and vLLM call, from instructions that the processor has."""


class DtypeChoice(NamedTuple):
    """The default of `dtype` on a machine."""

    dtype: Dtype
    reason: str


def has_gpu() -> bool:
    """Return whether this machine has a GPU."""
    return GPU.exists()


def dtype_here() -> Dtype:
    """Return the dtype in which this machine multiplies matrices fastest."""
    return dtype_choice().dtype


def dtype_choice() -> DtypeChoice:
    """Return that dtype and why it is the fastest one here.

    On one core with AMX, bfloat16 products ran at 1,521 GFLOP/s and float32 ones at 202; without AMX bfloat16 is no faster and
    server and learner differ a thousand times more.
    """
    if has_gpu():
        return DtypeChoice("bfloat16", "there is a GPU")
    if has_amx():
        return DtypeChoice("bfloat16", "this CPU has AMX, which multiplies bfloat16 several times as fast as float32")
    return DtypeChoice("float32", "there is no GPU, and this CPU has no AMX that would make bfloat16 faster")


def has_amx() -> bool:
    """Return whether the processor multiplies bfloat16 in tiles (AMX) and oneDNN may use them."""
    limit = next((limit for name in ONEDNN_LIMITS if (limit := os.environ.get(name))), "ALL").upper()
    return "amx_bf16" in _cpu_flags() and (limit in ("ALL", "DEFAULT") or "AMX" in limit)


def _cpu_flags() -> set[str]:
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())
