"""Prompts: from a built-in task, a JSONL file or a `datasets` dataset to token ids, ready to be sent to the server.

First station of the data's way. All prompts are read, tokenized and checked at the start, so that a bad one stops the
run before it costs anything. Invariant: the prompts are an endless sequence in which every data epoch holds each prompt
exactly once, and what stands at a position depends only on the data and the seed; a resume needs only a number.
"""

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from learner.config import DataConfig
from learner.prompts.tasks import make_rows
from protocol.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

import logging

logger = logging.getLogger(__name__)

DEFAULT_TASK_PROMPTS = 4096
_TOKENIZED_AT_ONCE = 1024


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt.

    Example: Prompt(prompt_id=3, prompt="4821>", token_ids=[7, 11, 5, 4, 13], columns={"answer": "1284"}).
    """

    prompt_id: int
    """The row of the data."""
    prompt: str | list[dict[str, Any]]
    """A text, or the messages that went through the chat template."""
    token_ids: list[int]
    columns: dict[str, Any]
    """Every other column of the row, for the reward functions."""


class Prompts:
    """All prompts of a run, as an endless sequence of positions."""

    def __init__(self, config: DataConfig, tokenizer: "PreTrainedTokenizerBase", seed: int) -> None:
        self._config, self._seed = config, seed
        self._rows = _read_rows(config, seed)
        self._token_ids = _tokenize(self._rows, config, tokenizer)
        _check_lengths(self._token_ids, config)
        logger.info("%d prompts, the longest of %d tokens", len(self), max(map(len, self._token_ids)))

    def __len__(self) -> int:
        return len(self._rows)

    def longest(self) -> tuple[int, int]:
        """Return the row of the longest prompt and its number of tokens."""
        row = max(range(len(self)), key=lambda row: len(self._token_ids[row]))
        return row, len(self._token_ids[row])

    def epoch_of(self, position: int) -> int:
        """Return the data epoch in which a position lies."""
        return position // len(self)

    def row_at(self, position: int) -> int:
        """Return the row of the data at a position of the endless sequence of data epochs."""
        epoch, place = divmod(position, len(self))
        return int(_order(len(self), self._seed, epoch)[place]) if self._config.shuffle else place

    def prompt_at(self, position: int) -> Prompt:
        """Return the prompt at a position of the endless sequence of data epochs."""
        row = self.row_at(position)
        columns = dict(self._rows[row])
        prompt = _with_system_prompt(columns.pop(self._config.prompt_column), self._config)
        return Prompt(prompt_id=row, prompt=prompt, token_ids=self._token_ids[row].tolist(), columns=columns)


@functools.lru_cache(maxsize=8)
def _order(num_prompts: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed % 2**32, epoch]).permutation(num_prompts)


# --- reading -----------------------------------------------------------------------------------------------------
def _read_rows(config: DataConfig, seed: int) -> Sequence[dict[str, Any]]:
    if config.task is not None:
        num_prompts = config.num_prompts or DEFAULT_TASK_PROMPTS
        options = {} if config.num_digits is None else {"num_digits": config.num_digits}
        rows: Any = make_rows(config.task, num_prompts, seed, **options)
    elif config.path is not None:
        rows = _read_jsonl(Path(config.path).expanduser(), config.prompt_column)
    else:
        rows = _read_dataset(config)
    if not len(rows):
        raise DataError(f"{_source(config)} holds no prompts; expected at least one row")
    _check_column(rows[0], config)
    if config.num_prompts is None:
        return rows
    if config.num_prompts > len(rows):
        raise DataError(
            f"learner.data.num_prompts = {config.num_prompts}, but {_source(config)} holds {len(rows)} prompts; lower it"
        )
    return rows[: config.num_prompts] if isinstance(rows, list) else rows.select(range(config.num_prompts))


def _source(config: DataConfig) -> str:
    return config.path or (f"dataset {config.dataset!r}" if config.dataset else f"task {config.task!r}")


def _check_column(row: dict[str, Any], config: DataConfig, where: str = "") -> None:
    if config.prompt_column not in row:
        raise DataError(
            f"{where or _source(config)} has no column {config.prompt_column!r}; its columns are: {', '.join(row)}. "
            "Set learner.data.prompt_column to the one that holds the prompts"
        )


def _read_jsonl(path: Path, prompt_column: str) -> list[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # splitlines would also split at U+2028 inside a text
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"learner.data.path = {str(path)!r} cannot be read: {error}; expected a JSONL file") from error
    config = DataConfig(path=str(path), prompt_column=prompt_column)
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows.append(_parse_line(line, f"{path}:{number}"))
            _check_column(rows[-1], config, where=f"{path}:{number}")
    return rows


def _parse_line(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is not valid JSON: {error}; expected one JSON object per line") from error
    if not isinstance(row, dict):
        raise DataError(
            f"{where} holds a JSON {type(row).__name__}; expected one object per line, as in {{'prompt': …}}"
        )
    return row


def _read_dataset(config: DataConfig) -> Any:
    import datasets

    name = config.dataset or ""
    path = Path(name).expanduser()
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return _pick_split(datasets.load_from_disk(str(path)), config)
        local = str(path) if path.is_dir() else name
        return datasets.load_dataset(local, config.dataset_config, split=config.split)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"learner.data.dataset = {name!r} (dataset_config {config.dataset_config!r}, split {config.split!r}) cannot be "
            f"loaded: {error}. Expected a hub name, or a local path written by save_to_disk or holding data files"
        ) from error


def _pick_split(loaded: Any, config: DataConfig) -> Any:
    import datasets

    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if config.split not in loaded:
        raise DataError(
            f"dataset {config.dataset!r} has no split {config.split!r}; its splits are: {', '.join(loaded)}. "
            "Set learner.data.split"
        )
    return loaded[config.split]


# --- tokenizing --------------------------------------------------------------------------------------------------
def _with_system_prompt(prompt: Any, config: DataConfig) -> Any:
    """Return the prompt that the model sees; a conversation with a system message of its own keeps that one."""
    if config.system_prompt is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if not config.system_prompt or messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": config.system_prompt}, *messages]


def _tokenize(
    rows: Sequence[dict[str, Any]], config: DataConfig, tokenizer: "PreTrainedTokenizerBase"
) -> list[np.ndarray]:
    column = config.prompt_column
    values = (row[column] for row in rows) if isinstance(rows, list) else rows[column]  # type: ignore[call-overload]
    prompts = [_with_system_prompt(_check_prompt(value, row, config), config) for row, value in enumerate(values)]
    token_ids: list[np.ndarray] = []
    for start in range(0, len(prompts), _TOKENIZED_AT_ONCE):
        chunk = prompts[start : start + _TOKENIZED_AT_ONCE]
        if all(isinstance(prompt, str) for prompt in chunk):
            ids = tokenizer(chunk)["input_ids"]
        else:
            ids = [_prompt_ids(prompt, row, config, tokenizer) for row, prompt in enumerate(chunk, start)]
        token_ids.extend(np.array(one, dtype=np.int32) for one in ids)
    return token_ids


def _check_prompt(prompt: Any, row: int, config: DataConfig) -> Any:
    is_conversation = isinstance(prompt, list) and all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt
    )
    if not prompt or not (isinstance(prompt, str) or is_conversation):
        raise DataError(
            f"row {row} of {_source(config)} holds {str(prompt)[:80]!r} ({type(prompt).__name__}) in column "
            f"{config.prompt_column!r}; expected a text or a list of messages with role and content, neither empty"
        )
    return prompt


def _prompt_ids(prompt: Any, row: int, config: DataConfig, tokenizer: "PreTrainedTokenizerBase") -> Any:
    import jinja2

    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if tokenizer.chat_template is None:
        raise DataError(
            f"row {row} of {_source(config)} is a conversation (or learner.data.system_prompt is set), but the tokenizer of "
            f"{tokenizer.name_or_path!r} has no chat template; use an instruct model, add a chat_template to its tokenizer, "
            "or give plain prompts without a system prompt"
        )
    try:
        encoded: Any = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)
    except (jinja2.TemplateError, ValueError) as error:
        raise DataError(f"row {row} of {_source(config)} does not go through the chat template: {error}") from error
    return encoded["input_ids"]


def _check_lengths(token_ids: list[np.ndarray], config: DataConfig) -> None:
    for row, ids in enumerate(token_ids):
        if not len(ids):
            raise DataError(
                f"the prompt in row {row} of {_source(config)} has no tokens; expected at least one, remove it"
            )
        if config.max_prompt_tokens is not None and len(ids) > config.max_prompt_tokens:
            raise DataError(
                f"the prompt in row {row} of {_source(config)} has {len(ids)} tokens, the limit is "
                f"{config.max_prompt_tokens}; raise server.max_model_len (and learner.data.max_prompt_tokens, if set) "
                "or filter the data"
            )
