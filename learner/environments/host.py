"""One environment instance in its own process, which answers the learner's commands.

    reset(row) ─▶ (turn(text), or call(tool, arguments)… ─▶ feedback)* ─▶ reward()    then the next episode's reset

`process.py` is the other end. `contract.py` defines what the class must have.
Invariant: an answer is msgpack, not pickle, because the class may run code that a model wrote. The policy
reads the error of a method or tool as text.
"""

import asyncio
import inspect
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import connection
from typing import Any, SupportsFloat

import msgspec

from learner.environments.attributes import MAX_DEPTH, attributes_of, plain
from learner.environments.contract import (
    STATE_KEY,
    TURN_REWARD,
    Tools,
    load_environment,
    load_functions,
    method_of_turns,
    methods_of,
    schemas_of,
)
from learner.sandbox.descendants import end_if_forked
from learner.sandbox.user_code import ERRORS, NotLoaded, describe, digests_of_files, shorten, to_utf8_text


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


class Observe(msgspec.Struct, frozen=True):
    """Command to name the state, and to return the reward of the turn that has just ended."""

    after_turn: bool
    """Whether a turn has ended. False right after the reset."""


class Rate(msgspec.Struct, frozen=True):
    """Command to return the reward of the episode, which has ended."""

    asks_attributes: bool = False
    """Whether a reward function asks for the instance's attributes."""


class Describe(msgspec.Struct, frozen=True):
    """Command to describe the tools."""


class LoadedClass(msgspec.Struct, frozen=True, tag=True):
    """The class and the tools are loaded."""

    file_digests: dict[str, str]
    """Digests of their files, by path."""


class StepResult(msgspec.Struct, frozen=True, tag=True):
    """Response of the environment, and whether it ends the episode."""

    text: str
    is_done: bool = False
    has_failed: bool = False
    """Whether the text is an error message."""
    has_feedback: bool = False
    """Whether the class has feedback by turn. Only the response to reset reports it."""


class TurnFeedback(msgspec.Struct, frozen=True, tag=True):
    """What the class reports of the turn that has ended, and of the state in which the next one begins."""

    reward: float | None = None
    state: str | None = None
    """Name of the state, as JSON."""


class RewardResult(msgspec.Struct, frozen=True, tag=True):
    """Reward of the environment, the sum of get_reward and of its turns. None: the environment has no reward."""

    reward: float | None
    attributes: dict[str, Any] | None = None
    """Attributes of the instance, if requested."""


class ToolSchemas(msgspec.Struct, frozen=True, tag=True):
    """A JSON schema for each tool."""

    schemas: list[dict[str, Any]]


class ClassError(msgspec.Struct, frozen=True, tag=True):
    """Error of the class after which the episode cannot continue."""

    problem: str


class UnusableResult(Exception):
    """A method of the class returned something else than expected. The text continues the method's name."""


Answer = LoadedClass | StepResult | TurnFeedback | RewardResult | ToolSchemas | ClassError
Command = Reset | Turn | Call | Observe | Rate | Describe
ANSWER = msgspec.msgpack.Decoder(Answer)


