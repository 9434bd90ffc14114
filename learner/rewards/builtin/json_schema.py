"""Reward function `json_schema`: check an answer against its row's JSON Schema.

It runs in the reward workers and is pure. Unlike text.py, it imports msgspec, which TRL's environment has not.
"""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from learner.rewards.builtin.answers import answer_of, without_fence


def json_schema(
    completions: Sequence[Any], schema: Sequence[Any], opens_reasoning: bool = False, **kwargs: Any
) -> list[float | None]:
    """Return 1 if the answer is JSON that the `schema` column allows, else 0.

    The answer may be one code block. An empty column gives None. The column holds a JSON Schema or its text.
    `$schema` names the draft, by default 2020-12. References resolve only within the schema itself.
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
        ):  # OverflowError: multipleOf with a huge number
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
