"""One instance of an environment in a process of its own: what is asked of it, and what it answers. process.py is the other end.

    reset(row) ─▶ turn(text) ─▶ turn(text) ─▶ … ─▶ reward()         then the next episode's reset

The class has the contract of TRL's `environment_factory`: no argument, `reset(**row)`, public methods, `get_reward()`. Of the
methods there may be one so far, to which each turn goes as it is. Invariant: an answer is msgpack and no pickle, for the class may
run code that a model wrote; an error of the method is the text that the policy reads.
"""

import inspect
import math
from contextlib import suppress
from multiprocessing import connection
from typing import Any

import msgspec

from learner.children import end_with_the_learner
from learner.environments.guess import BUILT_IN
from learner.user_code import NotLoaded, describe, load_named, shorten

RESERVED = ("reset", "get_reward")
"""Public methods that no turn goes to."""


class Reset(msgspec.Struct, frozen=True):
    """A new episode."""

    row: dict[str, Any]


class Turn(msgspec.Struct, frozen=True):
    """What the policy has said."""

    text: str


class Rate(msgspec.Struct, frozen=True):
    """The episode is over."""


class Said(msgspec.Struct, frozen=True, tag=True):
    """What the environment says, and whether it is the last."""

    text: str
    is_done: bool = False
    has_failed: bool = False
    """The text is an error's."""


class Rated(msgspec.Struct, frozen=True, tag=True):
    """None: the environment rates nothing."""

    reward: float | None


class Wrong(msgspec.Struct, frozen=True, tag=True):
    """What the class did that nobody can go on with."""

    problem: str


Answer = Said | Rated | Wrong
Order = Reset | Turn | Rate
ANSWER = msgspec.msgpack.Decoder(Answer)


def load_environment(spec: str) -> type:
    """Return the class that `learner.environment.factory` names. Raises NotLoaded."""
    if ":" not in spec and spec not in BUILT_IN:
        raise NotLoaded(f"it is not built in; known are: {', '.join(BUILT_IN)}. Name one of your own as module:Class")
    factory = BUILT_IN[spec] if ":" not in spec else load_named(spec)
    if not inspect.isclass(factory):
        raise NotLoaded(f"it is {shorten(factory)}, expected a class")
    if not callable(getattr(factory, "reset", None)):
        raise NotLoaded("the class has no method reset(self, **row), which begins an episode")
    method_of_turns(factory)
    return factory


def method_of_turns(factory: type) -> str:
    """The name of the one public method beside reset and get_reward. Raises NotLoaded."""
    names = [name for name, member in inspect.getmembers(factory, callable) if name[0] != "_" and name not in RESERVED]
    if len(names) != 1:
        raise NotLoaded(
            f"the class has {len(names)} public methods beside reset and get_reward ({', '.join(names) or 'none'}); expected one, "
            "which gets the text of each turn. Let the names of the others begin with _"
        )
    return names[0]


def serve(pipe: connection.Connection, spec: str) -> None:
    """Load the class, then answer until the learner is gone; ends with it even in the midst of a call."""
    end_with_the_learner()
    try:
        host = Host(load_environment(spec))
    except NotLoaded as error:
        pipe.send_bytes(msgspec.msgpack.encode(Wrong(str(error))))
        return
    pipe.send_bytes(msgspec.msgpack.encode(Said("")))
    with suppress(EOFError):
        while True:
            pipe.send_bytes(msgspec.msgpack.encode(host.answer(pipe.recv())))


class Host:
    """Of one instance, used for one episode after another."""

    def __init__(self, factory: type) -> None:
        self._factory, self._method = factory, method_of_turns(factory)
        self._instance: Any = None

    def answer(self, order: Order) -> Answer:
        try:
            match order:
                case Reset(row):
                    if self._instance is None:
                        self._instance = self._factory()
                    return self._said(self._instance.reset(**row), "reset")
                case Turn(text):
                    return self._turn(text)
                case Rate():
                    return self._rated()
        except (Exception, SystemExit) as error:
            return Wrong(f"raised {describe(error)}")

    def _turn(self, text: str) -> Said | Wrong:
        try:
            said = getattr(self._instance, self._method)(text)
        except (Exception, SystemExit) as error:  # as in TRL: the policy reads what was wrong, and may do better
            return Said(str(error) or type(error).__name__, self._is_done, has_failed=True)
        return self._said(said, self._method)

    def _said(self, said: Any, method: str) -> Said | Wrong:
        if said is not None and not isinstance(said, str):
            return Wrong(f"{method} returned {shorten(said)}, expected a text or None")
        return Said(said or "", self._is_done)

    def _rated(self) -> Rated | Wrong:
        rate = getattr(self._instance, "get_reward", None)
        if rate is None:
            return Rated(None)
        reward = rate()
        if reward is not None and not (isinstance(reward, (int, float)) and math.isfinite(reward)):
            return Wrong(f"get_reward returned {shorten(reward)}, expected a finite number or None")
        return Rated(None if reward is None else float(reward))

    @property
    def _is_done(self) -> bool:
        return bool(getattr(self._instance, "done", False))
