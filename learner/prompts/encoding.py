"""Encode rows of data: the token ids of each prompt, and a digest of its row.

    sources.py ──▶ rows ──▶ chat template ──▶ tokenizer ──▶ token ids, lengths, digests ──▶ prompts.py

The same rows, tokenizer and config keys are encoded once: `datasets.map` caches the result, and later starts
memory-map it.

Invariant: cached results were checked, and their name in the cache covers everything that they depend on.
"""

import datetime
import decimal
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import xxhash

from learner.config import DataConfig
from learner.prompts.chat_template import ChatTemplate, Message, content_text
from learner.prompts.sources import Row, Source, cache_directory
from protocol.errors import DataError

ENCODING = 5
"""Version of the cached results. Raise it with every change of the results or of the checks."""
ROWS_AT_ONCE = 1024
TOOLS = "tools"
"""Column with the JSON schemas of the tools that the template of a conversation receives."""


class Encoded(msgspec.Struct, frozen=True, eq=False):
    """Encoded prompts, by row."""

    token_ids: Any
    """List of lists, or a dataset with this single column."""
    num_tokens: np.ndarray
    """Number of tokens before truncation."""
    are_texts: np.ndarray
    """Whether the prompt is a text, not a conversation."""
    digests: np.ndarray
    """Digests as int64, over the token ids and the row."""

    def prompt_ids(self, number: int) -> list[int]:
        ids = self.token_ids[number]
        return ids["token_ids"] if isinstance(ids, dict) else ids


class Encoder(msgspec.Struct, frozen=True, eq=False):
    """Encoder of rows, safe to send to other processes."""

    source_name: str
    config: DataConfig
    template: ChatTemplate

    def encode(self, rows: Sequence[Row], numbers: Sequence[int]) -> dict[str, list[Any]]:
        """Return token_ids, num_tokens, is_text and digests. Raises DataError naming a bad row."""
        prompts = [self._prompt(row, number) for row, number in zip(rows, numbers, strict=True)]
        templates = [self._template(row, number) for row, number in zip(rows, numbers, strict=True)]
        token_ids = self._token_ids(prompts, templates, numbers)
        self._check_roles(prompts, templates, numbers)
        cut = self.config.max_prompt_tokens if self.config.overlong_prompts == "truncate" else None
        kept = [ids[-cut:] for ids in token_ids] if cut else token_ids
        return {
            "token_ids": kept,
            "num_tokens": [len(ids) for ids in token_ids],
            "is_text": [isinstance(prompt, str) for prompt in prompts],
            "digest": [digest(row, ids) for row, ids in zip(rows, kept, strict=True)],
        }

    def _prompt(self, row: Row, number: int) -> Any:
        prompt = row[self.config.prompt_column]
        is_conversation = isinstance(prompt, list) and all(
            isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
            for message in prompt
        )
        if not prompt or not (isinstance(prompt, str) or is_conversation):
            raise DataError(
                f"row {number} of {self.source_name} has {str(prompt)[:80]!r} ({type(prompt).__name__}) in column "
                f"{self.config.prompt_column!r}; expected a non-empty text or a non-empty list of messages with role "
                "and content"
            )
        goes_on = self.template.turns.goes_on  # agents render their own prompts
        for content in [message["content"] for message in prompt] if is_conversation and goes_on else []:
            if not isinstance(content_text(content or ""), str):
                raise DataError(
                    f"row {number} of {self.source_name} has the content {str(content)[:80]!r}, which is not only "
                    "text; the policy sees only text. Remove the row, or its images and other parts"
                )
        return with_system_prompt(prompt, self.config)

    def _template(self, row: Row, number: int) -> ChatTemplate:
        """Return the template with the tools of the row, as TRL does, if the run has none."""
        tools = row.get(TOOLS)
        has_own = self.template.tools or not self.template.turns.goes_on  # an agent passes its own tools
        if tools is None or has_own or isinstance(row[self.config.prompt_column], str):
            return self.template
        try:
            found = json.loads(tools) if isinstance(tools, str) else tools
        except ValueError:
            found = None
        if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
            raise DataError(
                f"row {number} of {self.source_name} has {str(tools)[:80]!r} in column {TOOLS!r}; expected a list of "
                "JSON schemas of functions, or its JSON text. Rename the column if it contains something else"
            )
        return msgspec.structs.replace(self.template, tools=without_nulls(found))

    def _token_ids(self, prompts: list[Any], templates: list[ChatTemplate], numbers: Sequence[int]) -> list[list[int]]:
        """Return the token ids of each prompt.

        Texts get the special tokens that the tokenizer adds, conversations only those of their template.
        """
        token_ids: list[list[int]] = [[]] * len(prompts)
        for is_plain in (True, False):
            indices = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str) == is_plain]
            if not is_plain and not self.template.has_texts:
                encoded = [self._templated(templates[p].prompt_ids, prompts[p], numbers[p]) for p in indices]
            else:
                texts = [
                    prompts[p] if is_plain else self._templated(templates[p].prompt_text, prompts[p], numbers[p])
                    for p in indices
                ]
                encoded = self.template.tokenizer(texts, add_special_tokens=is_plain)["input_ids"] if texts else []
                encoded = [self.template.with_one_begin(ids) for ids in encoded]
            for i, ids in zip(indices, encoded, strict=True):
                token_ids[i] = list(ids)
        for number, ids in zip(numbers, token_ids, strict=True):
            if not ids:
                raise DataError(
                    f"the prompt in row {number} of {self.source_name} has no tokens; expected at least one. Remove "
                    "the row"
                )
        return token_ids

    def _check_roles(self, prompts: list[Any], templates: list[ChatTemplate], numbers: Sequence[int]) -> None:
        """Raise DataError if the template leaves out the messages of a role.

        Many templates silently ignore roles that they do not know.
        """
        checked = {"user"}  # each role once per batch
        for prompt, template, number in zip(prompts, templates, numbers, strict=True):
            if isinstance(prompt, str) or not template.turns.goes_on:  # agents render their own prompts
                continue
            for i, message in enumerate(prompt):
                if message["role"] in checked or not message["content"] or message.get("tool_calls"):
                    continue
                checked.add(message["role"])
                if not template.shows(prompt, i):
                    raise DataError(
                        f"row {number} of {self.source_name}: the chat template omits messages of role "
                        f"{message['role']!r} ({str(message['content'])[:60]!r}); use a role that it renders, such as "
                        "'system', or another model"
                    )

    def _templated(self, render: Callable[[list[Message]], Any], messages: list[Message], number: int) -> Any:
        try:
            return render(messages)
        except DataError as error:
            raise DataError(f"row {number} of {self.source_name}: {error}") from error


