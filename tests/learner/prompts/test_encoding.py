"""Rows are encoded once and found again; what is too long is refused, dropped or truncated; ids and order stay."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from learner.config import DataConfig
from learner.prompts.encoding import Encoder, digest
from learner.prompts.prompts import Prompt, Prompts
from protocol.errors import DataError
from tests.learner.prompts.data_files import CHAT_TEMPLATE, make_tokenizer, save_dataset, write_jsonl


def said(text: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "system", "content": "7"}, {"role": "user", "content": text}], **columns}


def in_order(prompts: Prompts) -> list[Prompt]:
    return [prompts.prompt_at(position) for position in range(len(prompts))]


def forbid_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise AssertionError("encoded again")

    monkeypatch.setattr(Encoder, "encode", fail)


def test_texts_and_conversations_get_the_ids_that_the_tokenizer_itself_gives_them(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = [{"prompt": "1+1="}, said("2", answer=[1, {"a": None}]), {"prompt": "3=", "answer": 4.5}, said("44")]
    prompts = Prompts(DataConfig(path=write_jsonl(tmp_path / "a.jsonl", rows), shuffle=False), tokenizer, 0)
    for prompt, row in zip(in_order(prompts), rows, strict=True):
        if isinstance(row["prompt"], str):
            expected = tokenizer(row["prompt"])["input_ids"]
        else:
            encoded: Any = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)
            expected = encoded["input_ids"]
        assert (prompt.token_ids, prompt.prompt) == (expected, row["prompt"])
        assert prompt.columns == {name: value for name, value in row.items() if name != "prompt"}


@pytest.mark.parametrize("kind", ["file", "saved dataset"])
def test_the_second_start_encodes_nothing(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    rows = [said(str(number), answer=kind) for number in range(30)]
    if kind == "file":
        config = DataConfig(path=write_jsonl(tmp_path / "a.jsonl", rows))
    else:
        config = DataConfig(dataset=save_dataset(tmp_path / "saved", rows))
    first = Prompts(config, tokenizer, 0)
    forbid_encoding(monkeypatch)
    second = Prompts(config, make_tokenizer(), 0)
    assert in_order(first) == in_order(second)
    assert np.array_equal(first.digests, second.digests)


@pytest.mark.parametrize(
    "changed",
    [
        {"system_prompt": "9"}, {"prompt_column": "other"}, {"num_prompts": 3}, {"chat_template_kwargs": {"thinks": True}},
        {"max_prompt_tokens": 3, "overlong_prompts": "truncate"}, "template", "row",
    ],
    ids=str,
)  # fmt: skip
def test_whatever_would_be_encoded_otherwise_is_encoded_anew(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: Any
) -> None:
    rows = [said(str(number), other="5", of=str(changed)) for number in range(4)]
    path, keys = write_jsonl(tmp_path / "a.jsonl", rows), changed if isinstance(changed, dict) else {}
    Prompts(DataConfig(path=path), tokenizer, 0)
    if changed == "row":
        write_jsonl(tmp_path / "a.jsonl", [*rows[:-1], said("8")])
    forbid_encoding(monkeypatch)
    with pytest.raises(AssertionError, match="encoded again"):
        Prompts(
            DataConfig(path=path, **keys),
            make_tokenizer(f"{CHAT_TEMPLATE}=") if changed == "template" else tokenizer,
            0,
        )


def test_several_processes_encode_the_same(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    rows = [said(str(number), answer=number) for number in range(50)]
    config = DataConfig(path=write_jsonl(tmp_path / "a.jsonl", rows), num_workers=2)
    alone = DataConfig(path=write_jsonl(tmp_path / "b.jsonl", [*rows, said("1")]), num_prompts=50)
    assert in_order(Prompts(config, tokenizer, 0)) == in_order(Prompts(alone, tokenizer, 0))


def test_an_edit_of_the_file_does_not_reach_a_run_that_goes_on(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    rows = [said(str(number), answer="long before") for number in range(5)]
    prompts = Prompts(DataConfig(path=write_jsonl(tmp_path / "a.jsonl", rows)), tokenizer, 0)
    before = in_order(prompts)
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1"}])
    assert in_order(prompts) == before


def test_keys_reach_the_chat_template(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", [said("1")])
    texts = [
        tokenizer.decode(Prompts(DataConfig(path=path, chat_template_kwargs=keys), tokenizer, 0).prompt_at(0).token_ids)
        for keys in ({}, {"thinks": True})
    ]
    assert texts == ["=7=+1>", "=7=+1>,"]


def test_a_hub_dataset_is_asked_for_at_its_revision(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    asked = []

    def load(name: str, *arguments: Any, **options: Any) -> Any:
        asked.append((name, *arguments, options))
        return datasets.Dataset.from_list([{"prompt": "1"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    Prompts(DataConfig(dataset="org/name", dataset_config="main", revision="0f3c"), tokenizer, 0)
    assert asked == [("org/name", "main", {"split": "train", "revision": "0f3c"})]


# --- too long ----------------------------------------------------------------------------------------------------

LENGTHS = [3, 5, 2, 7, 4, 6]


def of_lengths(path: Path) -> str:
    return write_jsonl(path, [{"prompt": "1234567"[:length], "answer": length} for length in LENGTHS])


def test_prompts_that_are_too_long_are_dropped_and_the_others_keep_their_numbers(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = DataConfig(path=of_lengths(tmp_path / "a.jsonl"), max_prompt_tokens=4, overlong_prompts="drop")
    with caplog.at_level(logging.WARNING):
        prompts = Prompts(config, tokenizer, 3)
    epochs = (
        [[prompts.row_at(3 * epoch + place) for place in range(3)] for epoch in range(6)] if len(prompts) == 3 else []
    )
    assert len(prompts) == 3 and all(sorted(rows) == [0, 2, 4] for rows in epochs)
    assert [prompt.columns["answer"] for prompt in in_order(prompts)] == [LENGTHS[row] for row in epochs[0]]
    assert prompts.longest() == (4, 4) and prompts.metrics == {"data/dropped_prompts": 3.0}
    again = Prompts(config, tokenizer, 3)
    assert [again.row_at(position) for position in range(18)] == [row for rows in epochs for row in rows]
    (line,) = caplog.messages[:1]
    assert "dropped 3 of 6 prompts with more than learner.data.max_prompt_tokens = 4 tokens" in line
    assert "row 1 of" in line


def test_prompts_that_are_too_long_are_asked_without_their_first_tokens(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    config = DataConfig(
        path=of_lengths(tmp_path / "a.jsonl"), max_prompt_tokens=4, overlong_prompts="truncate", shuffle=False
    )
    prompts = Prompts(config, tokenizer, 0)
    asked = [tokenizer.decode(prompt.token_ids) for prompt in in_order(prompts)]
    assert asked == ["123", "2345", "12", "4567", "1234", "3456"]
    assert [prompt.prompt for prompt in in_order(prompts)] == ["1234567"[:length] for length in LENGTHS]
    assert prompts.longest()[1] == 4 and prompts.metrics == {"data/truncated_prompts": 3.0}


def test_what_is_refused_is_counted(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    with pytest.raises(
        DataError,
        match=r"row 1 of .*a.jsonl has 5 tokens, but the limit is 4; .*3 of 6 prompts are longer.*learner.data.overlong_prompts",
    ):
        Prompts(DataConfig(path=of_lengths(tmp_path / "a.jsonl"), max_prompt_tokens=4), tokenizer, 0)


def test_at_least_one_prompt_must_be_left(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    config = DataConfig(path=of_lengths(tmp_path / "a.jsonl"), max_prompt_tokens=1, overlong_prompts="drop")
    with pytest.raises(DataError, match=r"every prompt of .* has more than learner\.data\.max_prompt_tokens = 1"):
        Prompts(config, tokenizer, 0)


def test_dropping_needs_a_limit_that_does_not_depend_on_the_server() -> None:
    with pytest.raises(ValueError, match='overlong_prompts = "drop" needs max_prompt_tokens'):
        DataConfig(task="reverse", overlong_prompts="drop")


# --- digests -----------------------------------------------------------------------------------------------------


def test_a_digest_is_of_ids_and_columns_and_of_no_address() -> None:
    row = {"prompt": "1", "answer": 2, "image": object(), "raw": b"\0"}
    same = {"raw": b"\0", "image": object(), "answer": 2, "prompt": "1"}
    assert digest(row, [1, 2]) == digest(same, [1, 2])
    others = [digest(row, [1, 3]), digest(row | {"answer": 3}, [1, 2]), digest(row | {"raw": b"\1"}, [1, 2])]
    assert digest(row, [1, 2]) not in others
