"""A tiny random chat model, as a checkpoint. Its tokenizer's format reads every turn as a tool call."""

from pathlib import Path
from typing import Any

from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.learner.environments.chat_tokenizer import chat_tokenizer


def template_reading_calls(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return a `response_template` that reads every turn as a call. `{content}` in `arguments`: the turn's text."""
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open_pattern": "^",
                "close_pattern": r"<\|im_end\|>",
                "repeats": True,
                "transform": {"type": "function", "function": {"name": name, "arguments": arguments}},
            },
        },
    }


def write_model(path: Path, template: str, response_template: dict[str, Any]) -> None:
    tokenizer = chat_tokenizer(template)
    tokenizer.response_template = response_template  # type: ignore[attr-defined]
    tokenizer.save_pretrained(path)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, dtype="float32",
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(path)
