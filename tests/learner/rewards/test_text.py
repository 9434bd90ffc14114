"""Built-in rewards for text answers: the letter of a choice."""

import pytest

from learner.rewards.builtin.text import multiple_choice


@pytest.mark.parametrize(
    ("completion", "letter"),
    [
        ("B", "B"), ("b", "B"), ("(B)", "B"), ("**B**", "B"), ("B.", "B"), ("$B$", "B"), ("[[B]]", "B"), ("`B`", "B"),
        ("B) Paris", "B"), ("(B) Paris", "B"), ("B: Paris", "B"), ("**B. Paris**", "B"), ("Option B", "B"),
        ("The answer is (B).", "B"), ("the answer is B because it is", "B"), ("The correct answer is: B) 42", "B"),
        ("Answer: **A**", "A"), ("Answer:\nB", "B"), ("final answer: c", "C"), ("#### C", "C"),
        (r"so \boxed{D}", "D"), (r"\boxed{\text{d}}", "D"), (r"\boxed{A} no, \boxed{B}", "B"),
        ("Let me think.\nB: Paris", "B"),
        ("A and B are wrong, the answer is C", "C"), ("<think>A</think>B", "B"), ("<think>the answer is B", None),
        ("The answer is B (Paris)", "B"), ("B, I believe.", "B"), ("B is correct", "B"), ("Option (C)", "C"),
        ("B, as shown", "B"),
        ("A dog", None), ("A dog is an animal", None), ("The answer is A dog", None), ("I think so", None), ("", None),
        ("42", None),
        ("A or B", None), ("A/B", None), ("B, C and D", None), (r"\boxed{A, B}", None), ("the answer is A or B", None),
    ],
)  # fmt: skip
def test_one_letter_is_an_answer_and_two_are_not(completion, letter):
    golds = ["A", "B", "C", "D"]
    assert multiple_choice([completion] * 4, golds) == [float(letter == gold) for gold in golds]


def test_a_gold_can_be_a_letter_a_number_from_0_or_several():
    assert multiple_choice(["B"] * 6, ["(B)", "b", 1, ["A", "B"], None, ""]) == [1.0, 1.0, 1.0, 1.0, None, None]


@pytest.mark.parametrize("gold", ["Paris", 26, -1, 1.0, True])
def test_a_gold_that_is_not_a_letter_is_an_error(gold):
    with pytest.raises(ValueError, match=r"column answer contains .*; expected a letter, or its number from 0"):
        multiple_choice(["B"], [gold])
