"""What this machine computes with, told without torch: asked before it may be imported, for torch reads settings once.

    CUDA_VISIBLE_DEVICES, NVML (or device files without it), the installed torch ─▶ GpuChoice, with its reason

Both sides call the same functions, so on one machine they come to the same default of `dtype`.
"""

import ctypes
import importlib.util
import os
import re
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

Dtype = Literal["float32", "bfloat16"]
"""Of a computation, the finer one first."""

DEVICES = Path("/dev")
NVML = "libnvidia-ml.so.1"
"""Comes with the driver."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
CPU_INFO = Path("/proc/cpuinfo")
ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""What keeps oneDNN, whose kernels torch and vLLM call, from instructions that the processor has."""
BFLOAT16_UNITS = {"AMX": ("amx_bf16", ("AMX",)), "AVX-512 BF16": ("avx512_bf16", ("BF16", "FP16", "AVX10", "AMX"))}
"""What multiplies bfloat16 faster than float32: its flag, and words of the limits under which oneDNN uses it; the fastest first."""


class DtypeChoice(NamedTuple):
    """The default of `dtype` on a machine."""

    dtype: Dtype
    reason: str


class GpuChoice(NamedTuple):
    """Whether this process computes on a GPU."""

    has_gpu: bool
    reason: str
    """In one sentence, for the log and for whoever expected the other answer."""
    num_gpus: int = 0
    """That this process may use."""


def has_gpu() -> bool:
    """Return whether this process has an NVIDIA GPU to compute on."""
    return gpu_choice().has_gpu


def gpu_choice() -> GpuChoice:
    """Return whether there is a GPU, and how that is known."""
    visible = os.environ.get(VISIBLE)
    if visible is not None and visible.strip() in ("", "-1"):
        return GpuChoice(False, f"there is no GPU to use: {VISIBLE} = {visible!r} hides them all")
    num_gpus, source = _gpus_of_machine()
    if num_gpus == 0:
        return GpuChoice(False, f"there is no GPU: {source}")
    if visible is not None and (num_gpus := _num_visible(visible, num_gpus)) == 0:
        return GpuChoice(
            False, f"there is no GPU to use: {VISIBLE} = {visible!r} begins with none that is here, {source}"
        )
    if _has_torch_for_cpus():
        return GpuChoice(False, f"there is a GPU, but the installed torch is built for CPUs only ({source})")
    return GpuChoice(True, f"there is a GPU: {source}, {num_gpus} to use", num_gpus)


def _num_visible(visible: str, num_gpus: int) -> int:
    """Count what the variable lets through; as CUDA does, up to the first entry that names no GPU."""
    count = 0
    for entry in (entry.strip() for entry in visible.split(",")):
        is_number = entry.isascii() and entry.isdigit()
        if not (is_number and int(entry) < num_gpus) and not entry.startswith(("GPU-", "MIG-")):
            break
        count += 1
    return count


@cache
def _gpus_of_machine() -> tuple[int, str]:
    """Return how many there are, and who says so. In a container only those that it was given count."""
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:
        files = sorted(path.name for path in DEVICES.glob("nvidia[0-9]*"))
        if files:
            return len(files), f"{DEVICES}/{files[0]} is here, though no {NVML} to ask"
        return 0, f"the driver's {NVML} is not here, nor a {DEVICES}/nvidia*"
    if error := nvml.nvmlInit_v2():
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        return 0, f"NVML cannot start ({nvml.nvmlErrorString(error).decode()})"
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return 0, "NVML cannot count GPUs"
        return count.value, f"NVML finds {count.value}"
    finally:
        nvml.nvmlShutdown()


@cache
def _has_torch_for_cpus() -> bool:
    """Read from its files, since importing torch would fix its settings. Without torch nothing is known."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return False
    return re.search(r"^cuda\b.*= None$", text, re.MULTILINE) is not None


def dtype_here() -> Dtype:
    """Return the dtype in which this machine multiplies matrices fastest."""
    return dtype_choice().dtype


def dtype_choice() -> DtypeChoice:
    """Return that dtype and why it is the fastest one here.

    On one core bfloat16 products ran at 1,521 GFLOP/s with AMX, where float32 ones ran at 202. With AVX-512 BF16 (Zen 5) a pass and its
    gradient of a 135M model took 3.6 s of a core, in float32 6.9. With neither, bfloat16 is no faster, and server and learner differ a
    thousand times more.
    """
    gpu = gpu_choice()
    if gpu.has_gpu:
        return DtypeChoice("bfloat16", gpu.reason)
    if (unit := _bfloat16_unit()) is not None:
        reason = f"this CPU has {unit}, which multiplies bfloat16 faster than float32; {gpu.reason}"
        return DtypeChoice("bfloat16", reason)
    return DtypeChoice("float32", f"{gpu.reason}; and this CPU has neither {' nor '.join(BFLOAT16_UNITS)}")


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
