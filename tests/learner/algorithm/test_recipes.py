"""The table of algorithms: value and gradient of each equal the 50-digit oracle, and those of TRL and verl.

`python -m tests.learner.algorithm.test_recipes` prints it. Rows without a package are compared with the oracle alone.
"""

from typing import NamedTuple

import mpmath
import pytest
import torch

from learner.algorithm.objectives import PICKS, StepTokens
from tests.learner.algorithm import oracle
from tests.learner.algorithm.loss_case import Case, make_case, run, tensors_of
from tests.learner.algorithm.recipes import RECIPES, Recipe
from tests.learner.algorithm.rivals import Rival

TOLERANCE = 2e-6
"""float32, relative to the largest value."""
SEEDS = range(4)


class Row(NamedTuple):
    value: float
    """Of the first case."""
    off_value: float
    off_gradient: float
    """Largest difference over the cases, relative to the largest gradient of a token."""


def case_of(name: str, seed: int) -> Case:
    recipe = RECIPES[name]
    return with_picks(make_case(f"{name} {seed}", recipe.rule, has_proximal=recipe.has_proximal))


def with_picks(case: Case) -> Case:
    """Return the case with the tokens that its objective picks."""
    config = case.rule.loss
    if config.objective not in PICKS:
        return case
    tokens = [(token, c.advantage) for c in case.completions for token in c.tokens]
    columns = zip(*((t.logprob - t.behavior, t.logprob, advantage, 0.0) for t, advantage in tokens), strict=True)
    picked = iter(PICKS[config.objective](StepTokens(*map(torch.tensor, columns)), config).tolist())
    return case._replace(
        completions=[
            c._replace(tokens=tuple(t._replace(picked=next(picked)) for t in c.tokens)) for c in case.completions
        ]
    )


def largest(gradients: list[list[float]]) -> float:
    return max((abs(value) for gradients_T in gradients for value in gradients_T), default=0.0)


def row_of(name: str, rival: Rival | None) -> Row:
    """Compare with a package, or with the oracle."""
    first, off_value, off_gradient = 0.0, 0.0, 0.0
    for seed in SEEDS:
        case = case_of(name, seed)
        found = run(case)
        if rival is None:
            value = float(sum(sum(oracle.terms(case.rule, c)) for c in case.completions))
            expected = [list(map(float, oracle.gradient(case.rule, c))) for c in case.completions]
        else:
            theirs = rival(tensors_of(case))
            value = theirs.loss if theirs.has_same_value else found.loss
            expected = [
                row[list(places)].tolist() for row, places in zip(theirs.gradient_BT, case.positions, strict=True)
            ]
        assert largest(expected) > 1e-3, "the case has no gradient to compare"
        pairs = [
            (a, b)
            for mine, other in zip(found.gradients, expected, strict=True)
            for a, b in zip(mine, other, strict=True)
        ]
        off_value = max(off_value, abs(found.loss - value) / max(1.0, abs(value)))
        off_gradient = max(off_gradient, max(abs(a - b) for a, b in pairs) / largest(expected))
        first = found.loss if seed == 0 else first
    return Row(first, off_value, off_gradient)


PAIRS = [(name, rival) for name, recipe in RECIPES.items() for rival in (None, *recipe.rivals)]


@pytest.mark.parametrize(
    ("name", "rival"), PAIRS, ids=[f"{name}-{rival.name if rival else 'oracle'}" for name, rival in PAIRS]
)
def test_an_algorithm_has_the_value_and_gradient_of_its_paper_and_of_other_packages(
    name: str, rival: Rival | None
) -> None:
    with mpmath.workdps(oracle.DIGITS):
        row = row_of(name, rival)
    assert row.off_value < TOLERANCE and row.off_gradient < TOLERANCE, row


def source(recipe: Recipe, rival: Rival | None) -> str:
    paper = recipe.paper if not recipe.paper[0].isdigit() else f"arXiv {recipe.paper}"
    return f"{paper}, 50 digits" if rival is None else rival.name


def main() -> None:
    print(f"{'algorithm':26}{'value':>12}{'|Δ value|':>12}{'|Δ gradient|':>14}  source of the oracle")
    for name, rival in PAIRS:
        try:
            with mpmath.workdps(oracle.DIGITS):
                row = row_of(name, rival)
        except pytest.skip.Exception as absent:
            print(f"{name:26}{absent.msg}")
            continue
        numbers = f"{row.value:>12.6f}{row.off_value:>12.1e}{row.off_gradient:>14.1e}"
        print(f"{name:26}{numbers}  {source(RECIPES[name], rival)}")


if __name__ == "__main__":
    main()