def with_system_prompt(prompt: Any, config: DataConfig) -> Any:
    """Return the prompt with the configured system prompt.

    A conversation with its own system message keeps that message.
    """
    if config.system_prompt is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not config.system_prompt or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": config.system_prompt}, *messages]


def without_nulls(value: Any) -> Any:
    """Remove null keys from nested objects.

    Columnar files give every object each key that any object has.
    """
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def digest(row: Row, token_ids: Sequence[int]) -> int:
    """Return a digest of the token ids and the row, the same in every process."""
    text = json.dumps(row, sort_keys=True, default=_plain)
    hashed = xxhash.xxh3_64_digest(np.array(token_ids, np.int32).tobytes() + text.encode())
    return int.from_bytes(hashed, "little", signed=True)


def _plain(value: Any) -> Any:
    """Return a stand-in without memory addresses for a value that JSON cannot encode."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)):
        return str(value)
    return type(value).__name__


# --- a whole source ---
def encode_source(source: Source, config: DataConfig, template: ChatTemplate) -> Encoded:
    """Encode all rows or load them from the cache. Raises DataError for a bad row."""
    encoder = Encoder(source.name, config, template)
    if source.fingerprint is None:
        columns: dict[str, list[Any]] = {"token_ids": [], "num_tokens": [], "is_text": [], "digest": []}
        for start in range(0, len(source), ROWS_AT_ONCE):
            rows = source.rows[start : start + ROWS_AT_ONCE]
            for name, values in encoder.encode(rows, range(start, start + len(rows))).items():
                columns[name] += values
        return Encoded(columns["token_ids"], *(np.array(columns[name]) for name in ("num_tokens", "is_text", "digest")))
    dataset = _mapped(source, encoder)
    as_arrays = dataset.with_format("numpy")
    arrays = (as_arrays[name][:] for name in ("num_tokens", "is_text", "digest"))
    return Encoded(dataset.select_columns("token_ids"), *arrays)


def _mapped(source: Source, encoder: Encoder) -> Any:
    import datasets

    config, name = encoder.config, _cache_name(source, encoder)
    return source.rows.map(
        partial(_encode_batch, encoder, msgspec.structs.replace(source, rows=None)),
        with_indices=True,
        batched=True,
        batch_size=ROWS_AT_ONCE,
        remove_columns=source.rows.column_names,
        features=datasets.Features(
            {
                "token_ids": datasets.List(datasets.Value("int32")),
                "num_tokens": datasets.Value("int64"),
                "is_text": datasets.Value("bool"),
                "digest": datasets.Value("int64"),
            }
        ),
        num_proc=config.num_workers if config.num_workers > 1 else None,
        load_from_cache_file=name is not None,
        cache_file_name=str(cache_directory() / f"slipstream-{name}.arrow") if name else None,
        new_fingerprint=name or datasets.fingerprint.generate_random_fingerprint(),
        desc="encoding prompts",
    )


def _encode_batch(
    encoder: Encoder, source: Source, batch: dict[str, list[Any]], numbers: list[int]
) -> dict[str, list[Any]]:
    return encoder.encode(source.rows_of(batch), numbers)


def _cache_name(source: Source, encoder: Encoder) -> str | None:
    """Return a name that changes with everything that the encoding depends on.

    Returns None if the tokenizer cannot be fingerprinted.
    """
    import transformers

    config, tokenizer = encoder.config, encoder.template.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = [
        ENCODING, transformers.__version__, source.fingerprint, len(source), type(tokenizer).__name__, backend.to_str(),
        tokenizer.chat_template, tokenizer.special_tokens_map, config.prompt_column, config.system_prompt,
        config.chat_template_kwargs, encoder.template.tools, encoder.template.turns.goes_on,
        config.overlong_prompts == "truncate" and config.max_prompt_tokens,
    ]  # fmt: skip
    return xxhash.xxh3_128(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
