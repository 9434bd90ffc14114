"""Encoding: what a row becomes before it can be asked: the token ids of its prompt, and a digest of all that it is.

    sources.py ──▶ rows ──▶ chat template ──▶ tokenizer ──▶ token ids, lengths, digests ──▶ prompts.py

Done once for the same rows, tokenizer and keys: `datasets.map` keeps the result in its cache, from where later starts map it.
Invariant: what is kept was checked, and its name in the cache stands for everything that it depends on.
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
from learner.prompts.chat_template import ChatTemplate, Message
from learner.prompts.sources import Row, Source, cache_directory
from protocol.errors import DataError

ENCODING = 3
"""Raise it with every change of what is kept, and of what is checked."""
ROWS_AT_ONCE = 1024
TOOLS = "tools"
"""The column of JSON schemas that a conversation's template is told of, beside the prompt."""


class Encoded(msgspec.Struct, frozen=True, eq=False):
    """By row."""

    token_ids: Any
    """A list of lists, or a dataset with the one column."""
    num_tokens: np.ndarray
    """Before anything was cut off."""
    digests: np.ndarray
    """int64, of the token ids and the row."""

    def prompt_ids(self, number: int) -> list[int]:
        ids = self.token_ids[number]
        return ids["token_ids"] if isinstance(ids, dict) else ids


class Encoder(msgspec.Struct, frozen=True, eq=False):
    """Encodes rows; goes into other processes as it is."""

    source_name: str
    config: DataConfig
    template: ChatTemplate

    def encode(self, rows: Sequence[Row], numbers: Sequence[int]) -> dict[str, list[Any]]:
        """Return token_ids, num_tokens and digest of each row. Raises DataError that names a row."""
        prompts = [self._prompt(row, number) for row, number in zip(rows, numbers, strict=True)]
        templates = [self._template(row, number) for row, number in zip(rows, numbers, strict=True)]
        token_ids = self._token_ids(prompts, templates, numbers)
        self._check_roles(prompts, templates, numbers)
        cut = self.config.max_prompt_tokens if self.config.too_long == "truncate" else None
        kept = [ids[-cut:] for ids in token_ids] if cut else token_ids
        return {
            "token_ids": kept,
            "num_tokens": [len(ids) for ids in token_ids],
            "digest": [digest(row, ids) for row, ids in zip(rows, kept, strict=True)],
        }

    def _prompt(self, row: Row, number: int) -> Any:
        prompt = row[self.config.prompt_column]
        is_conversation = isinstance(prompt, list) and all(
            isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt
        )
        if not prompt or not (isinstance(prompt, str) or is_conversation):
            raise DataError(
                f"row {number} of {self.source_name} holds {str(prompt)[:80]!r} ({type(prompt).__name__}) in column "
                f"{self.config.prompt_column!r}; expected a text or a list of messages with role and content, neither empty"
            )
        return with_system_prompt(prompt, self.config)

    def _template(self, row: Row, number: int) -> ChatTemplate:
        """With the tools of the row, as TRL, where the run has none of its own."""
        tools = row.get(TOOLS)
        has_own = self.template.tools or not self.template.turns.goes_on  # an agent tells the policy of its own
        if tools is None or has_own or isinstance(row[self.config.prompt_column], str):
            return self.template
        try:
            found = json.loads(tools) if isinstance(tools, str) else tools
        except ValueError:
            found = None
        if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
            raise DataError(
                f"row {number} of {self.source_name} holds {str(tools)[:80]!r} in column {TOOLS!r}; expected a list of JSON schemas of "
                "functions, or its JSON. Rename the column if it is something else"
            )
        return msgspec.structs.replace(self.template, tools=without_nulls(found))

    def _token_ids(self, prompts: list[Any], templates: list[ChatTemplate], numbers: Sequence[int]) -> list[list[int]]:
        """Texts get the special tokens that the tokenizer adds, conversations those of their template alone."""
        token_ids: list[list[int]] = [[]] * len(prompts)
        for is_plain in (True, False):
            places = [place for place, prompt in enumerate(prompts) if isinstance(prompt, str) == is_plain]
            if not is_plain and not self.template.has_texts:
                encoded = [self._templated(templates[p].prompt_ids, prompts[p], numbers[p]) for p in places]
            else:
                texts = [
                    prompts[p] if is_plain else self._templated(templates[p].prompt_text, prompts[p], numbers[p])
                    for p in places
                ]
                encoded = self.template.tokenizer(texts, add_special_tokens=is_plain)["input_ids"] if texts else []
                encoded = [self._with_one_begin(ids) for ids in encoded]
            for place, ids in zip(places, encoded, strict=True):
                token_ids[place] = list(ids)
        for number, ids in zip(numbers, token_ids, strict=True):
            if not ids:
                raise DataError(
                    f"the prompt in row {number} of {self.source_name} has no tokens; expected at least one, remove it"
                )
        return token_ids

    def _check_roles(self, prompts: list[Any], templates: list[ChatTemplate], numbers: Sequence[int]) -> None:
        """Many templates leave out, without a word, what a role says that they do not know. Raises DataError."""
        checked = {"user"}  # once a batch
        for prompt, template, number in zip(prompts, templates, numbers, strict=True):
            if isinstance(prompt, str) or not template.turns.goes_on:  # an agent renders its own
                continue
            for place, message in enumerate(prompt):
                if message["role"] in checked or not message["content"] or message.get("tool_calls"):
                    continue
                checked.add(message["role"])
                if not template.shows(prompt, place):
                    raise DataError(
                        f"row {number} of {self.source_name}: the chat template leaves out what the role {message['role']!r} says "
                        f"({str(message['content'])[:60]!r}); give the message a role that it shows, such as 'system', or take another model"
                    )

    def _with_one_begin(self, token_ids: list[int]) -> list[int]:
        """A text that was rendered before begins with what the tokenizer puts before texts."""
        begin = self.template.tokenizer.bos_token_id
        return token_ids[1:] if begin is not None and token_ids[:2] == [begin, begin] else token_ids

    def _templated(self, render: Callable[[list[Message]], Any], messages: list[Message], number: int) -> Any:
        try:
            return render(messages)
        except DataError as error:
            raise DataError(f"row {number} of {self.source_name}: {error}") from error


