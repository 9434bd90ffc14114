"""Detect GPUs and the fastest dtype, and bind to cores, before torch or vLLM is imported.

    CUDA_VISIBLE_DEVICES, NVML (or device files without it), installed torch ─▶ GpuChoice, with its reason

torch reads some settings only once, so these questions must be answered before its import. Both sides call
the same functions, so on one machine they have the same default of `dtype`.

Two processes whose OpenMP threads spin on the same cores slow each other down tenfold. Each process therefore
gets its own cores.
"""

import ctypes
import importlib.util
import logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from protocol.endpoint import is_loopback, split_endpoint

log = logging.getLogger(__name__)

Dtype = Literal["float32", "bfloat16"]
"""Dtypes of a computation, the finer one first."""
Side = Literal["server", "learner"]
OTHER: dict[Side, Side] = {"server": "learner", "learner": "server"}
Cores = Annotated[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(min_length=1)]
"""Positions in the list of cores that a process may use."""

DEVICES = Path("/dev")
NVML = "libnvidia-ml.so.1"
"""NVIDIA library that ships with the driver."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
CPU_INFO = Path("/proc/cpuinfo")
ONEDNN_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""Variables that keep oneDNN, whose kernels torch and vLLM call, from using instructions of the processor."""
BFLOAT16_UNITS = {"AMX": ("amx_bf16", ("AMX",)), "AVX-512 BF16": ("avx512_bf16", ("BF16", "FP16", "AVX10", "AMX"))}
"""Units that multiply bfloat16 faster than float32, the fastest first. Each has its CPU flag, and words of
the limits under which oneDNN uses it."""


class DtypeChoice(NamedTuple):
    """Default of `dtype` on a machine, with the reason."""

    dtype: Dtype
    reason: str


class GpuChoice(NamedTuple):
    """Decision whether this process computes on a GPU, with the reason."""

    has_gpu: bool
    reason: str
    """One sentence for the log, and for a user who expected the opposite."""
    num_gpus: int = 0
    """Number of GPUs that this process may use."""


def has_gpu() -> bool:
    """Return whether this process has an NVIDIA GPU to compute on."""
    return gpu_choice().has_gpu


def gpu_choice() -> GpuChoice:
    """Return whether there is a GPU, with the evidence."""
    visible = os.environ.get(VISIBLE)
    if visible is not None and visible.strip() in ("", "-1"):
        return GpuChoice(False, f"no GPU is usable: {VISIBLE} = {visible!r} hides all GPUs")
    num_gpus, source = _gpus_of_machine()
    if num_gpus == 0:
        return GpuChoice(False, f"no GPU was found: {source}")
    if visible is not None and (num_gpus := _num_visible(visible, num_gpus)) == 0:
        return GpuChoice(
            False, f"no GPU is usable: {VISIBLE} = {visible!r} starts with a GPU that does not exist, {source}"
        )
    if _has_torch_for_cpus():
        return GpuChoice(False, f"a GPU was found, but the installed torch is built for CPUs only ({source})")
    return GpuChoice(True, f"a GPU was found: {source}, {num_gpus} usable", num_gpus)


def usable_gpus() -> tuple[int, ...]:
    """Return the GPUs that this process may use, as CUDA counts them; empty if they are named by UUID."""
    names = os.environ.get(VISIBLE, ",".join(map(str, range(_gpus_of_machine()[0])))).split(",")
    usable = [name.strip() for name in names[: gpu_choice().num_gpus]]
    return tuple(map(int, usable)) if all(name.isdigit() for name in usable) else ()


def _num_visible(visible: str, num_gpus: int) -> int:
    """Return the number of GPUs that the variable makes visible.

    As in CUDA, the first entry that names no GPU ends the list.
    """
    count = 0
    for entry in (entry.strip() for entry in visible.split(",")):
        is_number = entry.isascii() and entry.isdigit()
        if not (is_number and int(entry) < num_gpus) and not entry.startswith(("GPU-", "MIG-")):
            break
        count += 1
    return count


@cache
def _gpus_of_machine() -> tuple[int, str]:
    """Return the number of GPUs, and the source of this number.

    In a container, only the GPUs assigned to it count.
    """
    try:
        nvml = ctypes.CDLL(NVML)
    except OSError:
        files = sorted(path.name for path in DEVICES.glob("nvidia[0-9]*"))
        if files:
            return len(files), f"{DEVICES}/{files[0]} exists, but {NVML} is missing"
        return 0, f"neither the driver's {NVML} nor {DEVICES}/nvidia* exists"
    if error := nvml.nvmlInit_v2():
        nvml.nvmlErrorString.restype = ctypes.c_char_p
        return 0, f"NVML failed to start ({nvml.nvmlErrorString(error).decode()})"
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return 0, "NVML cannot count GPUs"
        return count.value, f"NVML finds {count.value}"
    finally:
        nvml.nvmlShutdown()


@cache
def _has_torch_for_cpus() -> bool:
    """Return whether torch is built for CPUs only, or False if that is unknown.

    Read torch's files, because importing torch would fix its settings.
    """
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
    """Return the fastest dtype of this machine, with the reason.

    On one core, bfloat16 products reach 1,521 GFLOP/s with AMX, and float32 products 202. With AVX-512 BF16
    (Zen 5), forward and backward of a 135M model take 3.6 s of a core, in float32 6.9 s. With neither unit,
    bfloat16 is no faster, and server and learner differ a thousand times more.
    """
    gpu = gpu_choice()
    if gpu.has_gpu:
        return DtypeChoice("bfloat16", gpu.reason)
    if (unit := _bfloat16_unit()) is not None:
        reason = f"this CPU has {unit}, which multiplies bfloat16 faster than float32; {gpu.reason}"
        return DtypeChoice("bfloat16", reason)
    return DtypeChoice("float32", f"{gpu.reason}; and this CPU has neither {' nor '.join(BFLOAT16_UNITS)}")


def _bfloat16_unit() -> str | None:
    """Return the unit that multiplies bfloat16, if oneDNN may use it."""
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
