"""Call one reward function with TRL's arguments, check its result, and detect that its service is unreachable.

    an exception of a function ─▶ is_unreachable ─▶ UnreachableService ─▶ RetrySchedule ─▶ a retry

Calls run in the processes of `process.py`.
Invariants: a call yields one finite number or None per completion, or a text that describes the error. A service
that is down for a while costs time but no group. One that stays down is a failure after
learner.reward.unreachable_s, and a warning precedes it.
"""

import asyncio
import inspect
import logging
import math
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from copy import deepcopy
from typing import Any, SupportsFloat

import msgspec

from learner.config import RewardConfig
from learner.environments.attributes import AttributeView, plain
from learner.rewards.function import BUILT_IN, accepts, load_function, missing_columns, names
from learner.sandbox.user_code import ERRORS, describe, shorten, to_utf8_text
from protocol.console import counted

log = logging.getLogger(__name__)

UNREACHABLE_ERRORS = {
    "APIConnectionError", "ClientConnectionError", "ConnectTimeout", "ConnectionError", "NetworkError",
    "NewConnectionError", "RemoteProtocolError",
}  # fmt: skip
"""Exceptions of openai, aiohttp, httpx, requests and urllib3. None of them is imported here. httpx's ReadError is a
NetworkError; tarfile and shutil have a ReadError too."""
CONNECTION_ERRORS = (ConnectionError, socket.gaierror)
UNREACHABLE_STATUSES = {429, 502, 503, 504}
"""HTTP statuses: too many requests, and a service that is missing behind its proxy."""
FIRST_RETRY_S, LONGEST_RETRY_S = 1.0, 30.0
"""Seconds before a retry: the first delay, which doubles each time, and the longest."""
MAX_CAUSES = 8
Extra = str | float | int | bool | None
CompletionContent = str | list[dict[str, Any]]
"""Everything after a prompt: a text, or the messages of a policy and its tools."""


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of the run, passed as `trainer_state`: a part of transformers' class."""

    global_step: int
    """Number of optimizer steps whose weights are published."""
    max_steps: int
    epoch: float | None = None


class RewardCall(msgspec.Struct, frozen=True):
    """One call of a function on one group."""

    function: str
    prompt: Any
    columns: dict[str, Any]
    completions: list[CompletionContent]
    completion_ids: Sequence[Sequence[int]]
    """Per completion, its tokens, as arrays that take a tenth of the memory of lists while the call waits."""
    state: TrainerState
    environment_rewards: list[float | None] | None = None
    """Per completion, the environment's reward of its episode. None: there is no environment."""
    opens_reasoning: bool = False
    """Whether the completions start inside reasoning that the prompt has opened."""
    prefill: str | None = None
    """Beginning of an answer in the prompt, which the completions continue. None: there is none."""
    environments: list[dict[str, Any]] | None = None
    """Per completion, the final attributes of the environment, if the function asks for them."""
    timeout_s: float = 10.0
    """Deadline of the call, which built-in functions may divide among the completions."""
    config: RewardConfig | None = None
    """Settings for built-in functions."""

    @property
    def is_by_completion(self) -> bool:
        """True if the completions can be rated in separate calls.

        All built-in functions rate each completion independently. A user's function may compare completions.
        """
        return self.function in BUILT_IN and len(self.completions) > 1

    def only(self, index: int, timeout_s: float) -> "RewardCall":
        """Return the same call for one completion, with another deadline."""
        here = slice(index, index + 1)
        return msgspec.structs.replace(
            self,
            completions=self.completions[here],
            completion_ids=self.completion_ids[here],
            environment_rewards=self.environment_rewards and self.environment_rewards[here],
            environments=self.environments and self.environments[here],
            timeout_s=timeout_s,
        )


class RewardAnswer(msgspec.Struct, frozen=True, tag=True):
    """Rewards that a function returned, and the values that it logged."""

    rewards: list[float | None]
    metrics: dict[str, list[float]] = {}
    extra: dict[str, list[Extra]] = {}


class UnreachableService(msgspec.Struct, frozen=True, tag=True):
    """Error of a function whose service could not be reached."""

    problem: str


