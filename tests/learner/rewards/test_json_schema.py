"""`json_schema`: rewards for JSON that matches a schema."""

import json

import jsonschema
import pytest

from learner.rewards.builtin.json_schema import json_schema

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ('{"name": "Ada", "age": 36}', 1.0), (' {"name": "Ada"}\n', 1.0), ('```json\n{"name": "Ada"}\n```', 1.0),
        ('<think>{"name": 1}</think>{"name": "Ada"}', 1.0), ('Here it is: {"name": "Ada"}', 0.0),
        ('{"name": "Ada", "age": -1}', 0.0), ('{"name": "Ada", "age": NaN}', 0.0), ('{"name": "Ada", "more": 1}', 0.0),
        ('{"name": "Ada"', 0.0), ("[]", 0.0), ("", 0.0), ('"\ud800"', 0.0), ("[" * 100_000, 0.0), ("9" * 100_000, 0.0),
    ],
    ids=lambda value: repr(value)[:40],
)  # fmt: skip
def test_only_json_that_matches_the_schema_is_rewarded(completion, reward):
    assert json_schema([completion, completion], [PERSON, json.dumps(PERSON)]) == [reward, reward]


def test_a_number_beyond_the_range_of_floats_is_accepted():
    assert json_schema(["9" * 400], [{"multipleOf": 0.01}]) == [0.0]


def test_a_row_without_a_schema_cannot_be_scored():
    assert json_schema(["{}"] * 4, [None, "", {}, True]) == [None, None, 1.0, 1.0]


def test_an_invalid_schema_is_an_error():
    with pytest.raises(jsonschema.SchemaError):
        json_schema(["{}"], [{"type": "person"}])


def test_references_resolve_within_the_schema_without_network_access():
    inner = {"$defs": {"word": {"type": "string"}}, "$ref": "#/$defs/word"}
    assert json_schema(['"a"', "1"], [inner, inner]) == [1.0, 0.0]
    with pytest.raises(Exception, match=r"127\.0\.0\.1:9"):
        json_schema(["{}"], [{"$ref": "http://127.0.0.1:9/schema.json"}])
