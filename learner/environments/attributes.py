"""What an environment's instance holds at the end of an episode, as reward functions get it: TRL's `environments`. Under host.py and
rewards/call.py.

    instance ─▶ attributes_of (in its process) ─▶ Episode ─▶ ledger ─▶ Remembered (in the reward function's process)

Imports nothing of the learner. Invariant: plain data and nothing else, at most MAX_BYTES of an episode, which nobody can change.
"""

import numbers
from typing import Any

import msgspec

MAX_BYTES = 1 << 20
"""Of all attributes together, as they are kept; one that has no room is left out."""
MAX_DEPTH = 32
"""Of lists and dicts in one another; more is hardly data."""


class Remembered:
    """One instance, read where it is not."""

    def __init__(self, attributes: dict[str, Any]) -> None:
        vars(self).update(attributes)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the environment has no {name!r} here: the instance lives in another process. What comes of it is its public "
            f"attributes that are plain data (numbers, texts, lists, dicts, None), up to {MAX_BYTES >> 20} MiB, and no methods; of this "
            f"one: {', '.join(vars(self)) or 'nothing'}. Keep what the reward needs in such an attribute, or return it from get_reward"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name!r} cannot be set: the environment lives in another process, this is what it held")


def attributes_of(instance: Any) -> dict[str, Any]:
    """The public attributes that are plain data, properties too, in the order of their names."""
    found: dict[str, Any] = {}
    room = MAX_BYTES
    for name in dir(instance):
        if name.startswith("_"):
            continue
        try:
            value = _plain(getattr(instance, name), MAX_DEPTH)
            num_bytes = len(msgspec.msgpack.encode({name: value}))
        except (Exception, SystemExit):  # no data, a text that is none, or a property that fails: whoever asks is told
            continue
        if num_bytes <= room:
            found[name] = value
            room -= num_bytes
    return found


def _plain(value: Any, depth: int) -> Any:
    """The same of Python's own types, numpy's numbers too. Raises TypeError for what is no data."""
    if depth == 0:
        raise TypeError("too deep")
    match value:
        case None | bool():
            return value
        case str():
            return str(value)
        case numbers.Integral():
            return int(value)
        case numbers.Real():
            return float(value)
        case list() | tuple():
            return [_plain(item, depth - 1) for item in value]
        case dict():
            return {_plain_key(key): _plain(item, depth - 1) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} is no plain data")


def _plain_key(key: Any) -> str | int:
    if not isinstance(key, str | int):
        raise TypeError(f"a key of type {type(key).__name__} is no plain data")
    return key