def call_function(
    call: RewardCall, reserved: frozenset[str], wait: Callable[[Awaitable[Any]], Any]
) -> RewardAnswer | UnreachableService | str:
    """Return the rewards, or a description of the error.

    `wait` returns the result of a coroutine, if the function returns one.
    """
    logged = Log(len(call.completions), reserved)
    for missing in missing_columns(call.function, _columns(call)):
        return f"reads the column {missing!r}, which this row does not have {_names_of_columns(call)}"
    try:
        returned = load_function(call.function)(**_arguments(call, logged))
        if inspect.isawaitable(returned):
            returned = wait(returned)
        return _checked(_listed(returned), logged, len(call.completions))
    except ERRORS as error:
        return _raised(error, call)


async def await_function(call: RewardCall, reserved: frozenset[str]) -> RewardAnswer | UnreachableService | str:
    """Await an asynchronous function, alongside others in one event loop."""
    logged = Log(len(call.completions), reserved)
    try:
        returned = await load_function(call.function)(**_arguments(call, logged))
        return _checked(_listed(returned), logged, len(call.completions))
    except ERRORS as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():  # by the deadline
            raise
        return _raised(error, call)


class Log:
    """Values that a function logs with `log_metric` and `log_extra`, as in TRL."""

    def __init__(self, num_completions: int, reserved: frozenset[str]) -> None:
        self._num_completions, self._reserved = num_completions, reserved
        self.metrics: dict[str, list[float]] = {}
        self.extra: dict[str, list[Extra]] = {}

    def metric(self, name: str, value: Any) -> None:
        """Log a number. Its mean over the step is the metric reward/<name>."""
        if name in self._reserved:
            raise ValueError(f"log_metric({name!r}, …): reward/{name} is the run's own metric; choose another name")
        self.metrics.setdefault(to_utf8_text(name), []).append(_number(value))

    def columns(self, column: str, values: Any) -> None:
        """Log one value per completion, stored alongside the sampled completions."""
        items = [_as_extra(item) for item in values]
        if len(items) != self._num_completions:
            raise ValueError(f"log_extra({column!r}, …) has {len(items)} values, expected {self._num_completions}")
        self.extra[to_utf8_text(column)] = items


class RetrySchedule:
    """Retry schedule of all functions of a run. Thread-safe."""

    def __init__(self, unreachable_s: float) -> None:
        self._unreachable_s = unreachable_s
        self._lock = threading.Lock()
        self._waited_for: set[str] = set()

    def again_in_s(self, name: str, unreached_since: float, num_calls: int, problem: str) -> float | None:
        """Return the seconds until a retry, or None if the function has failed.

        `num_calls`: calls so far that did not reach its service.
        """
        left_s = unreached_since + self._unreachable_s - time.monotonic()
        if left_s <= 0:
            return None
        with self._lock:
            is_new = name not in self._waited_for
            self._waited_for.add(name)
        if is_new:
            log.warning(
                "reward function %s cannot reach its service: it %s; retrying for up to %g s while the run waits "
                "(learner.reward.unreachable_s)", name, problem, self._unreachable_s,
            )  # fmt: skip
        return min(FIRST_RETRY_S * 2 ** (num_calls - 1), LONGEST_RETRY_S, left_s)

    def record_reached(self, name: str) -> None:
        with self._lock:
            was_waited_for = name in self._waited_for
            self._waited_for.discard(name)
        if was_waited_for:
            log.info("reward function %s reaches its service again", name)


def is_unreachable(error: BaseException) -> bool:
    """Return whether an exception or one of its causes means an unreachable service."""
    for _ in range(MAX_CAUSES):
        if isinstance(error, BrokenPipeError):  # of a program, such as the policy's; clients of services wrap it
            return False
        reason = getattr(error, "reason", None)  # urllib keeps the cause there
        if isinstance(error, CONNECTION_ERRORS) or isinstance(reason, CONNECTION_ERRORS):
            return True
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if kinds & UNREACHABLE_ERRORS or _status(error) in UNREACHABLE_STATUSES:
            return True
        cause = error.__cause__ or reason
        if not isinstance(cause, BaseException):
            return False
        error = cause
    return False


