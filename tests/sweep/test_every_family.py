"""Every causal family of the installed transformers is correct, or is rejected by name."""

from pathlib import Path

import pytest

from tests.sweep.families import FAMILIES
from tests.sweep.report import TIED, by_way, kept_visits, problem_of
from tests.sweep.visit import visit_in_process

IN_CI = ("qwen2", "gemma2", "gpt_oss", "llama4_text", "falcon_h1")
"""Families that CI checks: packed, with a cap, with sinks, in chunks, with a state. All families take minutes."""


@pytest.mark.system
@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family in IN_CI else pytest.mark.slow) for family in FAMILIES]
)
def test_a_family_has_the_logprobs_of_eager_attention_or_is_refused_by_name(family: str) -> None:
    assert problem_of(visit_in_process(family)) is None


def test_the_recorded_results_cover_all_families_as_expected_and_are_in_the_docs() -> None:
    kept = kept_visits()
    assert {*kept} == {*FAMILIES} > TIED
    assert [problem for visit in kept.values() if (problem := problem_of(visit))] == []
    page = (Path(__file__).parents[2] / "docs/model-families.md").read_text()
    assert by_way(list(kept.values())) in page
