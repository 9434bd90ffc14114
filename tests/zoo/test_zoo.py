"""Families of models through the whole system on real vLLM; the table in the docs is what was last seen of each."""

from pathlib import Path

import msgspec
import pytest

from tests.zoo.families import FAMILIES
from tests.zoo.report import REFUSED, WITH_ADAPTER, as_expected, table
from tests.zoo.visit import BOUND, Visit, reason, visit

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "tests" / "bench" / "results" / "zoo.json"
VISITS = [*((family, False) for family in FAMILIES), *((family, True) for family in WITH_ADAPTER)]
GOOD = Visit(
    family="llama", parity_at_start=0.0, parity_in_training=0.0, after_last_push=BOUND, moved=1.0, export_in_vllm=0.0
)


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("family", "lora"), VISITS)
def test_a_family_trains_pushes_and_exports_as_expected(tmp_path: Path, family: str, lora: bool) -> None:
    visited = visit(family, tmp_path, lora=lora)
    assert as_expected(visited), msgspec.json.encode(visited).decode()


def test_the_docs_have_the_table_of_the_kept_results() -> None:
    kept = msgspec.json.decode(RESULTS.read_bytes(), type=list[Visit])
    seen = [(one.family, one.lora) for one in kept]
    assert seen == [one for one in VISITS if one in seen] and all(map(as_expected, kept))
    assert table(kept) in (ROOT / "docs" / "model-families.md").read_text()


@pytest.mark.parametrize(
    "changes",
    [
        {"parity_at_start": 2 * BOUND},
        {"parity_in_training": None},
        {"after_last_push": 2 * BOUND},
        {"export_in_vllm": float("nan")},
        {"moved": 0.0},
        {"refused": "some error"},
        {"family": next(iter(REFUSED))},
    ],
)
def test_only_a_family_that_was_trained_and_agrees_everywhere_is_as_expected(changes: dict[str, object]) -> None:
    assert as_expected(GOOD) and not as_expected(msgspec.structs.replace(GOOD, **changes))


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("INFO a ValueError\nValueError: cause\nRuntimeError: effect\nbye\n", "ValueError: cause"),
        ("ValueError: caught\nerror: model: it is quantized (fp8)\n", "error: model: it is quantized (fp8)"),
        (
            "ERROR ModuleNotFoundError: No module named 'x'\nerror: it failed, see the log\n",
            "ModuleNotFoundError: No module named 'x'",
        ),
        ("it says nothing", "it says nothing"),
    ],
)
def test_a_refusal_is_the_line_of_the_log_that_says_why(log: str, expected: str) -> None:
    assert reason(log) == expected
