"""A tokenizer with one token per character, and chat templates with and without the reasoning of earlier turns."""

import json
import string
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

START, END = "<|im_start|>", "<|im_end|>"
CHARACTERS = sorted(set(string.printable) - set("\x0b\x0c\r"))

TEMPLATE = """{%- if tools %}<|im_start|>tools
{%- for tool in tools %} {{ tool.function.name }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == "assistant" %}
{%- if message.reasoning_content is defined and KEEPS %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}
{%- else %}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}
{%- endif %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if opens_reasoning is defined %}<think>{% endif %}{% endif %}"""
KEEPING = TEMPLATE.replace("KEEPS", "true")
DROPPING = TEMPLATE.replace("KEEPS", "loop.last")


def chat_tokenizer(template: str = KEEPING) -> PreTrainedTokenizerFast:
    symbols = dict(zip(range(256), _byte_symbols(), strict=True))
    tokens = [START, END, *(symbols[ord(character)] for character in CHARACTERS)]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, pad_token=END, additional_special_tokens=[START],
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer


def call(name: str, **arguments: Any) -> str:
    """Return a tool call as a policy writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def _byte_symbols() -> list[str]:
    """Return the symbol of each byte in a byte-level vocabulary: the byte if printable, else a character above 255."""
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = iter(range(256, 512))
    return [chr(byte) if byte in seen else chr(next(hidden)) for byte in range(256)]
