"""Built-in rewards for text answers: where the answer is, the letter of a choice."""

import pytest

from learner.evaluation.results import short_answer
from learner.rewards.builtin.json_schema import json_schema
from learner.rewards.builtin.mathematics import math_equivalence
from learner.rewards.builtin.text import exact_match, last_number, multiple_choice, share_right, think_format


@pytest.mark.parametrize(
    ("function", "gold", "right", "wrong"),
    [
        (exact_match, "Paris", "Paris", "Rome"), (share_right, "Paris", "Paris", "Rome"),
        (multiple_choice, "B", "(B)", "A"), (math_equivalence, "1/2", "1/2", "2"),
        (math_equivalence, "Paris", "Paris", "Rome"), (last_number, "4", "4", "5"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "text",
    [
        "<think>{other}</think>\n<answer>{answer}</answer>", "<answer>\n{answer}\n</answer>", "{answer}</answer>",
        "So it is <answer>{answer}</answer>\n\nI hope that this helps.",
        "<answer>{other}</answer> No: <answer>{answer}</answer>",
        "<think><answer>{other}</answer></think>{answer}",
    ],
)  # fmt: skip
def test_the_answer_is_what_the_last_answer_tags_hold(function, gold, right, wrong, text):
    completions = [text.format(answer=right, other=wrong), text.format(answer=wrong, other=right)]
    paid, unpaid = function(completions, [gold] * 2)
    assert paid == 1.0 and unpaid < 1.0
    assert short_answer(completions[0]) == right


def test_a_right_answer_in_the_think_format_earns_both_rewards():
    completion = "<think>x</think>\n<answer>4</answer>"
    assert think_format([completion]) == exact_match([completion], ["4"]) == exact_match([completion], [4]) == [1.0]
    assert exact_match([completion], ["<answer>4</answer>"]) == [1.0]


@pytest.mark.parametrize("completion", ["<answer></answer>4", "<answer>4", "<think><answer>4</answer>"])
def test_tags_without_an_answer_or_an_end_hold_none(completion):
    assert exact_match([completion], ["4"]) == [0.0]


def test_tags_in_code_belong_to_the_code():
    schema = {"type": "object", "properties": {"a": {"const": "<answer>x</answer>"}}, "required": ["a"]}
    json = '{"a": "<answer>x</answer>"}'
    texts = [json, f"```json\n{json}\n```", f"<answer>{json}</answer>", f"<answer>```json\n{json}\n```</answer>"]
    assert json_schema(texts, [schema] * 4) == [1.0] * 4


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
        ("(b) Paris", "B"), ("b) Paris", "B"), ("b. Paris", "B"), ("b: Paris", "B"), ("The answer is (b) Paris", "B"),
        ("The answer is b because it is", "B"), ("option b) Paris", "B"), ("a) a dog", "A"), ("a is correct", "A"),
        ("a dog", None), ("The answer is a dog", None), ("a dog. It barks.", None), ("c, I believe", None),
        ("(b) is wrong", None), ("The answer is B) is not it", None), ("B) is Paris", "B"), ("(a) or b, I think", None),
        ("B, e.g. Paris", "B"), ("B, i.e. Paris", "B"), ("B, a city", "B"), ("B, x = 5", "B"), ("b) and x = 5", "B"),
        ("a or b", None), ("(a) or (b)", None), ("a) / b)", None), ("a. and b.", None),
        ("The answer is a) and c)", None),
        ("The answer is b.d. or so", None), ("The answer is A or (b)", None), ("B or a dog", "B"),
        ("a better one", None),
        ("The answer is A. Wait, the answer is B.", "B"), ("Final answer: The answer is B", "B"),
        ("#### The answer is B", "B"), ("The answer is B. This answer is correct.", "B"),
        ("The answer is A. But this answer is wrong.", None), ("The answer is A. The answer is A or B", None),
        ("#### Step 2: choose\nB", "B"), ("#### Final answer\nB", "B"), ("#### B\nIt is B and not A.", "B"),
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


@pytest.mark.parametrize(
    ("completion", "number"),
    [
        ("#### Step 1: compute\n6*7 = 42", 42), ("#### 2. Result\n42", 42), ("#### 12) Result\n42", 42),
        ("#### Step 4: Final answer\nThe answer is 42", 42), ("#### **Step 2**: add\n6*7 = 42", 42),
        ("##### Part 2\n6*7 = 42", 42), ("#### Solution\n6*7 = 42", 42), ("#### Step 3: x = 42", 42),
        ("#### Final Answer: 42", 42), ("#### Final Answer\n42\nand 7 remain", 42), ("#### 42\nand 7 remain", 42),
        ("#### 42. That is all.", 42), ("#### 42 apples\n#### Explanation\n6*7 are 42, of 50", 42),
        ("so 6*7 #### 42 of 50", 42), ("#### Total: 42 of 50", 42), ("#### 2.5 apples\nof 50", 2.5),
    ],
)  # fmt: skip
def test_a_heading_of_level_4_is_no_mark_of_the_number(completion, number):
    others = [other for other in (1, 2, 3, 4, 6, 7, 12, 42, 50, 2.5) if other != number]
    assert last_number([completion], [number]) == [1.0]
    assert last_number([completion] * len(others), others) == [0.0] * len(others)
