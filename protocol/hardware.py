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
BFLOAT16_UNITS = {"AMX": ("amx_bf16", ("AMX",)), "AVX-512 BF16": ("avx512_bf16", ("BF16", "FP16", "AVX10", "AMX"))}
"""What multiplies bfloat16 faster than float32: its flag, and words of the limits under which oneDNN uses it; the fastest first."""


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

    On one core bfloat16 products ran at 1,521 GFLOP/s with AMX, where float32 ones ran at 202. With AVX-512 BF16 (Zen 5) a pass and its
    gradient of a 135M model took 3.6 s of a core, in float32 6.9. With neither, bfloat16 is no faster, and server and learner differ a
    thousand times more.
    """
    if has_gpu():
        return DtypeChoice("bfloat16", "there is a GPU")
    if (unit := _bfloat16_unit()) is not None:
        return DtypeChoice("bfloat16", f"this CPU has {unit}, which multiplies bfloat16 faster than float32")
    return DtypeChoice("float32", f"there is no GPU, and this CPU has neither {' nor '.join(BFLOAT16_UNITS)}")


def _bfloat16_unit() -> str | None:
    """Return what the processor multiplies bfloat16 with, if oneDNN may use it."""
    limit = next((limit for name in ONEDNN_LIMITS if (limit := os.environ.get(name))), "ALL").upper()
    flags = _cpu_flags()
    for unit, (flag, allowed) in BFLOAT16_UNITS.items():
        if flag in flags and any(word in limit for word in ("ALL", "DEFAULT", *allowed)):
            return unit
    return None


def _cpu_flags() -> set[str]:
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())
