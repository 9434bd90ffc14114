"""The table of metrics lists exactly the metrics of the code, and its remedies name existing keys."""

import ast
import re
from pathlib import Path

from learner.config import LearnerRun
from protocol.config_keys import keys_of

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs/metrics.md"
OVERVIEW, _, REFERENCE = PAGE.read_text().partition("\n## Rewards and data\n")
"""The table of the most important metrics, and the tables of all metrics."""


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of each row that starts with a metric."""
    lines = [line for line in text.splitlines() if re.match(r"\| `[a-z_]+/", line)]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def metrics_of(rows: list[list[str]]) -> set[str]:
    return {name for row in rows for name in re.findall(r"`([a-z_]+/[a-z_0-9<>]+)`", row[0])}


ROWS = rows_of(REFERENCE)
DOCUMENTED = metrics_of(ROWS)
NO_METRIC = {"application/json", "text/html", "perf/train_tflop"}
"""Media types, and a value that the controller removes from the metrics."""


def names_in(path: Path) -> set[str]:
    """Return the strings of the form a/b; placeholders are <>."""
    found = set()
    formatted: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.JoinedStr):
            formatted |= {id(part) for part in node.values}
            found.add("".join(str(part.value) if isinstance(part, ast.Constant) else "<>" for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in formatted:
            found.add(node.value)
    return {name for name in found if re.fullmatch(r"[a-z_]+/([a-z_0-9]*<>)?[a-z_0-9]*(?<!/)", name)}


IN_CODE = {
    name for path in (ROOT / "learner").rglob("*.py") if "starter" not in path.parts for name in names_in(path)
} - NO_METRIC


def is_of(name: str, pattern: str) -> bool:
    """Return whether a name matches a pattern. Both may have placeholders."""
    left, right = re.sub("<[a-z]*>", "<>", name), re.sub("<[a-z]*>", "<>", pattern)
    return left == right or re.fullmatch(re.escape(right).replace("<>", "[a-z_0-9]+"), left) is not None


def test_the_tables_list_exactly_the_metrics_of_the_code() -> None:
    missing = [name for name in IN_CODE if not any(is_of(name, one) or is_of(one, name) for one in DOCUMENTED)]
    unknown = [name for name in DOCUMENTED if not any(is_of(name, pattern) for pattern in IN_CODE)]
    assert (sorted(missing), sorted(unknown)) == ([], [])


def test_a_metric_with_a_healthy_range_has_a_remedy_or_an_automatic_bound() -> None:
    assert len(ROWS) > 40 and {len(row) for row in ROWS} == {5}
    without = [row[0] for row in ROWS if row[3] and not row[4]]
    assert without == ["`staleness/mean`, `staleness/max`"], "admission bounds staleness"


def test_the_metrics_to_start_with_are_in_the_tables_of_all_metrics() -> None:
    named = metrics_of(rows_of(OVERVIEW))
    assert named and named <= DOCUMENTED


def test_remedies_name_existing_keys() -> None:
    keys = set(keys_of(LearnerRun))
    named = set(re.findall(r"`(learner\.[a-z_.]+)(?: = [^`]*)?`", PAGE.read_text()))
    sections = {key.rpartition(".")[0] for key in keys}
    assert named and named <= keys | sections
