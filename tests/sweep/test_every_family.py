"""Every causal family of the installed transformers: right, or refused by name. `python -m tests.sweep` prints the table."""

from pathlib import Path

import msgspec
import pytest

from tests.sweep.families import FAMILIES
from tests.sweep.report import FLOAT32_ONLY, NOT_BUILT, REFUSED, TIED, by_way, kept_visits, problem_of
from tests.sweep.visit import visit_in_process

SOON = ("qwen2", "gemma2", "gpt_oss", "llama4_text", "falcon_h1")
"""What every commit tries: packed, with a cap, with sinks, in chunks, with a state; the others take minutes."""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family in SOON else pytest.mark.slow) for family in FAMILIES]
)
def test_a_family_has_the_logprobs_of_eager_attention_or_is_refused_by_name(family: str) -> None:
    assert problem_of(visit_in_process(family)) is None


def test_what_is_expected_names_families_that_there_are() -> None:
    assert {*REFUSED, *FLOAT32_ONLY, *NOT_BUILT, *TIED} <= set(FAMILIES)


@pytest.mark.parametrize(
    ("family", "way"),
    [("llama", "padded (eager)"), ("llama", "packed, packed, refused"), ("falcon_h1", "packed"), ("doge", "packed")],
)
def test_a_family_that_goes_another_way_than_before_is_noticed(family: str, way: str) -> None:
    found = problem_of(msgspec.structs.replace(kept_visits()[family], way=way))
    assert found is not None and "another way than in sweep.json" in found


def test_a_base_in_bfloat16_that_is_off_is_noticed() -> None:
    llama = msgspec.structs.replace(kept_visits()["llama"], bfloat16_base=1e-3)
    assert problem_of(llama) is None
    assert "off in bfloat16" in str(problem_of(msgspec.structs.replace(llama, bfloat16_base=1.0)))


def test_the_table_calls_refused_in_float32_alone_only_what_is_refused_in_both_other_ways() -> None:
    llama = kept_visits()["llama"]
    ways = ("packed, refused, refused", "packed, packed, refused")
    table = by_way([msgspec.structs.replace(llama, way=way) for way in ways])
    assert "| packed, in float32 alone |" in table and "| packed, packed, refused |" in table


def test_the_docs_have_the_kept_table() -> None:
    page = (Path(__file__).parents[2] / "docs/model-families.md").read_text()
    assert by_way(list(kept_visits().values())) in page
