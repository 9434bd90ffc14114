"""A section of the learner's config: how it refuses a value, and which of its keys do nothing beside the others."""

from collections.abc import Iterable
from functools import cache, reduce
from typing import Any, Self

import msgspec


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the learner's sections.

    A key that does nothing beside the others is as if it were not set: it contradicts nothing, and `in_effect` goes without it.
    So a sweep may pass through values that turn other keys off, and no reader of a key has to ask whether it counts.
    """

    def __post_init__(self) -> None:
        if self.in_effect() is self:  # else that one was checked
            self.check()

    def check(self) -> None:
        """Raise ValueError, by `require`, for a value that cannot be or that contradicts another."""

    def lacking(self) -> dict[str, str]:
        """What each key would need that, whatever its value, does nothing beside the others."""
        return {}

    def idle_keys(self) -> dict[str, str]:
        """What each key would need that is set and does nothing; those of inner sections as `loss.clip_low`."""
        idle = {key: need for key, need in self.lacking().items() if value_at(self, key) != _default(type(self), key)}
        for name in self.__struct_fields__:
            if isinstance(section := getattr(self, name), Section):
                idle |= {f"{name}.{key}": need for key, need in section.idle_keys().items()}
        return idle

    def in_effect(self) -> Self:
        """Return the same with every such key at its default."""
        idle = self.idle_keys()
        return _reset(self, idle).in_effect() if idle else self


def require(condition: bool, problem: str) -> None:
    """Raise ValueError; `problem` begins with a key, before which the loader writes the section's name."""
    if not condition:
        raise ValueError(problem)


def any_of(key: str, values: Iterable[str]) -> str:
    """`kind = "every" or "adaptive"`, as what another key needs."""
    return f"{key} = " + " or ".join(f'"{value}"' for value in values)


def value_at(section: Section, key: str) -> Any:
    return reduce(getattr, key.split("."), section)


@cache
def _default(section: type[Section], key: str) -> Any:
    name, _, inner = key.partition(".")
    field = next(field for field in msgspec.structs.fields(section) if field.name == name)
    return _default(field.type, inner) if inner else field.default


def _reset(section: Section, keys: Iterable[str]) -> Any:
    """Return the section with these keys at their defaults."""
    changes: dict[str, Any] = {}
    for name in {key.partition(".")[0] for key in keys}:
        inner = [key.removeprefix(f"{name}.") for key in keys if key.startswith(f"{name}.")]
        changes[name] = _reset(getattr(section, name), inner) if inner else _default(type(section), name)
    return msgspec.structs.replace(section, **changes)
