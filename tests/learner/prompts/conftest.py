"""Fixtures for prompts: a tokenizer, and prompts from rows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from learner.config import DataConfig
from learner.prompts.chat_template import TurnFormat
from learner.prompts.prompts import Prompts
from tests.learner.prompts.data_files import make_tokenizer, save_dataset, write_jsonl


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PreTrainedTokenizerBase]:
    """Return a tokenizer in a separate cache directory, without the encoded rows of other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLIPSTREAM_HOME", str(tmp_path_factory.mktemp("home")))
        yield make_tokenizer()


@pytest.fixture
def of_rows(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> Callable[..., Prompts]:
    """Return the prompts of a file with these rows, in order."""

    def made(*rows: Any, tools: Any = list, goes_on: bool = True, spoken_by: Any = tokenizer, **config: Any) -> Prompts:
        settings = DataConfig(path=write_jsonl(tmp_path / "rows.jsonl", rows), **{"shuffle": False} | config)
        return Prompts(settings, spoken_by, 3, tools, TurnFormat(goes_on=goes_on))

    return made


@pytest.fixture
def sources(tmp_path: Path) -> Callable[..., list[dict[str, str]]]:
    """Return the data keys for the same rows as a file and as a dataset on disk."""

    def made(rows: list[dict[str, Any]]) -> list[dict[str, str]]:
        file, dataset = write_jsonl(tmp_path / "a.jsonl", rows), save_dataset(tmp_path / "saved", rows)
        return [{"path": file}, {"dataset": dataset}]

    return made
