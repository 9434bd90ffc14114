"""Built-in rewards of answers in text: the letter of a choice, and JSON that a schema allows."""

import json

import jsonschema
import pytest

from learner.rewards.builtin.text import json_schema, multiple_choice


@pytest.mark.parametrize(
    ("said", "letter"),
    [
        ("B", "B"), ("b", "B"), ("(B)", "B"), ("**B**", "B"), ("B.", "B"), ("$B$", "B"), ("[[B]]", "B"), ("`B`", "B"),
        ("B) Paris", "B"), ("(B) Paris", "B"), ("B: Paris", "B"), ("**B. Paris**", "B"), ("Option B", "B"),
        ("The answer is (B).", "B"), ("the answer is B because it is", "B"), ("The correct answer is: B) 42", "B"),
        ("Answer: **A**", "A"), ("Answer:\nB", "B"), ("final answer: c", "C"), ("#### C", "C"),
        (r"so \boxed{D}", "D"), (r"\boxed{\text{d}}", "D"), (r"\boxed{A} no, \boxed{B}", "B"), ("Let me think.\nB: Paris", "B"),
        ("A and B are wrong, the answer is C", "C"), ("<think>A</think>B", "B"), ("<think>the answer is B", None),
        ("The answer is B (Paris)", "B"), ("B, I believe.", "B"), ("B is correct", "B"), ("Option (C)", "C"), ("B, as shown", "B"),
        ("A dog", None), ("A dog is an animal", None), ("The answer is A dog", None), ("I think so", None), ("", None), ("42", None),
        ("A or B", None), ("A/B", None), ("B, C and D", None), (r"\boxed{A, B}", None), ("the answer is A or B", None),
    ],
)  # fmt: skip
def test_one_letter_is_read_and_two_are_none(said, letter):
    golds = ["A", "B", "C", "D"]
    assert multiple_choice([said] * 4, golds) == [float(letter == gold) for gold in golds]


def test_a_gold_is_a_letter_in_any_form_a_number_from_0_or_several():
    assert multiple_choice(["B"] * 6, ["(B)", "b", 1, ["A", "B"], None, ""]) == [1.0, 1.0, 1.0, 1.0, None, None]


@pytest.mark.parametrize("gold", ["Paris", 26, -1, 1.0, True])
def test_a_gold_that_is_no_letter_is_named(gold):
    with pytest.raises(ValueError, match=r"column answer contains .*; expected a letter, or its number from 0"):
        multiple_choice(["B"], [gold])


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ('{"name": "Ada", "age": 36}', 1.0),
        (' {"name": "Ada"}\n', 1.0),
        ('```json\n{"name": "Ada"}\n```', 1.0),
        ('<think>{"name": 1}</think>{"name": "Ada"}', 1.0),
        ('Here it is: {"name": "Ada"}', 0.0),
        ('{"name": "Ada", "age": -1}', 0.0),
        ('{"name": "Ada", "age": NaN}', 0.0),
        ('{"name": "Ada", "more": 1}', 0.0),
        ('{"name": "Ada"', 0.0),
        ("[]", 0.0),
        ("", 0.0),
        ('"\ud800"', 0.0),
        ("[" * 100_000, 0.0),
        ("9" * 100_000, 0.0),
    ],
)
def test_json_that_the_schema_allows_is_paid_and_nothing_else(said, reward):
    assert json_schema([said, said], [PERSON, json.dumps(PERSON)]) == [reward, reward]


def test_a_number_that_no_float_holds_is_an_answer_like_any_other():
    assert json_schema(["9" * 400], [{"multipleOf": 0.01}]) == [0.0]


def test_a_row_without_a_schema_cannot_be_scored():
    assert json_schema(["{}"] * 4, [None, "", {}, True]) == [None, None, 1.0, 1.0]


def test_a_schema_that_is_none_is_an_error():
    with pytest.raises(jsonschema.SchemaError):
        json_schema(["{}"], [{"type": "person"}])


def test_references_lead_into_the_schema_and_ask_nobody():
    inner = {"$defs": {"word": {"type": "string"}}, "$ref": "#/$defs/word"}
    assert json_schema(['"a"', "1"], [inner, inner]) == [1.0, 0.0]
    with pytest.raises(Exception, match=r"127\.0\.0\.1:9"):
        json_schema(["{}"], [{"$ref": "http://127.0.0.1:9/schema.json"}])
