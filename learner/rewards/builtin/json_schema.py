"""`json_schema`: whether an answer is JSON of the form that its row asks for. In the reward workers; pure."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from learner.rewards.builtin.answers import answer_of, without_fence


def json_schema(
    completions: Sequence[Any], schema: Sequence[Any], opens_reasoning: bool = False, **kwargs: Any
) -> list[float | None]:
    """1 if the answer, or the code block that it is, is JSON that the `schema` column allows; else 0; None if the column is empty.

    The column holds a JSON Schema, or its text; the draft is the one it names in `$schema`, else 2020-12. References lead only into itself.
    """
    rewards: list[float | None] = []
    for completion, column in zip(completions, schema, strict=True):
        allows = _validator(column)
        text = without_fence(answer_of(completion, opens_reasoning=opens_reasoning))
        try:
            rewards.append(None if allows is None else float(allows(msgspec.json.decode(text))))
        except (
            msgspec.DecodeError,
            RecursionError,
            UnicodeEncodeError,
            OverflowError,
        ):  # OverflowError: multipleOf of a huge number
            rewards.append(0.0)
    return rewards


def _validator(schema: Any) -> Callable[[Any], bool] | None:
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry

    if isinstance(schema, str) and schema.strip():
        schema = msgspec.json.decode(schema)
    if schema in (None, ""):
        return None
    kind = validator_for(schema, default=Draft202012Validator)
    kind.check_schema(schema)
    allows: Callable[[Any], bool] = kind(schema, registry=Registry()).is_valid
    return allows
