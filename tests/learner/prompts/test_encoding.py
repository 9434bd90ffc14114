"""Encoding of rows: the cache, and the handling of overlong prompts, which keeps ids and order."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from learner.config import DataConfig
from learner.prompts.chat_template import ChatTemplate
from learner.prompts.encoding import Encoder, digest
from learner.prompts.prompts import Prompt, Prompts
from protocol.errors import DataError
from tests.learner.prompts.data_files import CHAT_TEMPLATE, make_tokenizer

OfRows = Callable[..., Prompts]


def row_of(text: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "system", "content": "7"}, {"role": "user", "content": text}], **columns}


def in_order(prompts: Prompts) -> list[Prompt]:
    return [prompts.prompt_at(position) for position in range(len(prompts))]


def forbid_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise AssertionError("encoded again")

    monkeypatch.setattr(Encoder, "encode", fail)


def test_texts_and_conversations_have_the_token_ids_of_the_plain_tokenizer(
    tokenizer: PreTrainedTokenizerBase, of_rows: OfRows
) -> None:
    rows = [
        {"prompt": "1+1="},
        row_of("2", answer=[1, {"a": None}]),
        {"prompt": "3=", "answer": 4.5},
        row_of("44"),
    ]
    for prompt, row in zip(in_order(of_rows(*rows)), rows, strict=True):
        if isinstance(row["prompt"], str):
            expected = tokenizer(row["prompt"])["input_ids"]
        else:
            encoded: Any = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)
            expected = encoded["input_ids"]
        assert (prompt.token_ids, prompt.prompt) == (expected, row["prompt"])
        assert prompt.columns == {name: value for name, value in row.items() if name != "prompt"}


def test_the_second_start_encodes_nothing(
    tokenizer: PreTrainedTokenizerBase, sources: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [DataConfig(**source) for source in sources([row_of(str(number), answer="s") for number in range(30)])]
    first = [Prompts(config, tokenizer, 0) for config in configs]
    forbid_encoding(monkeypatch)
    second = [Prompts(config, make_tokenizer(), 0) for config in configs]
    for one, other in zip(first, second, strict=True):
        assert in_order(one) == in_order(other) and np.array_equal(one.digests, other.digests)


@pytest.mark.parametrize(
    "changed",
    [
        {"system_prompt": "9"}, {"prompt_column": "other"}, {"num_prompts": 3},
        {"chat_template_kwargs": {"thinks": True}},
        {"max_prompt_tokens": 3, "overlong_prompts": "truncate"}, "template", "row",
    ],
    ids=str,
)  # fmt: skip
def test_changed_inputs_are_encoded_again(of_rows: OfRows, monkeypatch: pytest.MonkeyPatch, changed: Any) -> None:
    rows = [row_of(str(number), other="5", of=str(changed)) for number in range(4)]
    of_rows(*rows)
    forbid_encoding(monkeypatch)
    of_rows(*rows)
    config = changed if isinstance(changed, dict) else {}
    if changed == "template":
        config = {"spoken_by": make_tokenizer(f"{CHAT_TEMPLATE}=")}
    elif changed == "row":
        rows[-1] = row_of("8")
    with pytest.raises(AssertionError, match="encoded again"):
        of_rows(*rows, **config)


def test_several_processes_encode_the_same_and_an_edit_does_not_reach_a_running_run(
    of_rows: OfRows,
) -> None:
    rows = [row_of(str(number), answer="w") for number in range(50)]
    prompts = of_rows(*rows, num_workers=2)
    before = in_order(prompts)
    assert before == in_order(of_rows(*rows, row_of("1"), num_prompts=50)) == in_order(prompts)


def test_a_template_with_a_clock_shows_the_same_day_every_day(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ strftime_now('%d') }}{{ messages[0].content }}")
    assert tokenizer.decode(ChatTemplate(tokenizer, {}, []).token_ids([{"role": "user", "content": ">"}])) == "26>"


def test_keys_reach_the_chat_template(tokenizer: PreTrainedTokenizerBase, of_rows: OfRows) -> None:
    for keys, shown in (({}, "=7=+1>"), ({"thinks": True}, "=7=+1>,")):
        assert tokenizer.decode(of_rows(row_of("1"), chat_template_kwargs=keys).prompt_at(0).token_ids) == shown


def test_a_hub_dataset_is_loaded_at_its_revision(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    texts = []

    def load(name: str, *arguments: Any, **options: Any) -> Any:
        texts.append((name, *arguments, options))
        return datasets.Dataset.from_list([{"prompt": "1"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    Prompts(DataConfig(dataset="org/name", dataset_config="main", revision="0f3c"), tokenizer, 0)
    assert texts == [("org/name", "main", {"split": "train", "revision": "0f3c"})]


# --- too long ----------------------------------------------------------------------------------------------------

LENGTHS = [3, 5, 2, 7, 4, 6]
OF_LENGTHS = [{"prompt": "1234567"[:length], "answer": length} for length in LENGTHS]


def test_overlong_prompts_are_dropped_and_others_keep_their_ids(
    of_rows: OfRows, caplog: pytest.LogCaptureFixture
) -> None:
    config = {"max_prompt_tokens": 4, "overlong_prompts": "drop", "shuffle": True}
    prompts = of_rows(*OF_LENGTHS, **config)
    assert len(prompts) == 3
    epochs = [[prompts.row_at(3 * epoch + i) for i in range(3)] for epoch in range(6)]
    assert all(sorted(rows) == [0, 2, 4] for rows in epochs)
    assert [prompt.columns["answer"] for prompt in in_order(prompts)] == [LENGTHS[row] for row in epochs[0]]
    assert prompts.longest() == (4, 4) and prompts.metrics == {"data/dropped_prompts": 3.0}
    again = of_rows(*OF_LENGTHS, **config)
    assert [again.row_at(position) for position in range(18)] == [row for rows in epochs for row in rows]
    (line,) = caplog.messages[:1]
    assert "dropped 3 of 6 prompts with more than learner.data.max_prompt_tokens = 4 tokens" in line
    assert "row 1 of" in line
    none_dropped = of_rows(*OF_LENGTHS, max_prompt_tokens=7, overlong_prompts="drop")
    assert none_dropped.metrics == {"data/dropped_prompts": 0.0} and of_rows(*OF_LENGTHS).metrics == {}


def test_overlong_prompts_are_truncated_at_the_start(tokenizer: PreTrainedTokenizerBase, of_rows: OfRows) -> None:
    prompts = of_rows(*OF_LENGTHS, max_prompt_tokens=4, overlong_prompts="truncate")
    texts = [tokenizer.decode(prompt.token_ids) for prompt in in_order(prompts)]
    assert texts == ["123", "2345", "12", "4567", "1234", "3456"]
    assert [prompt.prompt for prompt in in_order(prompts)] == [row["prompt"] for row in OF_LENGTHS]
    assert prompts.longest()[1] == 4 and prompts.metrics == {"data/truncated_prompts": 3.0}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"max_prompt_tokens": 4}, r"row 1 of .*rows.jsonl has 5 tokens, more than learner.data.max_prompt_tokens = 4; "
                                   r"3 of 6 prompts are longer. Raise it, filter .*learner.data.overlong_prompts"),
        ({"max_prompt_tokens": 1, "overlong_prompts": "drop"},
            r"every prompt of .* has more than learner\.data\.max_prompt_tokens = 1"),
    ],
)  # fmt: skip
def test_overlong_prompts_are_an_error_with_their_number_and_one_prompt_must_remain(
    of_rows: OfRows, config: dict[str, Any], problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        of_rows(*OF_LENGTHS, **config)


# --- digests -----------------------------------------------------------------------------------------------------


def test_a_digest_depends_on_token_ids_and_columns_and_not_on_addresses() -> None:
    row = {"prompt": "1", "answer": 2, "image": object(), "raw": b"\0"}
    same = {"raw": b"\0", "image": object(), "answer": 2, "prompt": "1"}
    assert digest(row, [1, 2]) == digest(same, [1, 2])
    others = [digest(row, [1, 3]), digest(row | {"answer": 3}, [1, 2]), digest(row | {"raw": b"\1"}, [1, 2])]
    assert digest(row, [1, 2]) not in others
