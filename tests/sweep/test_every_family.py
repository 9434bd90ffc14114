"""Every causal family of the installed transformers: right, or refused by name. `python -m tests.sweep` prints the table."""

import pytest

from tests.sweep.families import FAMILIES
from tests.sweep.report import FLOAT32_ONLY, NOT_BUILT, REFUSED, problem_of
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
    assert {*REFUSED, *FLOAT32_ONLY, *NOT_BUILT} <= set(FAMILIES)
