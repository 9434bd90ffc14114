"""Detection of GPUs, the fastest dtype, free memory, and the cores of a side. That both commands use them is tested in
test_system.py."""

import logging
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from inference_server.__main__ import _on_own_cores
from inference_server.config import ServerRun
from protocol import doctor, hardware
from protocol.config import SharedConfig, load_config
from protocol.doctor import dtype_finding
from protocol.hardware import dtype_choice, gpu_choice, halves, has_gpu, share_of_cores, usable_gpus

AMX = "processor\t: 0\nflags\t\t: fpu avx512f amx_bf16 amx_tile amx_int8\nbugs\t\t:\n"
AVX512 = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\n"
PLAIN = "processor\t: 0\nflags\t\t: fpu avx2 avx512f\n"
RECIPE = str(Path(__file__).parent.parent.parent / "deploy/recipes/reverse.toml")
LOOPBACK = ("tcp://127.0.0.1:5757",)


NVML = """
static unsigned count = {count};
int nvmlInit_v2(void) {{ return {init}; }}
int nvmlShutdown(void) {{ return 0; }}
int nvmlDeviceGetCount_v2(unsigned *found) {{ *found = count; return 0; }}
const char *nvmlErrorString(int code) {{ return code == 18 ? "Driver/library version mismatch" : "?"; }}
"""
"""A fake library of the driver with scripted results."""