def with_system_prompt(prompt: Any, config: DataConfig) -> Any:
    """Return the prompt that the model sees; a conversation with a system message of its own keeps that one."""
    if config.system_prompt is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not config.system_prompt or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": config.system_prompt}, *messages]


def without_nulls(value: Any) -> Any:
    """As a person would have written it: files of columns give every object each key that one of them has."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def digest(row: Row, token_ids: Sequence[int]) -> int:
    """Of what is asked and what the reward functions see; the same in every process."""
    text = json.dumps(row, sort_keys=True, default=_plain)
    hashed = xxhash.xxh3_64_digest(np.array(token_ids, np.int32).tobytes() + text.encode())
    return int.from_bytes(hashed, "little", signed=True)


def _plain(value: Any) -> Any:
    """A value that JSON does not know: a text of it without addresses."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)):
        return str(value)
    return type(value).__name__


# --- of a whole source -------------------------------------------------------------------------------------------
def encode_source(source: Source, config: DataConfig, template: ChatTemplate) -> Encoded:
    """Encode all rows, or find them encoded. Raises DataError for the first row that cannot be."""
    encoder = Encoder(source.name, config, template)
    if source.fingerprint is None:
        columns: dict[str, list[Any]] = {"token_ids": [], "num_tokens": [], "digest": []}
        for start in range(0, len(source), ROWS_AT_ONCE):
            rows = source.rows[start : start + ROWS_AT_ONCE]
            for name, values in encoder.encode(rows, range(start, start + len(rows))).items():
                columns[name] += values
        return Encoded(columns["token_ids"], np.array(columns["num_tokens"]), np.array(columns["digest"]))
    dataset = _mapped(source, encoder)
    as_arrays = dataset.with_format("numpy")
    return Encoded(dataset.select_columns("token_ids"), as_arrays["num_tokens"][:], as_arrays["digest"][:])


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
    """Another one for whatever would be encoded otherwise; None: the tokenizer cannot be told from another."""
    import transformers

    config, tokenizer = encoder.config, encoder.template.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts = [
        ENCODING, transformers.__version__, source.fingerprint, len(source), type(tokenizer).__name__, backend.to_str(),
        tokenizer.chat_template, tokenizer.special_tokens_map, config.prompt_column, config.system_prompt,
        config.chat_template_kwargs, encoder.template.tools, encoder.template.turns.goes_on, config.too_long == "truncate" and config.max_prompt_tokens,
    ]  # fmt: skip
    return xxhash.xxh3_128(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