def _status(error: BaseException) -> object:
    """Return the HTTP status of an exception.

    openai and requests call it status_code, aiohttp status, urllib code.
    """
    where = (error, getattr(error, "response", None))
    found = (getattr(one, key, None) for one in where for key in ("status_code", "status", "code"))
    return next((status for status in found if isinstance(status, int)), None)


def _arguments(call: RewardCall, logged: Log) -> dict[str, Any]:
    num_completions, completions = len(call.completions), call.completions
    is_conversation = not isinstance(call.prompt, str)
    given: dict[str, Any] = {"trainer_state": call.state, "log_extra": logged.columns, "log_metric": logged.metric}
    if names(call.function, "opens_reasoning"):
        given["opens_reasoning"] = call.opens_reasoning
    if call.function in BUILT_IN:
        given |= {"timeout_s": call.timeout_s, "reward_config": call.config}
    if call.environment_rewards is not None:
        given["environment_rewards"] = call.environment_rewards
    if call.environments is not None:
        given["environments"] = [AttributeView(attributes) for attributes in call.environments]
    return {name: _for_each(value, num_completions) for name, value in _columns(call).items()} | {
        "prompts": _for_each(call.prompt if call.prefill is None else call.prompt[:-1], num_completions),
        "completions": [_as_messages(one, call.prefill or "") for one in completions]
        if is_conversation
        else completions,
        "completion_ids": [list(one) for one in call.completion_ids],
        **{name: value for name, value in given.items() if accepts(call.function, name)},
    }


def _as_messages(completion: CompletionContent, prefill: str) -> list[dict[str, Any]]:
    """Return a completion as messages.

    If the prompt began the answer, the function rates the whole answer, as in TRL.
    """
    return [{"role": "assistant", "content": prefill + completion}] if isinstance(completion, str) else completion


def _columns(call: RewardCall) -> dict[str, Any]:
    own = ("prompt", "completion", "prompts", "completions", "completion_ids")
    return {name: value for name, value in call.columns.items() if name not in own}


def _for_each(value: Any, num_completions: int) -> list[Any]:
    """Return a value for each completion. As in TRL, each has its own, so that a function may change it."""
    return [value, *(deepcopy(value) if isinstance(value, list | dict) else value for _ in range(num_completions - 1))]


def _raised(error: BaseException, call: RewardCall) -> UnreachableService | str:
    problem = f"raised {describe(error)} {_names_of_columns(call)}"
    return UnreachableService(problem) if is_unreachable(error) else problem


def _names_of_columns(call: RewardCall) -> str:
    return f"(columns: {', '.join(_columns(call)) or 'none'})"


def _listed(returned: Any) -> Any:
    """Run a generator to its end, as its code is that of the function. Return anything else unchanged."""
    return list(returned) if isinstance(returned, Iterator) else returned


def _checked(returned: Any, logged: Log, num_completions: int) -> RewardAnswer | str:
    expected = f"expected a list of {num_completions} finite numbers or None"
    if isinstance(returned, (str, bytes, dict)):
        return f"returned {shorten(returned)}, {expected}"
    try:
        items = list(returned)
        rewards = [None if item is None else _number(item) for item in items]
    except Exception as error:  # such as an OverflowError for an int above any float
        return f"returned {shorten(returned)} ({error}), {expected}"
    if len(rewards) != num_completions:
        return f"returned {counted(len(rewards), 'reward')}, {shorten(items)}, {expected}"
    return RewardAnswer(rewards, logged.metrics, logged.extra)


def _as_extra(item: Any) -> Extra:
    """Return a number of Python, numpy or torch, a bool or None as plain data, and anything else as a text."""
    try:
        value = plain(item.item() if getattr(item, "ndim", None) == 0 else item, 1)
        msgspec.msgpack.encode(value)
    except (TypeError, ValueError, OverflowError):  # not plain, a lone surrogate, an int above 64 bits
        return to_utf8_text(item)
    return value if isinstance(value, Extra) else to_utf8_text(item)


def _number(item: Any) -> float:
    if not isinstance(item, SupportsFloat):
        raise TypeError(f"{shorten(item)} is not a number")
    number = float(item)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number
