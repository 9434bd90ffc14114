"""Keys of a config: their names, and what their types state about them."""

import difflib
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import msgspec
import tyro

from protocol.errors import ConfigError

T = TypeVar("T")

MAY_CHANGE = "may change at a resume"
MayChange = Annotated[T, MAY_CHANGE]
"""Type of a key that a resume may change. Such a key does not decide what is learned, or an error or a
warning advises to change it. All other keys are fixed when the run starts."""

PASSED_ON = "passed on"
"""Marker of a section whose names are not defined here. Its type states what this program knows about the
values."""
PassedOn = Annotated[dict[str, Any], PASSED_ON, tyro.conf.Suppress]
"""Type of a section that a library defines. Its names and TOML values are free. A flag is `--section.name
VALUE`."""


def keys_of(struct: type[msgspec.Struct], prefix: str = "") -> dict[str, msgspec.structs.FieldInfo]:
    """Return all keys, those of a section with its name: `learner.loss.clip_low`."""
    keys: dict[str, msgspec.structs.FieldInfo] = {}
    for field in msgspec.structs.fields(struct):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            keys |= keys_of(field.type, f"{prefix}{field.name}.")
        else:
            keys[prefix + field.name] = field
    return keys


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested sections by their whole keys, such as learner.loss.clip_low."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def may_change(field: msgspec.structs.FieldInfo) -> bool:
    """Return whether a resume may change this key."""
    return MAY_CHANGE in getattr(field.type, "__metadata__", ())


def is_passed_on(field: msgspec.structs.FieldInfo) -> bool:
    """Return whether this is a section whose names and types a library defines."""
    return PASSED_ON in getattr(field.type, "__metadata__", ())


def section_of_each(annotated: Any) -> type[msgspec.Struct] | None:
    """Return the section type of a table of sections with user-defined names.

    Such a table is a dict[str, Section]. Return None for other types.
    """
    values = get_args(get_args(annotated)[0])[1:] if PASSED_ON in getattr(annotated, "__metadata__", ()) else ()
    is_section = values and isinstance(values[0], type) and issubclass(values[0], msgspec.Struct)
    return values[0] if is_section else None


def expected_values(annotated: Any) -> str:
    """Describe the values of a type, such as `an integer or auto`."""
    origin, inner = get_origin(annotated), get_args(annotated)
    if origin is Annotated:
        return expected_values(inner[0])
    if origin is Literal:
        return " or ".join(map(str, inner))
    if origin is tuple:
        return f"any number of values, each {expected_values(inner[0])}"
    if origin in (Union, UnionType):
        return " or ".join(expected_values(one) for one in inner)
    return {int: "an integer", float: "a number", bool: "true or false", str: "a text"}.get(annotated, "None")


def explain(message: str, raw: dict[str, Any], config_type: type[msgspec.Struct]) -> str:
    """Add the received value to an error of msgspec, and the choices if it is none of them.

    Example: `Expected int, got str - at $.learner.steps`.
    """
    problem, _, location = message.partition(" - at `$")
    keys = location.replace("...", "").strip("`.").split(".") if location else []
    found: list[tuple[str, Any]] = [("", raw)]
    for key in keys:
        name, _, index = key.partition("[")
        found = [(f"{at}.{name}", value.get(name)) if isinstance(value, dict) else (at, value) for at, value in found]
        if index and isinstance(found[0][1], dict):  # in a table of sections, msgspec does not name which one
            found = [(f"{at}.{one}", section) for at, table in found for one, section in table.items()]
    if problem.startswith("Invalid enum value") and (field := keys_of(config_type).get(found[0][0][1:])) is not None:
        return f"{found[0][0][1:]} = {found[0][1]!r} is not valid; use {expected_values(field.type)}"
    if problem.startswith("Expected") or not any(isinstance(value, dict) for _, value in found):
        assignments = [f"{at[1:]} = {value!r}" for at, value in found if value is not None or len(found) == 1]
        return f"{', '.join(assignments)}: {problem}"
    # A section's own checks start with one of its keys, msgspec's with a capital letter.
    return ".".join([*keys, problem]) if problem[0].islower() else message


def check_section(name: str, table: dict[str, Any], keys: type[msgspec.Struct]) -> None:
    """Raise ConfigError if a section of another process has a wrong type in one of these keys."""
    try:
        msgspec.convert(table, keys)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}.{explain(str(error), table, keys)}") from error


def refuse_unknown_keys(struct: type[msgspec.Struct], raw: dict[str, Any], path: str, prefix: str = "") -> None:
    """Raise ConfigError for an unknown key, with a suggestion.

    This runs before msgspec, whose error names the section but suggests nothing.
    """
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in raw.items():
        if key not in fields:
            hint = _suggest(struct, key, value, prefix)
            raise ConfigError(f"{path}: unknown key {prefix}{key} = {value!r}; {hint}")
        section = fields[key]
        if isinstance(section, type) and issubclass(section, msgspec.Struct) and isinstance(value, dict):
            refuse_unknown_keys(section, value, path, f"{prefix}{key}.")
        elif (inner := section_of_each(section)) is not None and isinstance(value, dict):
            for name, table in value.items():
                if isinstance(table, dict):
                    refuse_unknown_keys(inner, table, path, f"{prefix}{key}.{name}.")


def _suggest(struct: type[msgspec.Struct], key: str, value: object, prefix: str) -> str:
    fields = {field.name for field in msgspec.structs.fields(struct)}
    if isinstance(value, dict) and value and fields.issuperset(value):
        return f"set {', '.join(value)} directly in {prefix.removesuffix('.') or 'the file'}, without a section {key}"
    inside = [name for name in keys_of(struct) if name.endswith(f".{key}")]
    near = inside or difflib.get_close_matches(key, fields, n=1)
    return f"did you mean {prefix}{near[0]}?" if near else f"known keys: {', '.join(sorted(fields))}"
