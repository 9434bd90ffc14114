"""Model families in the whole system on real vLLM; the table in the docs has the recorded results."""

from pathlib import Path

import msgspec
import pytest

from tests.zoo.families import FAMILIES
from tests.zoo.visit import WITH_ADAPTER, Visit, table, visit

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "tests" / "bench" / "results" / "zoo.json"
VISITS = [*((family, False) for family in FAMILIES), *((family, True) for family in WITH_ADAPTER)]
IN_CI = ("gemma3", True)
"""The family that CI checks, with an adapter. All families take ten minutes."""


@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("family", "lora"), [pytest.param(*one, marks=[] if one == IN_CI else pytest.mark.slow) for one in VISITS]
)
def test_a_family_trains_syncs_and_exports_as_expected(tmp_path: Path, family: str, lora: bool) -> None:
    visited = visit(family, tmp_path, lora=lora)
    assert visited.is_as_expected, msgspec.json.encode(visited).decode()


def test_the_docs_have_the_table_of_the_kept_results() -> None:
    kept = msgspec.json.decode(RESULTS.read_bytes(), type=list[Visit])
    seen = [(one.family, one.lora) for one in kept]
    assert seen == [one for one in VISITS if one in seen] and all(one.is_as_expected for one in kept)
    assert table(kept) in (ROOT / "docs" / "model-families.md").read_text()
