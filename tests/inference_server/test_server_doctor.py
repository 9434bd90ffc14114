"""`inference-server doctor` with real ports and files: each fault in one line; and transfer tests at a server."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest
import torch

from inference_server.config import ServerRun
from inference_server.doctor import check_resources, check_transports, check_vllm_names, examine
from inference_server.engine.installed_vllm import installed_at
from inference_server.engine.vllm_names import all_names
from inference_server.preparation import needed_bytes
from protocol.channel.keys import make_keys
from protocol.channel.sockets import LearnerChannel
from protocol.config import load_config
from protocol.doctor import Finding, ok
from protocol.errors import PushError
from protocol.hardware import GpuChoice
from protocol.messages import MAX_TRIAL_BYTES, Rendezvous, Trial, TrialResult
from protocol.model_files import resolve_model, weight_bytes
from protocol.transports.group import RendezvousHost
from protocol.transports.tcp import LENGTH, PIECE_BYTES
from protocol.transports.trial import CHUNK_BYTES, receive_trial
from tests.fakes import ScriptedEngine, serving
from tests.inference_server.scripted_server import Stage, with_server
from tests.ports import free_endpoint

ROOT = Path(__file__).parent.parent.parent
RECIPE = "deploy/recipes/reverse.toml"
HTTP_OFF = ("--server.http-port", "0")


@pytest.fixture(autouse=True)
def without_a_look_at_vllms_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check of vLLM's names, which takes half a second; a separate test covers it."""
    monkeypatch.setattr("inference_server.doctor.check_vllm_names", lambda: ok("vllm", "not looked at"))


def problems(*flags: str, recipe: str = RECIPE) -> dict[str, str]:
    """Return the problems by subject."""
    run = load_config(ServerRun, [str(ROOT / recipe), *flags], "test")
    return {found.subject: str(found) for found in examine(run) if found.verdict == "problem"}


