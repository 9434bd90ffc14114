"""Files and saved datasets of prompts, and a tokenizer of digits with a simple chat template."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from learner.prompts.prompts import Prompt, Prompts
from protocol.model_files import resolve_model

CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'system' %}={{ message['content'] }}={% else %}"
    "+{{ message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    "{% if thinks is defined and thinks %},{% endif %}"
)


def make_tokenizer(template: str = CHAT_TEMPLATE) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny:digits"))
    tokenizer.chat_template = template
    return tokenizer


def write_jsonl(path: Path, rows: Any) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return str(path)


def save_dataset(path: Path, rows: list[dict[str, Any]]) -> str:
    import datasets

    datasets.Dataset.from_list(rows).save_to_disk(str(path))
    return str(path)


def all_of(prompts: Prompts) -> list[Prompt]:
    """Return all prompts in the order of their rows."""
    return sorted((prompts.prompt_at(slot) for slot in range(len(prompts))), key=lambda prompt: prompt.prompt_id)
