"""Base class of config sections: value checks, and detection of keys without effect."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache, reduce
from typing import Annotated, Any, NamedTuple, Self, TypeVar, get_args

import msgspec

from protocol.config import MAX_SECONDS

T = TypeVar("T")


class Range(NamedTuple):
    """Range of a key's numbers. Unlike that of msgspec, it does not bind a key without effect."""

    holds: Callable[[float], bool]
    rule: str


Positive = Annotated[T, Range(lambda value: value > 0, "must be above 0")]
NotNegative = Annotated[T, Range(lambda value: value >= 0, "must not be negative")]
AtLeastOne = Annotated[T, Range(lambda value: value >= 1, "must be at least 1")]
PositiveFinite = Annotated[T, Range(lambda value: 0 < value < math.inf, "must be above 0 and finite")]
NotNegativeFinite = Annotated[T, Range(lambda value: 0 <= value < math.inf, "must be at least 0 and finite")]
Timeout = Annotated[
    float, Range(lambda value: 0 < value <= MAX_SECONDS, f"must be above 0 and at most {MAX_SECONDS:.0f}")
]
TimeoutOrZero = Annotated[
    float, Range(lambda value: 0 <= value <= MAX_SECONDS, f"must be at least 0 and at most {MAX_SECONDS:.0f}")
]
Fraction = Annotated[T, Range(lambda value: 0 <= value < 1, "must be at least 0 and below 1")]
Share = Annotated[T, Range(lambda value: 0 < value <= 1, "must be above 0 and at most 1")]


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the learner's config sections.

    A key that has no effect alongside the other keys counts as unset: it contradicts nothing, and `in_effect`
    resets it. A sweep may therefore pass through values that turn other keys off. No reader of a key has to
    check whether it counts.
    """

    def __post_init__(self) -> None:
        if self.in_effect() is self:  # otherwise `in_effect` created a checked copy
            for key, limit in _ranges(type(self)):
                value = getattr(self, key)
                require(not isinstance(value, int | float) or limit.holds(value), f"{key} = {value} {limit.rule}")
            self.check()

    def check(self) -> None:
        """Raise ValueError, through `require`, for an invalid or contradictory value."""

    def unmet_needs(self) -> dict[str, str]:
        """Return what each key without effect requires, whatever the key's own value."""
        return {}

    def idle_keys(self) -> dict[str, str]:
        """Return what each set key without effect requires.

        Keys of inner sections are named as in `loss.clip_low`. Keys that only idle keys would use are idle too.
        """
        idle = {
            key: need for key, need in self.unmet_needs().items() if value_at(self, key) != _default(type(self), key)
        }
        for name in self.__struct_fields__:
            if isinstance(section := getattr(self, name), Section):
                idle |= {f"{name}.{key}": need for key, need in section.idle_keys().items()}
        return _reset(self, idle).idle_keys() | idle if idle else idle

    def in_effect(self) -> Self:
        """Return the section with its idle keys at their defaults."""
        idle = self.idle_keys()
        return _reset(self, idle) if idle else self


def require(condition: bool, problem: str) -> None:
    """Raise ValueError with `problem` unless `condition` holds.

    `problem` starts with a key, to which the loader prepends the name of the section.
    """
    if not condition:
        raise ValueError(problem)


def refuse(condition: bool, problem: str) -> None:
    """Raise ValueError with `problem` if `condition` holds, as `require` does if it does not."""
    require(not condition, problem)


def any_of(key: str, values: Iterable[str]) -> str:
    """Return a requirement of another key, such as `kind = "every" or "adaptive"`."""
    return f"{key} = " + " or ".join(f'"{value}"' for value in values)


def value_at(section: Section, key: str) -> Any:
    return reduce(getattr, key.split("."), section)


@cache
def _ranges(section: type[Section]) -> list[tuple[str, Range]]:
    return [(field.name, limit) for field in msgspec.structs.fields(section) for limit in _ranges_in(field.type)]


def _ranges_in(annotated: Any) -> Iterator[Range]:
    """Yield the ranges of a type, also of the members of a union."""
    for part in (*get_args(annotated), *getattr(annotated, "__metadata__", ())):
        if isinstance(part, Range):
            yield part
        else:
            yield from _ranges_in(part)


@cache
def _default(section: type[Section], key: str) -> Any:
    name, _, inner = key.partition(".")
    field = next(field for field in msgspec.structs.fields(section) if field.name == name)
    if inner:
        return _default(field.type, inner)
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


def _reset(section: Section, keys: Iterable[str]) -> Any:
    """Return the section with these keys at their defaults."""
    changes: dict[str, Any] = {}
    for name in {key.partition(".")[0] for key in keys}:
        inner = [key.removeprefix(f"{name}.") for key in keys if key.startswith(f"{name}.")]
        changes[name] = _reset(getattr(section, name), inner) if inner else _default(type(section), name)
    return msgspec.structs.replace(section, **changes)