def forget() -> None:
    """Clear the caches of a process."""
    hardware._gpus_of_machine.cache_clear()
    hardware._has_torch_for_cpus.cache_clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator:
    """Simulate a machine with these files and NVML, a torch for GPUs and no limits of oneDNN."""
    monkeypatch.setattr(hardware, "DEVICES", tmp_path)
    monkeypatch.setattr(hardware, "NVML", str(tmp_path / "libnvidia-ml.so.1"))
    monkeypatch.setattr(hardware, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in hardware.ONEDNN_LIMITS:
        monkeypatch.delenv(name, raising=False)

    def make(
        cpu_info: str | None = None,
        *,
        devices: tuple[str, ...] = (),
        nvml: int | None = None,
        init: int = 0,
    ) -> None:
        for name in devices:
            (tmp_path / name).touch()
        if cpu_info is not None:
            (tmp_path / "cpuinfo").write_text(cpu_info)
        if nvml is not None:
            source = tmp_path / "nvml.c"
            source.write_text(NVML.format(count=nvml, init=init))
            subprocess.run(["cc", "-shared", "-fPIC", "-o", hardware.NVML, str(source)], check=True)
        forget()
        monkeypatch.setattr(hardware, "_has_torch_for_cpus", lambda: False)

    yield make
    monkeypatch.undo()
    forget()


@pytest.mark.parametrize(
    ("devices", "nvml", "num_gpus", "reason"),
    [
        (("nvidia0", "nvidiactl"), None, 1, "/nvidia0 exists, but .*libnvidia-ml.so.1 is missing, 1 usable"),
        (("nvidia6", "nvidiactl", "nvidia-uvm"), None, 1, "a GPU was found: .*/nvidia6 exists"),
        (("nvidiactl", "nvidia-uvm"), None, 0, "no GPU was found: neither the driver's .*ml.so.1 nor .*/nvidia"),
        ((), 1, 1, "a GPU was found: NVML finds 1, 1 usable"),
        (("nvidia0",), 0, 0, "no GPU was found: NVML finds 0"),
    ],
)
def test_a_gpu_must_exist_in_the_driver(
    machine, devices: tuple[str, ...], nvml: int | None, num_gpus: int, reason: str
) -> None:
    machine(devices=devices, nvml=nvml)
    found = gpu_choice()
    assert (found.has_gpu, found.num_gpus) == (num_gpus > 0, num_gpus) and has_gpu() is found.has_gpu
    assert re.search(reason, found.reason)


def test_the_usable_gpus_are_those_that_cuda_would_count(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(nvml=4)
    assert usable_gpus() == (0, 1, 2, 3)
    for visible, expected in (("2,3", (2, 3)), (" 1 ", (1,)), ("3,9,0", (3,)), ("-1", ()), ("", ()), ("GPU-ab12", ())):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert usable_gpus() == expected, visible


def test_a_gpu_must_be_visible_to_this_process(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(nvml=8)
    for visible, num_gpus, reason in (
        ("", 0, "no GPU is usable: CUDA_VISIBLE_DEVICES = '' hides all GPUs"),
        ("-1", 0, "CUDA_VISIBLE_DEVICES = '-1' hides all GPUs"),
        ("6", 1, "NVML finds 8, 1 usable"),
        ("2, 3,5", 3, "NVML finds 8, 3 usable"),
        ("0,-1,1", 1, "1 usable"),
        ("8", 0, "CUDA_VISIBLE_DEVICES = '8' starts with a GPU that does not exist, NVML finds 8"),
        ("NoDevFiles", 0, "starts with a GPU that does not exist"),
        ("²", 0, "starts with a GPU that does not exist"),
        ("GPU-8e2a,MIG-77", 2, "2 usable"),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found = gpu_choice()
        assert (found.has_gpu, found.num_gpus) == (num_gpus > 0, num_gpus) and reason in found.reason


def test_a_driver_that_fails_to_start_has_no_gpu_and_a_reason(machine) -> None:
    machine(devices=("nvidia0",), nvml=1, init=18)
    assert gpu_choice() == (False, "no GPU was found: NVML failed to start (Driver/library version mismatch)", 0)


def test_a_torch_for_cpus_ignores_gpus(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(nvml=2)
    monkeypatch.setattr(hardware, "_has_torch_for_cpus", lambda: True)
    assert gpu_choice().reason == "a GPU was found, but the installed torch is built for CPUs only (NVML finds 2)"
    assert not has_gpu()


def test_the_target_of_the_installed_torch_is_read_from_its_files() -> None:
    forget()
    assert hardware._has_torch_for_cpus() is (torch.version.cuda is None)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")
def test_nvml_counts_as_many_gpus_as_torch() -> None:
    forget()
    assert gpu_choice().num_gpus == torch.cuda.device_count()


@pytest.mark.parametrize(
    ("cpu_info", "limit", "dtype", "reason"),
    [
        (AMX, "", "bfloat16", "this CPU has AMX"),
        (AVX512, "", "bfloat16", "this CPU has AVX-512 BF16"),
        (PLAIN, "", "float32", "this CPU has neither AMX nor AVX-512 BF16"),
        (None, "", "float32", "this CPU has neither AMX nor AVX-512 BF16"),
        # Instructions that oneDNN must not use have no effect.
        (AMX, "AVX512_CORE_VNNI", "float32", "neither"),
        (AMX, "avx512_core_amx", "bfloat16", "AMX"),
        (AVX512, "AVX512_CORE_VNNI", "float32", "neither"),
        (AVX512, "AVX512_CORE_BF16", "bfloat16", "BF16"),
        (AVX512, "AVX10_1_512", "bfloat16", "BF16"),
        (AVX512, "DEFAULT", "bfloat16", "BF16"),
    ],
)
def test_the_default_dtype_is_the_fastest_of_the_machine(
    machine, monkeypatch: pytest.MonkeyPatch, cpu_info: str | None, limit: str, dtype: str, reason: str
) -> None:
    machine(cpu_info)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert SharedConfig(model="m", run_dir="r").dtype == dtype == dtype_choice().dtype
    assert reason in dtype_choice().reason
    assert SharedConfig(model="m", run_dir="r", dtype="float32").dtype == "float32"


def test_with_a_gpu_the_default_is_bfloat16_for_any_cpu(machine) -> None:
    machine(PLAIN, devices=("nvidia0",))
    assert dtype_choice().dtype == "bfloat16" and dtype_choice().reason.startswith("a GPU was found: ")


def test_check_and_doctors_name_the_faster_dtype_and_why(machine) -> None:
    machine(AMX)
    assert str(dtype_finding("bfloat16")).startswith("ok       speed      dtype = bfloat16: this CPU has AMX")
    (slow, fast) = dtype_finding("float32"), dtype_finding("bfloat16")
    assert (slow.verdict, fast.verdict) == ("unknown", "ok")
    assert slow.text.startswith("dtype = float32 may be slower here than bfloat16: this CPU has AMX")


# --- memory -----------------------------------------------------------------------------------------------------------


def test_the_page_cache_of_a_container_counts_as_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    free = doctor.psutil.virtual_memory().available
    (tmp_path / "memory.max").write_text(f"{1 << 60}\n")
    (tmp_path / "memory.current").write_text(f"{(1 << 60) - 500}\n")
    assert doctor.free_memory_bytes() == 500 < free
    stat = "anon 90\nfile 70\ninactive_file 40\nactive_file 20\nshmem 10\nslab_reclaimable 3\nslab 8\n"
    (tmp_path / "memory.stat").write_text(stat)
    assert doctor.free_memory_bytes() == 500 + 40 + 20 + 3
    (tmp_path / "memory.max").write_text("max\n")
    assert doctor.free_memory_bytes() > 1000


# --- cores ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def five_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate five cores on a machine without a GPU."""
    if has_gpu():
        pytest.skip("cores are shared on machines without a GPU")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 5, 8, 9})


@pytest.mark.usefixtures("five_cores")
def test_two_sides_on_one_machine_use_half_of_the_cores_each_and_log_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert share_of_cores("server", {}, LOOPBACK) == (0, 1) == halves(5)["server"]
        assert share_of_cores("learner", {"http_port": 0}, LOOPBACK) == (2, 3, 4) == halves(5)["learner"]
    assert caplog.messages == [
        "using core(s) 0, 1 of 5, so that the learner has its own; server.cpu_cores overrides this",
        "using core(s) 2, 3, 4 of 5, so that the server has its own; learner.cpu_cores overrides this",
    ]


@pytest.mark.usefixtures("five_cores")
@pytest.mark.parametrize(
    ("taken", "left"),
    [([0], (1, 2, 3, 4)), ([1, 7], (0, 3, 4)), ([0, 1, 2, 3, 4], (2, 3, 4))],
    ids=["one", "one beyond the last, which wraps around", "all, so the half"],
)
def test_cores_named_by_the_other_section_are_left_to_it(taken: list[int], left: tuple[int, ...]) -> None:
    assert share_of_cores("learner", {"cpu_cores": taken}, LOOPBACK) == left


@pytest.mark.usefixtures("five_cores")
def test_a_side_alone_on_its_machine_uses_all_cores() -> None:
    for endpoints in (("tcp://10.0.0.5:5757",), ("tcp://[::]:5757",), ()):
        assert share_of_cores("learner", {}, endpoints) is None
    # One of several servers on this machine is enough.
    assert share_of_cores("learner", {}, ("tcp://10.0.0.5:5757", *LOOPBACK)) == (2, 3, 4)


@pytest.mark.usefixtures("five_cores")
def test_ranks_and_workers_divide_their_half_unless_there_are_too_many(caplog: pytest.LogCaptureFixture) -> None:
    def of(rank: int, num_ranks: int) -> tuple[int, ...] | None:
        return share_of_cores("learner", {}, LOOPBACK, rank=rank, num_processes=num_ranks)

    with caplog.at_level(logging.INFO):
        assert [of(rank, 2) for rank in (0, 1)] == [(2, 4), (3,)]
    assert len(caplog.messages) == 1
    assert of(0, 4) is None
    assert share_of_cores("server", {}, LOOPBACK, num_processes=2) == (0, 1)
    assert share_of_cores("server", {}, LOOPBACK, num_processes=3) is None


@pytest.mark.usefixtures("five_cores")
def test_a_server_with_more_workers_than_cores_in_its_half_is_not_bound() -> None:
    def cores(*flags: str) -> tuple[int, ...] | None:
        return _on_own_cores(load_config(ServerRun, [RECIPE, *flags], "test")).server.cpu_cores

    assert cores() == cores("--server.tensor-parallel-size", "2") == (0, 1)
    assert cores("--server.tensor-parallel-size", "3") is None
    assert cores("--server.cpu-cores", "4") == (4,)
