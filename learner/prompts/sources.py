"""Sources of rows: a built-in task, a JSONL file, or a `datasets` dataset.

The few rows of a task are kept in memory. A file is copied into the cache of `datasets`, once for each of its
contents. The run memory-maps this copy, so edits of the file do not affect it.

Invariant: a row has the same number at every start.
"""

import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from learner.config import DataConfig
from learner.prompts.tasks import make_rows, make_untrained_rows
from protocol.errors import DataError

Row = dict[str, Any]

LONE_SURROGATE = re.compile(r"[\ud800-\udfff]")
"""Half of a pair, such as an emoji that was cut as UTF-16: JSON can spell it, but nothing can store or tokenize it."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Rows of data, by number."""

    name: str
    """Name of the source, for messages."""
    rows: Any
    """List of rows, or a dataset of rows."""
    fingerprint: str | None = None
    """Value that changes with the rows; None: the rows are in memory."""
    is_file: bool = False
    """Whether each row of the dataset holds a line of a JSONL file and its line number."""
    prompt_column: str

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, number: int) -> Row:
        """Return a row. Raises DataError for an invalid line."""
        row = self.rows[number]
        if self.is_file:
            return _parsed(row["line"], f"{self.name}:{row['number']}", self.prompt_column)
        return dict(row)

    def rows_of(self, batch: dict[str, list[Any]]) -> list[Row]:
        """Return the rows of a batch. Raises DataError for an invalid line."""
        if self.is_file:
            lines = zip(batch["line"], batch["number"], strict=True)
            return [_parsed(line, f"{self.name}:{number}", self.prompt_column) for line, number in lines]
        return [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]

    def first(self, num_rows: int) -> "Source":
        rows = self.rows[:num_rows] if self.fingerprint is None else self.rows.select(range(num_rows))
        return msgspec.structs.replace(self, rows=rows)


def open_source(config: DataConfig, seed: int, trained: DataConfig | None = None) -> Source:
    """Return the rows that the config names. Raises DataError with the remedy.

    `trained`: data that a run trains on. A task leaves out the prompts that it has there.
    """
    if config.task is not None:
        source = _task(config, config.task, seed, trained)
    elif config.path is not None:
        source = _file(config, Path(config.path).expanduser())
    else:
        source = _dataset(config)
    if not len(source):
        raise DataError(f"{source.name} has no prompts; expected at least one row")
    if config.num_prompts is None or config.num_prompts >= len(source):
        return source
    return source.first(config.num_prompts)


def _task(config: DataConfig, task: str, seed: int, trained: DataConfig | None) -> Source:
    options = {} if config.num_digits is None else {"num_digits": config.num_digits}
    if trained is not None and trained.task == task:
        rows = make_untrained_rows(task, config.num_prompts, seed, trained.num_prompts, **options)
    else:
        rows = make_rows(task, config.num_prompts, seed, **options)
    _check_column(rows[0], config.prompt_column, f"task {task!r}")
    return Source(name=f"task {task!r}", rows=rows, prompt_column=config.prompt_column)


# --- a JSONL file ---
def _file(config: DataConfig, path: Path) -> Source:
    import datasets

    try:
        content = _content(path)
        if next(_lines(path), None) is None:
            raise DataError(f"{path} has no prompts; expected at least one row")
        rows = datasets.Dataset.from_generator(
            _lines,
            features=datasets.Features({"line": datasets.Value("string"), "number": datasets.Value("int64")}),
            gen_kwargs={"path": path},
            cache_dir=str(cache_directory()),
            fingerprint=f"slipstream-{content}",
        )
    except datasets.exceptions.DatasetGenerationError as error:
        raise _unreadable(path, error.__cause__ or error) from error
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(path, error) from error
    return Source(name=str(path), rows=rows, prompt_column=config.prompt_column, fingerprint=content, is_file=True)


def _content(path: Path) -> str:
    """Return a hash of a file's bytes."""
    hashed = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 22):
            hashed.update(chunk)
    return hashed.hexdigest()


def cache_directory() -> Path:
    """Return the cache directory of `datasets`. Raises DataError if it is unwritable."""
    import datasets

    path = Path(datasets.config.HF_DATASETS_CACHE)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the cache directory of datasets cannot be created: {error}; set HF_DATASETS_CACHE to another directory"
        ) from error
    if not os.access(path, os.W_OK):
        raise DataError(
            f"the cache directory of datasets, {path}, is not writable; set HF_DATASETS_CACHE to another directory"
        )
    return path


def _unreadable(path: Path, error: BaseException) -> DataError:
    return DataError(f"learner.data.path = {str(path)!r} cannot be read: {error}; expected a JSONL file")


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    # "sig": without the mark that Windows puts first. No other line end: a text may contain U+2028.
    with path.open(encoding="utf-8-sig", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield {"line": line, "number": number}


def _parsed(line: str, where: str, prompt_column: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON: {error}; expected one JSON object per line") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} is a JSON {type(row).__name__}; expected one object per line, as in {{'prompt': …}}")
    if "\\ud" in line.lower() and (half := LONE_SURROGATE.search(json.dumps(row, ensure_ascii=False))):
        raise DataError(
            f"{where} has half of a surrogate pair, \\u{ord(half[0]):04x}, which is no character; expected texts that "
            "UTF-8 can encode. Complete the pair, or remove the row"
        )
    _check_column(row, prompt_column, where)
    return row


def _check_column(columns: Iterable[str], prompt_column: str, where: str) -> None:
    if prompt_column not in columns:
        raise DataError(
            f"{where} has no column {prompt_column!r}; its columns are: {', '.join(columns)}. "
            "Set learner.data.prompt_column to the column with the prompts"
        )


# --- a dataset ---
def _dataset(config: DataConfig) -> Source:
    import datasets

    name = config.dataset or ""
    path = Path(name).expanduser()
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            rows = _saved_rows(datasets.load_from_disk(str(path)), config)
        else:
            local = str(path) if path.is_dir() else name
            rows = datasets.load_dataset(local, config.dataset_config, split=config.split, revision=config.revision)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        reason = (isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__) or error
        raise DataError(
            f"learner.data.dataset = {name!r} (dataset_config {config.dataset_config!r}, split {config.split!r}, "
            f"revision {config.revision!r}) cannot be loaded: {reason}. Expected a hub name, or a local path written "
            "by save_to_disk or with data files"
        ) from error
    _check_column(rows.column_names, config.prompt_column, f"dataset {name!r}")
    return Source(
        name=f"dataset {name!r} ({config.split})",
        rows=rows,
        prompt_column=config.prompt_column,
        fingerprint=rows._fingerprint,
    )


def _saved_rows(loaded: Any, config: DataConfig) -> Any:
    """Return the split of what save_to_disk wrote: one of several, or the only one, which may have no name."""
    import datasets

    for key in ("dataset_config", "revision"):
        if value := getattr(config, key):
            raise DataError(
                f"learner.data.{key} = {value!r} selects nothing in {config.dataset!r}, a dataset written by "
                f"save_to_disk; unset {key}"
            )
    if isinstance(loaded, datasets.Dataset):
        loaded = {config.split if loaded.split is None else str(loaded.split): loaded}
    if config.split not in loaded:
        raise DataError(
            f"dataset {config.dataset!r} has no split {config.split!r}; its splits are: {', '.join(loaded)}. "
            "Set learner.data.split"
        )
    return loaded[config.split]