def serve(pipe: connection.Connection, spec: str | None, tools: Sequence[str], takes_text: bool) -> None:
    """Load the class and the tools, then answer commands until the learner is gone."""
    owner = os.getpid()

    def send(answer: Answer) -> None:
        end_if_forked(owner)
        pipe.send_bytes(msgspec.msgpack.encode(answer))

    try:
        factory = None if spec is None else load_environment(spec, takes_text=takes_text)
        functions = load_functions(tools)
        host = Host(factory, functions)
    except NotLoaded as error:
        send(ClassError(str(error)))
        return
    send(LoadedClass(digests_of_files([factory, *functions.values()])))
    with suppress(EOFError):
        while True:
            send(host.answer(pipe.recv()))


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
        self._turn_rewards: list[float] = []
        """Rewards of the turns of the current episode."""
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
                case Observe(after_turn):
                    return self._feedback(after_turn)
                case Rate(asks_attributes):
                    return self._reward_result(asks_attributes)
                case Describe():
                    self._make_instance()
                    return ToolSchemas(schemas_of(self._tools))
        except (NotLoaded, UnusableResult) as error:
            return ClassError(str(error))
        except ERRORS as error:
            return ClassError(f"raised {describe(error)}")

    @property
    def _tools(self) -> Tools:
        return {**{name: getattr(self._instance, name) for name in self._methods}, **self._functions}

    def _make_instance(self) -> None:
        if self._instance is None and self._factory is not None:
            self._instance = self._factory()

    def _reset(self, row: dict[str, Any]) -> StepResult:
        self._make_instance()
        self._turn_rewards = []
        if self._instance is None:
            return StepResult("")
        opening = self._step_result(self._result_of(self._instance.reset(**row)), "reset")
        return msgspec.structs.replace(opening, has_feedback=self._has(TURN_REWARD) or self._has(STATE_KEY))

    def _turn(self, text: str) -> StepResult:
        assert self._factory is not None
        method = method_of_turns(self._factory)
        try:
            returned = self._result_of(getattr(self._instance, method)(text))
        except ERRORS as error:  # as in TRL: the policy reads the error, and may do better
            return StepResult(to_utf8_text(error) or type(error).__name__, self._is_done, has_failed=True)
        return self._step_result(returned, method)

    def _call(self, name: str, arguments: dict[str, Any]) -> StepResult:
        """Call a tool. The error texts are TRL's."""
        try:
            if name not in self._tools:
                raise ValueError(f"Tool {name} not found.")
            returned = self._result_of(self._tools[name](**arguments))
        except ERRORS as error:
            return StepResult(str({"error": str(error) or type(error).__name__}), self._is_done, has_failed=True)
        return StepResult(to_utf8_text(returned), self._is_done)

    def _result_of(self, result: Any) -> Any:
        return self._loop.run(result) if inspect.iscoroutine(result) else result

    def _step_result(self, returned: Any, method: str) -> StepResult:
        if returned is not None and not isinstance(returned, str):
            raise UnusableResult(f"{method} returned {shorten(returned)}, expected a text or None")
        return StepResult(to_utf8_text(returned or ""), self._is_done)

    def _feedback(self, after_turn: bool) -> TurnFeedback:
        reward = self._number_of(TURN_REWARD) if after_turn else None
        if reward is not None:
            self._turn_rewards.append(reward)
        state = self._result_of(getattr(self._instance, STATE_KEY)()) if self._has(STATE_KEY) else None
        try:
            key = None if state is None else msgspec.json.encode(plain(state, MAX_DEPTH)).decode()
        except TypeError as error:
            raise UnusableResult(
                f"{STATE_KEY} returned {shorten(state)}, expected a text, a number, or a tuple or list of them"
            ) from error
        return TurnFeedback(reward, key)

    def _reward_result(self, asks_attributes: bool) -> RewardResult:
        own = self._number_of("get_reward")
        is_unrated = own is None and self._has("get_reward")  # the class says so, whatever its turns
        has_reward = own is not None or (self._turn_rewards and not is_unrated)
        reward = math.fsum([own or 0.0, *self._turn_rewards]) if has_reward else None
        return RewardResult(reward, attributes_of(self._instance) if asks_attributes else None)

    def _has(self, method: str) -> bool:
        return hasattr(self._instance, method)

    def _number_of(self, method: str) -> float | None:
        """Return the reward that a method returns, or None without a reward or such a method.

        Raises:
            UnusableResult: It returned anything else.
        """
        reward = self._result_of(getattr(self._instance, method)()) if self._has(method) else None
        if reward is not None and not (isinstance(reward, SupportsFloat) and math.isfinite(float(reward))):
            raise UnusableResult(f"{method} returned {shorten(reward)}, expected a finite number or None")
        return None if reward is None else float(reward)

    @property
    def _is_done(self) -> bool:
        return bool(getattr(self._instance, "done", False))
