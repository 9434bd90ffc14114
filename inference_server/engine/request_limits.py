"""Requests that vLLM accepts although its engine would die of them.

    request ─▶ vLLM's own checks ─▶ check_request ─▶ engine process

An exception in a step ends vLLM's engine, with all groups in it. The learner's requests are checked on arrival
(requests.py), but clients of /v1 have more options.
Invariant: a refused request is an error of its client, and the engine never gets it.
"""

from collections.abc import Iterator
from functools import wraps
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.input_processor import InputProcessor

MAX_BIASED_TOKENS = 1024
"""Maximum number of tokens of each option that changes logits, in vLLM's second model runner."""
MAX_STOP_TOKENS = 128
"""Maximum number of tokens that `min_tokens` suppresses, in vLLM's second model runner."""
MAX_SEED = 2**63 - 1


def refuse_deadly_requests(processor: InputProcessor, config: VllmConfig) -> None:
    """Let vLLM's front end check each request that it is about to send."""
    process_inputs = processor.process_inputs

    @wraps(process_inputs)
    def process_and_check(*args: Any, **kwargs: Any) -> EngineCoreRequest:
        request = process_inputs(*args, **kwargs)
        check_request(request, config)
        return request

    processor.process_inputs = process_and_check


def check_request(request: EngineCoreRequest, config: VllmConfig) -> None:
    """Check a request for what would end the engine.

    Raises:
        VLLMValidationError: The client gets status 400.
    """
    # vLLM's own check admits ids of the tokenizer too. The placeholders of images may be such ids.
    vocab_size, highest = config.model_config.get_vocab_size(), max(request.prompt_token_ids or [0])
    if highest >= vocab_size and not request.mm_features:
        raise VLLMValidationError(
            f"the prompt has token id {highest}; expected 0 to {vocab_size - 1}, the model's vocabulary"
        )
    if request.sampling_params is None:
        return
    for name, value, most in _limited(request.sampling_params):
        if value > most and config.use_v2_model_runner:
            raise VLLMValidationError(f"{name} is {value}; expected at most {most}")


def _limited(params: SamplingParams) -> Iterator[tuple[str, int, int]]:
    """Yield name, value and maximum of what vLLM's second model runner limits."""
    yield "the number of allowed_token_ids", len(params.allowed_token_ids or ()), MAX_BIASED_TOKENS
    yield "the number of tokens in logit_bias", len(params.logit_bias or ()), MAX_BIASED_TOKENS
    yield "the number of tokens in bad_words", sum(map(len, params.bad_words_token_ids or ())), MAX_BIASED_TOKENS
    if params.min_tokens:
        yield "the number of stop tokens with min_tokens", len(params.all_stop_token_ids), MAX_STOP_TOKENS
    if params.seed is not None:
        yield "the seed of the last completion (seed + n - 1)", params.seed + params.n - 1, MAX_SEED
