"""One environment instance in its own process, which answers the learner's commands.

    reset(row) ─▶ turn(text), or call(tool, arguments) ─▶ … ─▶ reward()         then the next episode's reset

`process.py` is the other end. `contract.py` defines what the class must have.
Invariant: an answer is msgpack, not pickle, because the class may run code that a model wrote. The policy
reads the error of a method or tool as text.
"""

import asyncio
import inspect
import math
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection
from typing import Any, SupportsFloat

import msgspec

from learner.environments.attributes import attributes_of
from learner.environments.contract import (
    Tools,
    load_environment,
    load_functions,
    method_of_turns,
    methods_of,
    schemas_of,
)
from learner.sandbox.user_code import NotLoaded, describe, shorten


class Reset(msgspec.Struct, frozen=True):
    """Command to start an episode."""

    row: dict[str, Any]


class Turn(msgspec.Struct, frozen=True):
    """Command with the text of a policy's turn."""

    text: str


class Call(msgspec.Struct, frozen=True):
    """Command with a tool call of the policy."""

    name: str
    arguments: dict[str, Any]


class Rate(msgspec.Struct, frozen=True):
    """Command to return the reward of the episode, which has ended."""

    asks_attributes: bool = False
    """Whether a reward function asks for the instance's attributes."""


class Describe(msgspec.Struct, frozen=True):
    """Command to describe the tools."""


class StepResult(msgspec.Struct, frozen=True, tag=True):
    """Response of the environment, and whether it ends the episode."""

    text: str
    is_done: bool = False
    has_failed: bool = False
    """Whether the text is an error message."""


class RewardResult(msgspec.Struct, frozen=True, tag=True):
    """Reward of the environment. None: the environment has no reward."""

    reward: float | None
    attributes: dict[str, Any] | None = None
    """Attributes of the instance, if requested."""


class ToolSchemas(msgspec.Struct, frozen=True, tag=True):
    """A JSON schema for each tool."""

    schemas: list[dict[str, Any]]


class ClassError(msgspec.Struct, frozen=True, tag=True):
    """Error of the class after which the episode cannot continue."""

    problem: str


Answer = StepResult | RewardResult | ToolSchemas | ClassError
Command = Reset | Turn | Call | Rate | Describe
ANSWER = msgspec.msgpack.Decoder(Answer)


def serve(pipe: connection.Connection, spec: str | None, tools: Sequence[str], takes_text: bool) -> None:
    """Load the class and the tools, then answer commands until the learner is gone."""
    try:
        factory = None if spec is None else load_environment(spec, takes_text=takes_text)
        host = Host(factory, load_functions(tools))
    except NotLoaded as error:
        pipe.send_bytes(msgspec.msgpack.encode(ClassError(str(error))))
        return
    pipe.send_bytes(msgspec.msgpack.encode(StepResult("")))
    with suppress(EOFError):
        while True:
            pipe.send_bytes(msgspec.msgpack.encode(host.answer(pipe.recv())))


class Host:
    """One instance, used for one episode after another. Without a class, only tools."""

    def __init__(self, factory: type | None, functions: Tools) -> None:
        """Collect the tools. Raises NotLoaded if a method and a function share a name."""
        self._factory, self._functions = factory, functions
        self._methods = [] if factory is None else methods_of(factory)
        if twice := set(self._methods) & set(functions):
            raise NotLoaded(
                f"{twice.pop()} is both a tool and a method of the class; the policy calls them by name, rename one"
            )
        self._instance: Any = None
        self._loop = asyncio.Runner()
        """One event loop for all coroutines, because a client's connections belong to their loop."""

    def answer(self, command: Command) -> Answer:
        try:
            match command:
                case Reset(row):
                    return self._reset(row)
                case Turn(text):
                    return self._turn(text)
                case Call(name, arguments):
                    return self._call(name, arguments)
                case Rate(asks_attributes):
                    return self._reward_result(asks_attributes)
                case Describe():
                    self._make_instance()
                    return ToolSchemas(schemas_of(self._tools))
        except NotLoaded as error:
            return ClassError(str(error))
        except (Exception, SystemExit) as error:
            return ClassError(f"raised {describe(error)}")

    @property
    def _tools(self) -> Tools:
        return {**{name: getattr(self._instance, name) for name in self._methods}, **self._functions}

    def _make_instance(self) -> None:
        if self._instance is None and self._factory is not None:
            self._instance = self._factory()

    def _reset(self, row: dict[str, Any]) -> StepResult | ClassError:
        self._make_instance()
        return (
            StepResult("")
            if self._instance is None
            else self._step_result(self._result_of(self._instance.reset(**row)), "reset")
        )

    def _turn(self, text: str) -> StepResult | ClassError:
        assert self._factory is not None
        method = method_of_turns(self._factory)
        try:
            returned = self._result_of(getattr(self._instance, method)(text))
        except (Exception, SystemExit) as error:  # as in TRL: the policy reads the error, and may do better
            return StepResult(str(error) or type(error).__name__, self._is_done, has_failed=True)
        return self._step_result(returned, method)

    def _call(self, name: str, arguments: dict[str, Any]) -> StepResult:
        """Call a tool. The error texts are TRL's."""
        try:
            if name not in self._tools:
                raise ValueError(f"Tool {name} not found.")
            returned = self._result_of(self._tools[name](**arguments))
        except (Exception, SystemExit) as error:
            return StepResult(str({"error": str(error) or type(error).__name__}), self._is_done, has_failed=True)
        return StepResult(str(returned), self._is_done)

    def _result_of(self, result: Any) -> Any:
        return self._loop.run(result) if inspect.iscoroutine(result) else result

    def _step_result(self, returned: Any, method: str) -> StepResult | ClassError:
        if returned is not None and not isinstance(returned, str):
            return ClassError(f"{method} returned {shorten(returned)}, expected a text or None")
        return StepResult(returned or "", self._is_done)

    def _reward_result(self, asks_attributes: bool) -> RewardResult | ClassError:
        rate = getattr(self._instance, "get_reward", None)
        reward = None if rate is None else self._result_of(rate())
        if reward is not None and not (isinstance(reward, SupportsFloat) and math.isfinite(float(reward))):
            return ClassError(f"get_reward returned {shorten(reward)}, expected a finite number or None")
        return RewardResult(
            None if reward is None else float(reward), attributes_of(self._instance) if asks_attributes else None
        )

    @property
    def _is_done(self) -> bool:
        return bool(getattr(self._instance, "done", False))
