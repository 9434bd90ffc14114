"""Which dtype a machine computes fastest in: told by its GPU or its processor's flags, and by what oneDNN may use."""

from pathlib import Path

import pytest

from protocol import hardware
from protocol.checkup import of_dtype
from protocol.config import SharedConfig
from protocol.hardware import dtype_choice

AMX = "processor\t: 0\nflags\t\t: fpu avx512f amx_bf16 amx_tile amx_int8\nbugs\t\t:\n"
AVX512 = "processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\n"
PLAIN = "processor\t: 0\nflags\t\t: fpu avx2 avx512f\n"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Make this machine one with a GPU or not, with the given /proc/cpuinfo, without limits of oneDNN."""

    def make(cpu_info: str | None, *, has_gpu: bool = False) -> None:
        monkeypatch.setattr(hardware, "GPU", tmp_path / "nvidia0")
        monkeypatch.setattr(hardware, "CPU_INFO", tmp_path / "cpuinfo")
        for name in hardware.ONEDNN_LIMITS:
            monkeypatch.delenv(name, raising=False)
        if has_gpu:
            (tmp_path / "nvidia0").touch()
        if cpu_info is not None:
            (tmp_path / "cpuinfo").write_text(cpu_info)

    return make


@pytest.mark.parametrize(
    ("cpu_info", "has_gpu", "dtype", "reason"),
    [
        (PLAIN, True, "bfloat16", "there is a GPU"),
        (AMX, False, "bfloat16", "this CPU has AMX"),
        (AVX512, False, "bfloat16", "this CPU has AVX-512 BF16"),
        (PLAIN, False, "float32", "this CPU has neither AMX nor AVX-512 BF16"),
        (None, False, "float32", "this CPU has neither AMX nor AVX-512 BF16"),
    ],
)
def test_the_default_is_what_the_machine_multiplies_fastest(
    machine, cpu_info: str | None, has_gpu: bool, dtype: str, reason: str
) -> None:
    machine(cpu_info, has_gpu=has_gpu)
    assert SharedConfig(model="m", run_dir="r").dtype == dtype == dtype_choice().dtype
    assert reason in dtype_choice().reason
    assert SharedConfig(model="m", run_dir="r", dtype="float32").dtype == "float32"


@pytest.mark.parametrize(
    ("cpu_info", "limit", "dtype"),
    [
        (AMX, "AVX512_CORE_VNNI", "float32"),
        (AMX, "AVX512_CORE_BF16", "float32"),
        (AMX, "avx512_core_amx", "bfloat16"),
        (AMX, "ALL", "bfloat16"),
        (AVX512, "AVX512_CORE_VNNI", "float32"),
        (AVX512, "AVX512_CORE_BF16", "bfloat16"),
        (AVX512, "AVX10_1_512", "bfloat16"),
        (AVX512, "DEFAULT", "bfloat16"),
    ],
)
def test_what_onednn_must_not_use_makes_nothing_faster(
    machine, monkeypatch: pytest.MonkeyPatch, cpu_info: str, limit: str, dtype: str
) -> None:
    machine(cpu_info)
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert dtype_choice().dtype == dtype


def test_check_and_doctors_name_the_faster_dtype_and_why(machine) -> None:
    machine(AMX)
    assert str(of_dtype("bfloat16")).startswith("ok       speed      dtype = bfloat16: this CPU has AMX")
    (slow, fast) = of_dtype("float32"), of_dtype("bfloat16")
    assert (slow.verdict, fast.verdict) == ("unknown", "ok")
    assert slow.text.startswith("dtype = float32 may be slower here than bfloat16: this CPU has AMX")
