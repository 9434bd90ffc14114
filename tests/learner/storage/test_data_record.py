"""A resume asks the prompts that the run began with, or is refused with the row that changed."""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from learner.config import DataConfig
from learner.policy.model import load_tokenizer
from learner.prompts.prompts import Prompts
from learner.storage.run_dir import check_data, record_data
from learner.train import train
from protocol.errors import DataError
from protocol.model_files import resolve_model
from tests.learner.model_engine import tiny_server
from tests.learner.runs import make_run, metrics_of

PROMPTS = ["1111>", "2222>", "3333>", "4444>", "5555>", "6666>"]


def write(path: Path, prompts: Sequence[str], answer: str = "9") -> str:
    path.write_text("".join(json.dumps({"prompt": prompt, "answer": answer}) + "\n" for prompt in prompts))
    return str(path)


def read(path: str, **keys: object) -> Prompts:
    return Prompts(DataConfig(path=path, **keys), load_tokenizer(resolve_model("tiny:digits")), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("now", "answer", "keys", "problem"),
    [
        (PROMPTS, "9", {}, None),
        ([*PROMPTS, "7777>"], "9", {"num_prompts": 6}, None),
        ([*PROMPTS[:2], *PROMPTS[3:]], "9", {}, r"row 2 is the first changed row .*Restore the data.*learner\.data\.revision"),
        (PROMPTS, "8", {}, "row 0 is the first changed row"),
        (PROMPTS, "9", {"max_prompt_tokens": 4, "overlong_prompts": "truncate"}, "row 0 is the first changed row"),
        (PROMPTS[:-1], "9", {}, "1 of its 6 prompts are missing at the end"),
        ([*PROMPTS, "7777>"], "9", {},
         r"1 new prompt after the original 6, .*Exclude them with learner\.data\.num_prompts = 6"),
    ],
    ids=["the same", "one left out", "one removed", "a column", "token ids", "the last removed", "one added"],
)  # fmt: skip
def test_other_data_is_refused_with_what_changed_first(
    tmp_path: Path, now: list[str], answer: str, keys: dict[str, object], problem: str | None
) -> None:
    record = tmp_path / "data.digests"
    record_data(record, read(write(tmp_path / "a.jsonl", PROMPTS)))
    assert record.stat().st_size == 8 * len(PROMPTS)
    prompts = read(write(tmp_path / "moved.jsonl", now, answer), **keys)
    if problem is None:
        check_data(record, prompts)
        return
    with pytest.raises(DataError, match=f"{problem}.*start a new run with --run-dir"):
        check_data(record, prompts)


def test_another_limit_would_drop_others(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ["1>", "22>", "333>", "4444>"])
    record_data(tmp_path / "data.digests", read(path, max_prompt_tokens=4, overlong_prompts="drop"))
    with pytest.raises(DataError, match=r"1 new prompt after the original 3"):
        check_data(tmp_path / "data.digests", read(path, max_prompt_tokens=5, overlong_prompts="drop"))


def test_a_run_is_resumed_on_its_data_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path / "a.jsonl", PROMPTS)
    with tiny_server() as server:

        def go_on(steps: int, path: str, *, resume: bool = True, **data: object) -> None:
            train(make_run(tmp_path, server.endpoint, steps=steps, data={"path": path, **data}), resume=resume)

        go_on(1, path, resume=False)
        write(tmp_path / "a.jsonl", [*PROMPTS[:2], *PROMPTS[3:]])
        with pytest.raises(DataError, match=r"a\.jsonl has changed since the run in .*run started: row 2 is the first"):
            go_on(2, path)
        write(tmp_path / "a.jsonl", [*PROMPTS, "7777>"])
        go_on(2, path, num_prompts=6)
        (tmp_path / "run" / "data.digests").unlink()  # as in a run that an earlier version began
        with caplog.at_level(logging.WARNING):
            go_on(3, write(tmp_path / "b.jsonl", PROMPTS))
    assert "data.digests is missing" in caplog.text and (tmp_path / "run" / "data.digests").exists()
    assert len(metrics_of(make_run(tmp_path, server.endpoint))) == 3
