"""Copy environments' final attributes for reward functions: TRL's `environments`.

    instance ─▶ attributes_of (in its process) ─▶ Episode ─▶ ledger ─▶ AttributeView (in the reward process)

`host.py` and `rewards/call.py` use this module, which imports nothing of the learner.
Invariant: an episode keeps only plain data, at most MAX_BYTES, which nobody can change.
"""

import numbers
from typing import Any

import msgspec

MAX_BYTES = 1 << 20
"""Maximum size of all attributes together, as stored. Attributes that do not fit are left out."""
MAX_DEPTH = 32
"""Maximum nesting of lists and dicts. Deeper values are hardly data."""


class AttributeView:
    """Read-only copy of an environment instance, outside the instance's process."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the environment has no {name!r} here: the instance lives in another process. Only its public attributes "
            f"that are plain data (numbers, texts, lists, dicts, None), up to {MAX_BYTES >> 20} MiB, are available, "
            f"and no methods; for this instance: {', '.join(vars(self)) or 'none'}. Keep what the reward needs in "
            "such an attribute, or return it from get_reward"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"{name!r} cannot be set: this is a copy of an environment that lives in another process; set it there"
        )


def attributes_of(instance: Any) -> dict[str, Any]:
    """Return the public attributes and properties that are plain data, sorted by name."""
    found: dict[str, Any] = {}
    room = MAX_BYTES
    for name in dir(instance):
        if name.startswith("_"):
            continue
        try:
            value = plain(getattr(instance, name), MAX_DEPTH)
            num_bytes = len(msgspec.msgpack.encode({name: value}))
        except (Exception, SystemExit):  # not plain data or a failing property: AttributeView explains it
            continue
        if num_bytes <= room:
            found[name] = value
            room -= num_bytes
    return found


def plain(value: Any, depth: int) -> Any:
    """Convert a value, including numpy numbers, to Python's built-in types.

    Raises:
        TypeError: The value is not plain data.
    """
    if depth == 0:
        raise TypeError("too deep")
    match value:
        case None | bool():
            return value
        case str():
            return str.__str__(value)  # of a text that is an Enum, str(value) is the name
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            return float(value)
        case list() | tuple():
            return [plain(item, depth - 1) for item in value]
        case dict():
            return {_plain_key(key): plain(item, depth - 1) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} is not plain data")


def _plain_key(key: Any) -> str | int:
    if not isinstance(key, str | int):
        raise TypeError(f"a key of type {type(key).__name__} is not plain data")
    return key
