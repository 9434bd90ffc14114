"""Rewards: the completions of a group are scored by reward functions in processes that can be killed.

    group ──▶ submit ──▶ one call per function ──▶ reward worker (pebble) ──▶ GroupRewards ──▶ advantages

Invariant: every submitted group gets an answer within the functions' deadlines, and wrong (a reward of 0), timed out and
failed stay three different things: a function that timed out or failed gives None for every completion.
"""

import logging
import math
import multiprocessing
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from pebble import ProcessPool

from learner.reward_function import call_function, load_problem, shorten, start_worker
from protocol.errors import ConfigError, RewardError

if TYPE_CHECKING:
    from learner.data import Prompt

logger = logging.getLogger(__name__)

# How long a worker may take to start and import the functions' modules, torch among them if a user wants it.
STARTUP_TIMEOUT_S = 120.0

OVERLONG = "overlong"
"""Name, among the functions' names, of the reward that overlong.py gives."""


class RewardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What scores the completions."""

    functions: tuple[str, ...]
    """Each `module:function`, `path/to/file.py:function` or a built-in: exact_match, share_right, think_format,
    math_equivalence."""
    weights: tuple[float, ...] | None = None
    """One per function, by which its rewards are multiplied before they are added; 0 only watches. Unset: all 1."""
    timeout_s: float = 10.0
    """Deadline of one call of one function on one group; a function that exceeds it is killed."""
    num_workers: int = 1
    """Processes that call reward functions."""
    overlong_buffer_tokens: int | None = None
    """Soft overlong penalty (DAPO): over the last so many tokens before sampling.max_tokens the reward falls linearly to
    -overlong_penalty, which a truncated completion gets whole. It is one more reward, named overlong. Unset: none."""
    overlong_penalty: float = 1.0
    """With overlong_buffer_tokens: the whole penalty."""

    def __post_init__(self) -> None:
        if not self.functions or len(set(self.functions)) < len(self.functions):
            raise ConfigError(
                f"learner.reward.functions = {self.functions} must name at least one function, none twice"
            )
        weights = self.function_weights
        if len(weights) != len(self.functions) or not all(map(math.isfinite, weights)) or not any(weights):
            raise ConfigError(
                f"learner.reward.weights = {self.weights} must be {len(self.functions)} finite numbers, one for each of "
                f"learner.reward.functions = {self.functions}, not all 0"
            )
        if not 0 < self.timeout_s < math.inf:
            raise ConfigError(f"learner.reward.timeout_s = {self.timeout_s} must be above 0 and finite")
        if self.num_workers < 1:
            raise ConfigError(f"learner.reward.num_workers = {self.num_workers} must be at least 1")
        self._check_overlong()

    def _check_overlong(self) -> None:
        if self.overlong_buffer_tokens is None:
            if self.overlong_penalty != 1.0:
                raise ConfigError(
                    f"learner.reward.overlong_penalty = {self.overlong_penalty} does nothing without overlong_buffer_tokens"
                )
            return
        if self.overlong_buffer_tokens < 1:
            raise ConfigError(
                f"learner.reward.overlong_buffer_tokens = {self.overlong_buffer_tokens} must be at least 1"
            )
        if not 0 < self.overlong_penalty < math.inf:
            raise ConfigError(f"learner.reward.overlong_penalty = {self.overlong_penalty} must be above 0 and finite")
        if OVERLONG in self.names:
            raise ConfigError(
                f"learner.reward.functions = {self.functions} holds a function named {OVERLONG!r}, which is also the name of "
                "the reward of overlong_buffer_tokens; rename the function"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The functions' names in metrics: without the module, unless two would be called the same."""
        short = [spec.rpartition(":")[2] for spec in self.functions]
        return tuple(s if short.count(s) == 1 else spec for s, spec in zip(short, self.functions, strict=True))

    @property
    def function_weights(self) -> tuple[float, ...]:
        """One per function."""
        return self.weights if self.weights is not None else (1.0,) * len(self.functions)

    @property
    def weight_by_name(self) -> dict[str, float]:
        """The weight of every reward of a group: the functions', and the overlong penalty's where there is one."""
        weights = dict(zip(self.names, self.function_weights, strict=True))
        return weights if self.overlong_buffer_tokens is None else weights | {OVERLONG: 1.0}


class FunctionRewards(msgspec.Struct, frozen=True, kw_only=True):
    """What one function said about a group."""

    name: str
    rewards: list[float | None]
    outcome: Literal["ok", "timed_out", "failed"] = "ok"
    message: str | None = None
    """Unless the outcome is ok: what went wrong, with the function and the prompt."""


class GroupRewards(msgspec.Struct, frozen=True, kw_only=True):
    """The rewards of a group.

    Example: GroupRewards(rewards=[1.0, None], functions=[FunctionRewards(name="exact_match", rewards=[1.0, None])]).
    """

    rewards: list[float | None]
    """Weighted sum over the functions that scored a completion; None: none did."""
    functions: list[FunctionRewards]

    @property
    def mean(self) -> float | None:
        """Over the scorable completions; None: there is none."""
        scorable = [reward for reward in self.rewards if reward is not None]
        return sum(scorable) / len(scorable) if scorable else None

    @property
    def by_function(self) -> dict[str, list[float | None]]:
        return {function.name: function.rewards for function in self.functions}

    def num_outcomes(self, outcome: Literal["ok", "timed_out", "failed"]) -> int:
        return sum(function.outcome == outcome for function in self.functions)