def test_a_healthy_machine_has_no_problems(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    assert problems("--endpoint", free_endpoint(), *HTTP_OFF) == {}
    assert problems("--endpoint", free_endpoint(), "--keys", str(tmp_path / "keys"), *HTTP_OFF) == {}


def test_a_node_that_only_runs_workers_needs_none_of_the_servers_addresses() -> None:
    elsewhere = ("--endpoint", "tcp://203.0.113.7:5757", "--insecure", "--server.nnodes", "2")
    nodes = (*elsewhere, "--server.master-addr", "203.0.113.7", "--server.tensor-parallel-size", "2")
    assert "names" in problems(*nodes) and problems(*nodes, "--server.node-rank", "1") == {}


def test_ports_in_use_are_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as two:
        ports = one.getsockname()[1], two.getsockname()[1]
        found = problems("--endpoint", f"tcp://127.0.0.1:{ports[0]}", "--server.http-port", str(ports[1]))
    assert set(found) == {"port", "http"} and "server.http_port" in found["http"]
    assert f"cannot listen on tcp://127.0.0.1:{ports[0]}: Address already in use" in found["port"]
    assert "; Stop the process that uses the port" in found["port"]


@pytest.mark.parametrize(
    ("flags", "subject", "expected"),
    [
        (
            ("--endpoint", "tcp://203.0.113.7:5757", "--insecure"),
            "names",
            "is not an address of this machine; set `endpoint`",
        ),
        (("--endpoint", "tcp://nowhere.invalid:5757", "--insecure"), "names", "does not resolve"),
        (("--model", "tests"), "model", "directory without config.json"),
        (("--server.kv-cache-memory-mib", str(1 << 30)), "resources", "server.kv_cache_memory_mib = 1073741824"),
        (("--server.block-size", "16"), "resources", "server.block_size = 16"),
        (("--server.quantization", "fp8_per_tensor"), "quantization", "needs a GPU"),
    ],
)
def test_an_unfitting_address_or_model_is_reported(
    flags: tuple[str, ...], subject: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    found = problems("--endpoint", free_endpoint(), *HTTP_OFF, *flags)
    assert set(found) == {subject} and expected in found[subject]


def test_what_is_quantized_is_reported() -> None:
    flags = ["--server.quantization", "int8_per_channel_weight_only", "--server.kv-cache-dtype", "fp8"]
    found = check_resources(load_config(ServerRun, [str(ROOT / RECIPE), *flags], "test"))
    (finding,) = (one for one in found if one.subject == "quantization")
    assert finding.verdict == "ok" and finding.text.startswith("int8_per_channel_weight_only weights and fp8 KV cache;")


def test_keys_that_exclude_the_learner_are_reported(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    make_keys(tmp_path / "other")
    flags = ("--endpoint", free_endpoint(), "--keys", str(tmp_path / "keys"), *HTTP_OFF)
    pub, allowed = tmp_path / "keys/server.pub", tmp_path / "keys/allowed/learner.pub"
    own_pub, own_allowed = pub.read_bytes(), allowed.read_bytes()
    pub.write_bytes((tmp_path / "other/server.pub").read_bytes())
    assert "does not belong to" in problems(*flags)["keys"]
    pub.write_bytes(own_pub)
    allowed.write_bytes((tmp_path / "other/allowed/learner.pub").read_bytes())
    assert "does not list" in problems(*flags)["keys"]
    allowed.unlink()
    assert "allowed contains no public key" in problems(*flags)["keys"]
    allowed.write_bytes(own_allowed)
    (tmp_path / "keys/server.key").chmod(0o644)
    assert "run: chmod 600" in problems(*flags)["keys"]


def test_an_open_http_port_without_a_key_is_reported() -> None:
    if os.environ.get("VLLM_API_KEY"):
        pytest.skip("VLLM_API_KEY is set here")
    found = problems("--endpoint", free_endpoint(), "--server.http-host", "0.0.0.0")
    assert set(found) == {"http"} and "set server.api_key_file" in found["http"]


def test_a_model_that_is_not_downloaded_has_an_unknown_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_server.doctor.local_model", lambda model: None)
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    run = load_config(ServerRun, [str(ROOT / RECIPE), "--endpoint", free_endpoint(), *HTTP_OFF], "test")
    (disk,) = [found for found in check_resources(run) if found.subject == "disk"]
    assert disk.verdict == "unknown" and "0.0 GiB" not in disk.text
    assert disk.text.startswith("the size of the download is unknown; ") and f"are free in {tmp_path}" in disk.text


def test_each_replica_needs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_server.doctor.free_memory_bytes", lambda: 1 << 30)
    flags = ("--endpoint", free_endpoint(), *HTTP_OFF, "--server.kv-cache-memory-mib", "600")
    assert problems(*flags) == {}
    found = problems(*flags, "--server.data-parallel-size", "2")
    assert set(found) == {"memory"} and "lower server.data_parallel_size" in found["memory"]


def test_weights_that_are_received_during_generation_need_memory_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    overlap = ("--server.overlap-weight-loading", "true")
    plain, overlapping = (load_config(ServerRun, [str(ROOT / RECIPE), *flags], "test") for flags in ((), overlap))
    path = resolve_model(plain.model)
    weights = weight_bytes(path, plain.computes_in)
    assert needed_bytes(overlapping, path) - needed_bytes(plain, path) == weights > 0
    monkeypatch.setattr("inference_server.preparation.total_memory_bytes", lambda: needed_bytes(plain, path))
    flags = ("--endpoint", free_endpoint(), *HTTP_OFF)
    monkeypatch.setattr("inference_server.doctor.free_memory_bytes", lambda: 1 << 60)
    assert problems(*flags) == {}
    assert "set server.overlap_weight_loading = false" in problems(*flags, *overlap)["resources"]
    see_gpus(monkeypatch, 1)
    monkeypatch.setattr("inference_server.doctor.gpu_memory_bytes", lambda: (70 << 30, 80 << 30))
    monkeypatch.setattr("protocol.transports.nccl.why_not_installed", lambda: None)
    monkeypatch.setattr("inference_server.doctor.free_memory_bytes", lambda: weights - 1)
    flags += ("--server.gpu-memory-utilization", "0.5")
    assert problems(*flags) == {}
    assert "set server.overlap_weight_loading = false" in problems(*flags, *overlap)["memory"]


def test_a_quantized_server_needs_less_memory() -> None:
    overlap = ("--server.overlap-weight-loading", "true", "--server.dtype", "bfloat16", "--dtype", "float32")
    quantized = ("--server.quantization", "int8_per_channel_weight_only")
    flags = ((), quantized, overlap, (*overlap, *quantized))
    runs = [load_config(ServerRun, [str(ROOT / RECIPE), "--dtype", "bfloat16", *each], "test") for each in flags]
    path = resolve_model(runs[0].model)
    plain, small, copied, small_and_copied = (needed_bytes(run, path) for run in runs)
    num_saved = weight_bytes(path, "bfloat16") - weight_bytes(path, "bfloat16", quantized=True)
    assert plain - small == num_saved > 0
    assert copied - plain == weight_bytes(path, "bfloat16")
    assert small_and_copied - small == weight_bytes(path, "float32"), "buckets are kept as they were sent"


def see_gpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    choice = GpuChoice(count > 0, "of the test", count)
    for module in ("doctor", "preparation"):
        monkeypatch.setattr(f"inference_server.{module}.gpu_choice", lambda: choice)


def test_workers_without_a_gpu_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_server.doctor.gpu_memory_bytes", lambda: (70 << 30, 80 << 30))
    see_gpus(monkeypatch, 2)
    monkeypatch.setattr("protocol.transports.nccl.why_not_installed", lambda: None)
    flags = ["--endpoint", free_endpoint(), *HTTP_OFF, "--server.gpu-memory-utilization", "0.5"]
    flags += ["--server.data-parallel-size", "2"]
    assert problems(*flags) == {}
    found = problems(*flags, "--server.tensor-parallel-size", "2")
    assert set(found) == {"resources"}
    assert "requires 4 GPUs, one for each worker, but 2 are available (of the test)" in found["resources"]


def test_a_kv_cache_of_a_given_size_needs_no_share_of_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference_server.doctor.gpu_memory_bytes", lambda: (10 << 30, 80 << 30))
    see_gpus(monkeypatch, 1)
    monkeypatch.setattr("protocol.transports.nccl.why_not_installed", lambda: None)
    flags = ["--endpoint", free_endpoint(), *HTTP_OFF, "--server.gpu-memory-utilization", "0.5"]
    assert problems(*flags, "--server.kv-cache-memory-mib", "9000") == {}
    found = problems(*flags, "--server.kv-cache-memory-mib", "11000")
    assert set(found) == {"memory"} and "lower server.kv_cache_memory_mib" in found["memory"]


def of_nccl(monkeypatch: pytest.MonkeyPatch, *flags: str, num_gpus: int = 2, reason: str | None) -> Finding | None:
    """Return the finding about NCCL on a machine with GPUs; `reason`: why NCCL is unusable."""
    monkeypatch.setattr("inference_server.doctor.gpu_memory_bytes", lambda: (70 << 30, 80 << 30) if num_gpus else None)
    see_gpus(monkeypatch, num_gpus)
    monkeypatch.setattr("protocol.transports.nccl.why_not_installed", lambda: reason)
    return next(check_transports(load_config(ServerRun, [str(ROOT / RECIPE), *flags], "test")), None)


REMOTE = ("--endpoint", "tcp://10.0.0.5:5757", "--insecure")
NO_CUPY = "transport nccl needs cupy (No module named 'cupy'); pip install it"


def test_a_gpu_without_nccl_is_a_problem_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_gpus in (1, 2):
        found = of_nccl(monkeypatch, *REMOTE, num_gpus=num_gpus, reason=NO_CUPY)
        assert found is not None and (found.verdict, found.remedy) == ("problem", "pip install it")
    found = of_nccl(monkeypatch, *REMOTE, reason=None)
    assert found is not None and found.verdict == "ok"


def test_nccl_is_not_required_where_it_would_not_be_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = of_nccl(monkeypatch, num_gpus=1, reason=NO_CUPY)
    assert found is not None and found.verdict == "ok" and "uses the same GPU (ipc)" in found.text
    assert of_nccl(monkeypatch, *REMOTE, num_gpus=0, reason=NO_CUPY) is None
    config = tmp_path / "run.toml"
    config.write_text('model = "tiny:digits"\nrun_dir = "r"\n[learner.weight_sync]\ntransport = "tcp"\n')
    assert not list(check_transports(load_config(ServerRun, [str(config)], "test")))


def test_vllms_names_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if installed_at() is not None:
        found = check_vllm_names()
        assert found.verdict == "ok" and f"has all {len([*all_names()])} names" in found.text
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    monkeypatch.setattr("inference_server.engine.installed_vllm.installed_at", lambda: tmp_path)
    found = check_vllm_names()
    assert found.verdict == "problem" and "is not supported by this server" in found.text
    assert found.remedy.startswith("install a supported version: ")


def test_the_command_exits_1_with_a_problem_and_0_without() -> None:
    def doctor(*flags: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "inference_server", "doctor", RECIPE, *flags, *HTTP_OFF]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = doctor("--json", "--endpoint", f"tcp://127.0.0.1:{taken.getsockname()[1]}")
    assert done.returncode == 1 and done.stderr == "1 problem found\n"
    assert [found["subject"] for found in json.loads(done.stdout) if found["verdict"] == "problem"] == ["port"]
    done = doctor("--endpoint", free_endpoint())
    assert done.returncode == 0 and done.stderr == ""


def trial(trial_id: str, port: int, world_size: int = 2) -> Trial:
    rendezvous = Rendezvous(transport="tcp", host="127.0.0.1", port=port, world_size=world_size, timeout_s=1.0)
    return Trial(trial_id=trial_id, rendezvous=rendezvous, num_bytes=MAX_TRIAL_BYTES)


@with_server()
async def test_a_failed_trial_is_reported_without_side_effects(at: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    await at.learner.send(trial("a", port))
    assert "cannot reach the learner's rendezvous" in (await at.learner.receive(TrialResult)).error
    await at.learner.send(trial("b", port, world_size=3))
    assert "expected a transport between CPUs, and 2 ranks" in (await at.learner.receive(TrialResult)).error
    await at.learner.join()


@with_server()
async def test_one_trial_at_a_time(at: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # accepts connections and sends nothing
        for trial_id in ("a", "b"):
            await at.learner.send(trial(trial_id, mute.getsockname()[1]))
        second, first = await at.learner.receive(TrialResult), await at.learner.receive(TrialResult)
    assert (second.trial_id, first.trial_id) == ("b", "a")
    assert second.error == "another transfer test is running on this server" and first.error


def test_a_server_stops_during_a_trial_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    started, may_end, has_ended = threading.Event(), threading.Event(), threading.Event()

    def hang(_: Trial) -> float:
        started.set()
        may_end.wait(20.0)
        has_ended.set()
        return 0.0

    async def stop_during_a_trial() -> None:
        async with serving(ScriptedEngine()) as running:
            with closing(LearnerChannel(running.endpoint)) as doctor:
                await doctor.send(trial("a", 1), 10.0)
                assert await asyncio.to_thread(started.wait, 10.0)

    monkeypatch.setattr("protocol.transports.trial.receive_trial", hang)
    asyncio.run(stop_during_a_trial())
    assert not has_ended.is_set()
    may_end.set()
    assert has_ended.wait(10.0)


def test_a_trial_that_trickles_in_ends_after_twice_the_time_of_a_step() -> None:
    with (
        closing(RendezvousHost("127.0.0.1", 1.0)) as hosted,
        ThreadPoolExecutor(1) as receiving,
    ):
        rendezvous = hosted.rendezvous(1, "tcp")
        result = receiving.submit(receive_trial, Trial(trial_id="a", rendezvous=rendezvous, num_bytes=MAX_TRIAL_BYTES))
        device = torch.device("cpu")
        with closing(hosted.host_collective("a", rendezvous, device)) as sending:
            sending.broadcast(torch.zeros(1, dtype=torch.uint8))
            target = sending._targets[1]
            with suppress(OSError):
                for number in range(40):  # 10 s
                    if number % (CHUNK_BYTES // PIECE_BYTES) == 0:
                        target.send(memoryview(LENGTH.pack(CHUNK_BYTES)))
                    target.send(memoryview(bytes(PIECE_BYTES)))
                    time.sleep(0.25)
                pytest.fail("the trial has not ended")
            with pytest.raises(PushError, match="broadcast of 4194304 bytes in session a failed"):
                result.result()
