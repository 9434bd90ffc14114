"""The mutants of `python -m tests.bench.mutants`, all of which are valid Python."""

import ast
from pathlib import Path

import pytest

from tests.bench.mutants import mutants_of, report, sample

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("line", "broken"),
    [
        ("y = 1 <= x is z", {"compare y = (1 < x is z)", "compare y = (1 <= x is not z)", "constant y = 2 <= x is z"}),
        ("y = x // z", {"arithmetic y = (x * z)"}),
        ("x += z", {"arithmetic x -= z"}),
        ("y = x and z", {"boolean y = (x or z)"}),
        ("y = not x", {"not y = (x)"}),
        ("y = x if z() else self", {"condition y = x if (not (z())) else self"}),
        ("y = [z for z in x if z]", {"condition y = [z for z in x if (not (z))]"}),
        ("while x: z()", {"condition while (not (x)): z()", "drop while x: pass"}),
        ("return False", {"constant return True", "return return None"}),
        ("return None", {"return return True"}),
        ("y = 0.5", {"constant y = 1.5"}),
        ("await x(z)", {"drop pass"}),
        ("self.y = x", {"drop pass"}),
        ("self.y: list[int] = x", {"drop pass"}),
        ("raise ValueError(x + 1)", {"drop pass"}),
        ("log.info('%d', x + 1)", set()),
        ("assert x > 1", set()),
        ("y = f'{x + 1}'", set()),
        ("'''A docstring'''", set()),
        ("y: Literal[1] = x", set()),
        ("if TYPE_CHECKING: y = 1", set()),
        ("if __name__ == '__main__': x()", set()),
    ],
)
def test_a_statement_has_every_mutant_except_in_texts_and_types(line: str, broken: set[str]) -> None:
    source = f"async def f(self, x=1, *, z: int = 2) -> Literal[3]:\n    {line}\n".encode()
    mutants = mutants_of("a.py", source)
    sources = [mutant.apply(source).decode() for mutant in mutants]
    assert {
        f"{mutant.kind} {text.splitlines()[1].strip()}" for mutant, text in zip(mutants, sources, strict=True)
    } == broken
    assert all(ast.parse(text) for text in sources) and len({mutant.name for mutant in mutants}) == len(mutants)


def test_a_mutant_has_the_name_of_its_place_and_the_lines_of_its_statement() -> None:
    source = "LIMIT = 5\n\ndef f(x):\n    return g(\n        'µ', x >\n        LIMIT,\n    )\n"
    compare, value = sorted(mutants_of("a.py", source.encode()), key=lambda mutant: mutant.kind)
    assert (compare.name, value.name) == ("a.py:6:8:compare", "a.py:4:4:return")
    assert compare.statement == range(4, 8)
    assert compare.apply(source.encode()).decode() == source.replace("x >\n        LIMIT", "(x >= LIMIT)")


def test_a_seed_always_gives_the_same_mutants_and_each_is_python() -> None:
    mutants = sample(ROOT, ["learner/storage", "protocol/codec.py"], 50, seed=1)
    assert mutants == sample(ROOT, ["learner/storage", "protocol/codec.py"], 50, seed=1)
    assert mutants != sample(ROOT, ["learner/storage", "protocol/codec.py"], 50, seed=2)
    for mutant in mutants:
        ast.parse(mutant.apply((ROOT / mutant.path).read_bytes()))


def test_the_report_counts_by_folder_and_shows_unnoticed_mutants() -> None:
    mutants = sample(ROOT, ["learner/storage"], 3, seed=1)
    verdicts = dict(zip([mutant.name for mutant in mutants], ("noticed", "unnoticed", "not run"), strict=True))
    lines = report(ROOT, mutants, verdicts, ["learner/storage", "protocol"]).splitlines()
    assert lines[2:5] == ["| learner/storage | 1 | 1 | 1 |", "| protocol | 0 | 0 | 0 |", "| all | 1 | 1 | 1 |"]
    assert next(line for line in lines if ".py:" in line).startswith(mutants[1].name)
    assert lines[-1] == f"  + {mutants[1].text}"