def raise_if_failed(group_rewards: GroupRewards) -> None:
    """Raise RewardError if a function raised or returned something else than rewards for the group."""
    messages = [
        function.message or function.name for function in group_rewards.functions if function.outcome == "failed"
    ]
    if messages:
        raise RewardError("; ".join(messages))


class RewardWorkers:
    """The processes in which reward functions run; use as a context manager, or close."""

    def __init__(self, config: RewardConfig) -> None:
        """Start the workers. Raises RewardError if a function cannot be loaded in them."""
        self._config = config
        self._weights = config.function_weights
        self._pending: set[Future[GroupRewards]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._pool = self._start_pool()
        try:
            self._probe()
        except RewardError:
            self.close()
            raise

    def __enter__(self) -> "RewardWorkers":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def submit(
        self, prompt: "Prompt", completions: Sequence[str], completion_ids: Sequence[Sequence[int]]
    ) -> "Future[GroupRewards]":
        """Score the completions of one prompt. The future cannot be cancelled; close() ends it with a RewardError."""
        future: Future[GroupRewards] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._closed:
                raise RewardError("the reward workers are closed; no group can be scored any more")
            if not self._pool.active:
                logger.warning("all reward workers died (out of memory?); starting new ones")
                self._pool = self._start_pool()
            self._pending.add(future)
            group = (prompt.prompt, prompt.columns, list(completions), [list(ids) for ids in completion_ids])
            calls = [
                self._pool.schedule(call_function, args=(spec, *group), timeout=self._config.timeout_s)
                for spec in self._config.functions
            ]
        left = _Countdown(len(calls), lambda: self._finish(future, calls, prompt, len(completions)))
        for call in calls:
            call.add_done_callback(left)
        return future

    def close(self) -> None:
        """Kill the workers, whatever they do; groups that wait for a score end with a RewardError."""
        with self._lock:
            self._closed = True
            pending, self._pending = self._pending, set()
        self._pool.stop()
        self._pool.join()
        for future in pending:
            future.set_exception(RewardError("the reward workers were closed before the group was scored"))

    def _start_pool(self) -> ProcessPool:
        # Spawned, not forked: the learner's threads, sockets and tensors must not come along.
        return ProcessPool(
            max_workers=self._config.num_workers,
            initializer=start_worker,
            initargs=(self._config.functions,),
            context=multiprocessing.get_context("spawn"),
        )

    def _probe(self) -> None:
        functions = ", ".join(self._config.functions)
        try:
            problem = self._pool.schedule(load_problem, args=(self._config.functions,)).result(STARTUP_TIMEOUT_S)
        except TimeoutError as error:
            raise RewardError(
                f"importing learner.reward.functions ({functions}) took longer than {STARTUP_TIMEOUT_S:g} s; "
                "move slow work out of the module's top level"
            ) from error
        except (OSError, RuntimeError) as error:
            raise RewardError(
                f"a process ended while it imported learner.reward.functions ({functions}): {error}"
            ) from error
        if problem:
            raise RewardError(problem)

    def _finish(self, future: "Future[GroupRewards]", calls: list[Any], prompt: "Prompt", num_completions: int) -> None:
        results = [
            self._result(name, call, prompt, num_completions)
            for name, call in zip(self._config.names, calls, strict=True)
        ]
        with self._lock:
            if future not in self._pending:
                return
            self._pending.discard(future)
        rewards = [
            _weighted_sum(self._weights, [result.rewards[i] for result in results]) for i in range(num_completions)
        ]
        future.set_result(GroupRewards(rewards=rewards, functions=results))

    def _result(self, name: str, call: Any, prompt: "Prompt", num_completions: int) -> FunctionRewards:
        error = call.exception()
        if error is None and isinstance(call.result(), list):
            return FunctionRewards(name=name, rewards=call.result())
        outcome: Literal["timed_out", "failed"] = "failed"
        if error is None:
            problem, remedy = call.result(), "correct the function"
        elif isinstance(error, TimeoutError):
            outcome = "timed_out"
            problem = f"did not return within {self._config.timeout_s:g} s and was killed"
            remedy = "make it faster or raise learner.reward.timeout_s"
        else:
            problem, remedy = f"ended its process: {error}", "correct the function"
        message = (
            f"reward function {name} {problem}, for {num_completions} completions of prompt {shorten(prompt.prompt)}"
        )
        if outcome == "timed_out":  # a failure ends the run with this message
            logger.warning("%s", message)
        nothing: list[float | None] = [None] * num_completions
        return FunctionRewards(name=name, rewards=nothing, outcome=outcome, message=f"{message}; {remedy}")


class _Countdown:
    """Calls `then` when it was itself called `count` times, from whatever threads."""

    def __init__(self, count: int, then: Callable[[], None]) -> None:
        self._left, self._then, self._lock = count, then, threading.Lock()

    def __call__(self, _: object) -> None:
        with self._lock:
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._then()


def _weighted_sum(weights: Sequence[float], rewards: Sequence[float | None]) -> float | None:
    """None where no function with a weight gave a reward, so that a function that only watches never makes it 0."""
    terms = [w * r for w, r in zip(weights, rewards, strict=True) if w != 0 and r is not None]
    return sum(terms) if terms else None
