"""The reward for mathematics: golds as competition datasets write them, and hand-judged pairs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from learner.rewards.builtin.mathematics import math_equivalence

GOLDS = r"""
2\sqrt{3}  3\pi  \frac{1}{2}  -\frac{2}{3}  \frac{\sqrt{3}}{2}  3\frac{1}{2}  \frac34  \dfrac{\pi}{4}  (1,2)  (3,-1,4)
[0,\infty)  (-\infty,2]\cup[5,\infty)  \{1,2,3\}  1,2,3  \pm 3  x^2+1  (x-1)(x+2)  \frac{a+b}{2}  x=5  3x+2y=7  x>3
\begin{pmatrix} 1 \\ 2 \end{pmatrix}  10\%  \$18.50  5\text{ cm}  45^\circ  1{,}000  0.5  -7  2^{10}  10^{-3}
1.5\times10^{3}  \sqrt[3]{7}  \log_2 3  e^{2}  1+2i  12!  \binom{5}{2}  100_8  \text{even}  \text{(B)}
"""
"""LaTeX without delimiters, as in MATH. Separated by two spaces."""


def pairs() -> Iterator[list[str]]:
    """Yield gold, completion, "right" or "wrong", and optionally why math-verify disagrees."""
    for line in (Path(__file__).parent / "math_pairs.tsv").read_text().splitlines():
        if not line.startswith("#"):
            gold, completion, *more = line.split("\t")
            yield [gold, completion.replace("\\n", "\n") if "####" in completion else completion, *more]


def reward(gold: str, completion: str) -> float | None:
    return math_equivalence(completions=[completion], answer=[gold])[0]


@pytest.mark.parametrize("gold", GOLDS.replace("\n", "  ").split("  ")[1:-1])
def test_the_gold_is_correct_in_a_box_between_dollars_and_bare(gold: str) -> None:
    completions = [f"So it is \\boxed{{{gold}}}.", f"The final answer is ${gold}$.", gold]
    assert [reward(gold, completion) for completion in completions] == [1.0, 1.0, 1.0]


def test_pairs_are_judged_as_by_hand() -> None:
    judged = {(gold, completion): verdict for gold, completion, verdict, *limit in pairs() if not limit}
    assert len(judged) > 200 and set(judged.values()) == {"right", "wrong"}
    given = {pair: "right" if reward(*pair) else "wrong" for pair in judged}
    assert {pair: verdict for pair, verdict in given.items() if judged[pair] != verdict} == {}


def test_a_gold_can_have_delimiters() -> None:
    golds = {r"$2\sqrt{3}$": r"\sqrt{12}", r"\boxed{3\pi}": r"3\pi", r"It is \(7\).": "7", "$18.50": "18.5"}
    assert [reward(gold, f"\\boxed{{{answer}}}") for gold, answer in golds.items()] == [1.0] * 4
    assert [reward(gold, r"\boxed{2}") for gold in golds] == [0.0] * 4


def test_an_empty_gold_cannot_be_scored() -> None:
    assert reward("", r"\boxed{2}") is None
