"""Requests of the learner: groups of completions, and logprobs of given tokens.

    Generate ─▶ running ─▶ finished ─▶ Ack ─▶ deleted
                   │           └── resent on a new connection, at most MAX_UNACKED_BYTES before their Acks,
                   │               never twice on one connection, because a slow link would get even slower
                   └── GroupFailed: sent once, the learner retries
    Score    ─▶ Scores: the logprobs, or the error

If an error or the deadline ends a group early, the server delivers its finished completions if there are two
or more. A single completion has no baseline. The deadline counts from the group's last token. Waits for a
slot and weight syncs do not count.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial

import msgspec
import numpy as np

from inference_server.engine.containment import Fail, run_contained
from inference_server.engine.interface import Engine, EngineFailed, EngineLimits, Sampled
from protocol.messages import Completion, Generate, Group, GroupFailed, Message, Score, Scores

log = logging.getLogger(__name__)
MAX_COMPLETIONS = 16_384
"""Maximum number of completions per request in vLLM."""
MIN_COMPLETIONS = 2
"""Minimum size of a partial group, if the request is for at least this many."""
MAX_UNACKED_BYTES = 128 << 20
"""Maximum total size of the groups that are sent and not acknowledged, in bytes. Without a limit, a reconnect
could queue gigabytes at once. A single group may be larger."""
Deliver = Callable[[Message], Awaitable[bool]]
"""Sends a message to the learner. Returns False if the learner is unreachable now."""
Notify = Callable[[Message], Awaitable[None]]
"""Sends a message to the learner, now or as soon as this connection allows."""
Spawn = Callable[[Coroutine[None, None, None], str, Fail], asyncio.Task[None]]
"""Runs a named coroutine that needs the engine. The last argument handles an unexpected exception."""


class _Running(msgspec.Struct, kw_only=True, eq=False):
    """A group that the engine is sampling."""

    request: Generate
    timeout: asyncio.Timeout
    task: asyncio.Task[None] | None = None
    entered_version: int = -1
    salt: str = ""
    num_cached_tokens: int = 0
    prompt_experts: np.ndarray | None = None
    completions: dict[int, Completion] = msgspec.field(default_factory=dict)
    """Finished completions, by index."""
    token_at: float | None = None
    """Time of the latest tokens. None before the first and after the last."""

    @property
    def has_started(self) -> bool:
        """True once the engine has sampled a token of the group."""
        return self.token_at is not None or bool(self.completions)

    def record(self, sampled: Sampled, now: float) -> None:
        self.token_at, self.entered_version = now, sampled.entered_version
        self.salt, self.num_cached_tokens = sampled.salt, sampled.num_cached_tokens
        self.completions |= sampled.completions
        self.prompt_experts = sampled.prompt_experts


class Groups:
    """Running and finished groups by id, all of them of the current learner."""

    def __init__(
        self, engine: Engine, deliver: Deliver, notify: Notify, spawn: Spawn, clock: Callable[[], float]
    ) -> None:
        """Create empty tables. `clock` stops while generation is paused."""
        self._engine, self._deliver, self._notify, self._spawn, self._clock = engine, deliver, notify, spawn, clock
        self._running: dict[str, _Running] = {}
        self._finished: dict[str, Group] = {}
        self._undelivered: dict[str, None] = {}
        """Finished groups not yet sent on the learner's current connection, in order."""
        self._unacked: dict[str, int] = {}
        """Finished groups sent on the current connection, with their sizes in bytes."""
        self._unacked_bytes = 0
        self._idle_since: float | None = time.monotonic()
        self._idle_s = 0.0
        self.tokens_generated = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_unacked(self) -> int:
        return len(self._finished)

    @property
    def idle_s(self) -> float:
        """Seconds without a running group."""
        return self._idle_s + (0.0 if self._idle_since is None else time.monotonic() - self._idle_since)

    def start(self, request: Generate) -> None:
        """Start a group, unless it is already running or finished."""
        group_id = request.group_id
        if self.knows(group_id):
            return
        if self._idle_since is not None:
            self._idle_s, self._idle_since = self.idle_s, None
        running = _Running(request=request, timeout=asyncio.timeout(None))
        running.task = self._spawn(self._generate(running), f"group {group_id}", partial(self.fail, group_id))
        self._running[group_id] = running
        running.task.add_done_callback(lambda _: self._ended(running))

    def time_out_stalled(self) -> None:
        """Time out started groups that got no token for longer than their deadline."""
        now = self._clock()
        for running in self._running.values():
            if running.token_at is None or now - running.token_at <= running.request.deadline_s:
                continue
            # An expired timeout cannot be rescheduled, and its group may take long to end.
            if not running.timeout.expired():
                running.timeout.reschedule(0.0)

    def acknowledge(self, group_ids: Iterable[str]) -> None:
        for group_id in group_ids:
            self._finished.pop(group_id, None)
            self._undelivered.pop(group_id, None)
            self._unacked_bytes -= self._unacked.pop(group_id, 0)

    def cancel(self, group_ids: Sequence[str]) -> None:
        for group_id in group_ids:
            # Remove the entry at once: the task ends one loop iteration later, and the learner may reuse the
            # id by then.
            if (running := self._running.pop(group_id, None)) and running.task:
                running.task.cancel()
        self._note_idle()
        self.acknowledge(group_ids)

    def forget_all(self) -> None:
        """Cancel running groups and delete finished ones."""
        self.cancel([*self._running, *self._finished])

    def knows(self, group_id: str) -> bool:
        return group_id in self._running or group_id in self._finished

    async def return_groups(self, *, include_started: bool) -> None:
        """Return groups to the learner, which requests them elsewhere.

        Groups with sampled tokens are returned only if `include_started` is set.
        """
        group_ids = [
            group_id for group_id, running in self._running.items() if include_started or not running.has_started
        ]
        self.cancel(group_ids)
        for group_id in group_ids:
            await self._notify(drain_failure(group_id))

    def fail(self, group_id: str, why: str) -> Awaitable[None]:
        """Report a group that was lost to a server error. The learner retries it."""
        self.acknowledge([group_id])
        failed = GroupFailed(group_id=group_id, code="engine_error", message=why, retryable=True)
        return self._notify(failed)

    def on_new_connection(self) -> None:
        """Mark every finished group as not yet sent."""
        self._undelivered, self._unacked, self._unacked_bytes = dict.fromkeys(self._finished), {}, 0

    async def deliver_rest(self) -> None:
        """Send the groups that waited for a connection or for Acks."""
        for group_id in list(self._undelivered):
            await run_contained(self._send(group_id), f"sending group {group_id}", partial(self.fail, group_id))
            if group_id in self._undelivered:
                return

    async def _generate(self, running: _Running) -> None:
        request, requested_at = running.request, time.monotonic()
        failure = await self._sample(running)
        completions = [completion for _, completion in sorted(running.completions.items())]
        if failure is not None:
            log.warning(
                "group %s failed with %d of %d completions finished: %s",
                request.group_id, len(completions), request.sampling.num_completions, failure.message,
            )  # fmt: skip
            if len(completions) < min(MIN_COMPLETIONS, request.sampling.num_completions):
                await self._notify(failure)
                return
        self.tokens_generated += sum(len(completion.token_ids) for completion in completions)
        self._finished[request.group_id] = Group(
            group_id=request.group_id,
            entered_version=running.entered_version,
            completions=completions,
            server_s=time.monotonic() - requested_at,
            salt=running.salt,
            num_cached_tokens=running.num_cached_tokens,
            prompt_experts=running.prompt_experts,
        )
        self._undelivered[request.group_id] = None
        await self._send(request.group_id)

    async def _sample(self, running: _Running) -> GroupFailed | None:
        """Collect the engine's output and return the failure if it is incomplete."""
        request = running.request
        try:
            async with running.timeout:
                async for sampled in self._engine.generate(
                    request.prompt_token_ids, request.sampling, request.salt, request.experts_from
                ):
                    running.record(sampled, self._clock())
        except TimeoutError:
            why = (
                f"the group had started and received no token for {request.deadline_s:g} s "
                "(learner.group_idle_timeout_s)"
            )
            return GroupFailed(group_id=request.group_id, code="deadline", message=why, retryable=True)
        # EngineDead propagates: the learner retries its groups on the next engine.
        except EngineFailed as error:
            return GroupFailed(group_id=request.group_id, code="engine_error", message=str(error), retryable=True)
        finally:
            running.token_at = None
        return None

    async def _send(self, group_id: str) -> None:
        # None if the learner acknowledged the group while others were sent.
        group = self._finished.get(group_id)
        if group is None:
            return
        arrays = [group.prompt_experts]
        for one in group.completions:
            arrays += [one.token_ids, one.behavior_logprobs, one.experts]
        num_bytes = sum(array.nbytes for array in arrays if array is not None)
        if self._unacked and self._unacked_bytes + num_bytes > MAX_UNACKED_BYTES:
            return
        # The Ack may have arrived during the send.
        if await self._deliver(group) and group_id in self._undelivered:
            del self._undelivered[group_id]
            self._unacked[group_id] = num_bytes
            self._unacked_bytes += num_bytes

    def _ended(self, running: _Running) -> None:
        if self._running.get(running.request.group_id) is running:
            del self._running[running.request.group_id]
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._running and self._idle_since is None:
            self._idle_since = time.monotonic()


def drain_failure(group_id: str) -> GroupFailed:
    """Return the answer of a draining server to a group that it will not complete."""
    return GroupFailed(
        group_id=group_id, code="draining", retryable=True,
        message="the server is draining and will not complete this group; request it from another server, or from this "
        "server's successor",
    )  # fmt: skip


def why_invalid(request: Generate, limits: EngineLimits) -> str | None:
    """Return what is wrong with a request, with values and remedy, or None.

    Covers what vLLM does not check: a token id beyond the vocabulary kills its engine.
    """
    prompt_token_ids, sampling = request.prompt_token_ids, request.sampling
    if problem := why_not_tokens(prompt_token_ids, limits):
        return problem
    if request.experts_from is not None and limits.experts is None:
        return "the server returns no routed experts; set server.return_routed_experts = true, and restart it"
    if request.experts_from is not None and request.experts_from > len(prompt_token_ids):
        return f"experts_from is {request.experts_from}, expected at most the prompt's {len(prompt_token_ids)} tokens"
    num_tokens = len(prompt_token_ids) + sampling.max_tokens
    out_of_range = [
        f"{name} is {value}, expected {expected}"
        for name, value, expected, fits in (
            ("num_completions", sampling.num_completions, f"1 to {MAX_COMPLETIONS}",
             1 <= sampling.num_completions <= MAX_COMPLETIONS),
            ("max_tokens", sampling.max_tokens, "at least 1", sampling.max_tokens >= 1),
            # vLLM would silently raise a value between 0 and 0.01 to 0.01, and return logprobs of that
            # temperature.
            ("temperature", sampling.temperature, "0, or 0.01 to 2",
             sampling.temperature == 0 or 0.01 <= sampling.temperature <= 2),
            ("temperature", sampling.temperature, "more than 0, because all completions are equal without sampling",
             sampling.temperature > 0 or sampling.num_completions <= 1),
            ("top_p", sampling.top_p, "more than 0 and at most 1", 0 < sampling.top_p <= 1),
            ("top_k", sampling.top_k, "0 (off) or more", sampling.top_k >= 0),
            ("seed", sampling.seed, "0 to 2**62", sampling.seed is None or 0 <= sampling.seed < 1 << 62),
            ("stop_token_ids", sampling.stop_token_ids, f"ids below the vocabulary size of {limits.vocab_size}",
             all(0 <= token < limits.vocab_size for token in sampling.stop_token_ids)),
        )
        if not fits
    ]  # fmt: skip
    if out_of_range:
        return f"sampling: {'; '.join(out_of_range)}"
    if num_tokens > limits.max_model_len:
        return (
            f"the prompt has {len(prompt_token_ids)} tokens and max_tokens is {sampling.max_tokens}, "
            f"{num_tokens} in total; the server allows {limits.max_model_len} (server.max_model_len); "
            "shorten the prompt, lower max_tokens, or raise server.max_model_len"
        )
    return None


def why_not_tokens(token_ids: np.ndarray, limits: EngineLimits) -> str | None:
    """Return the reason why these cannot be token ids of this model, or None."""
    if len(token_ids) == 0:
        return "the prompt has no tokens; expected at least one"
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= limits.vocab_size:
        return (
            f"the prompt has token id {low if low < 0 else high}; expected 0 to {limits.vocab_size - 1}, the model's "
            "vocabulary; use the tokenizer of this model"
        )
    return None


async def scores_of(request: Score, engine: Engine, *, has_weights: bool) -> Scores:
    """Return the logprobs of a sequence, or the error as part of the answer.

    Raises:
        EngineDead: The engine has stopped.
    """
    limits = engine.limits
    if not has_weights:
        return no_scores(request.request_id, "the server has no weights of this run yet; sync weights before scoring")
    if request.replica >= limits.num_replicas:
        available = f"the server has {limits.num_replicas} (server.data_parallel_size), counted from 0"
        return no_scores(request.request_id, f"replica {request.replica} does not exist; {available}")
    if problem := why_not_tokens(request.token_ids, limits):
        return no_scores(request.request_id, problem)
    # vLLM scores a prompt on the way to a first sampled token, which takes one position.
    if not 2 <= len(request.token_ids) < limits.max_model_len:
        expected = f"2 to {limits.max_model_len - 1} (server.max_model_len - 1)"
        return no_scores(
            request.request_id, f"the request has {len(request.token_ids)} tokens to score; expected {expected}"
        )
    try:
        async with asyncio.timeout(request.deadline_s):
            logprobs, version = await engine.score(request.token_ids, request.replica)
    except TimeoutError:
        return no_scores(
            request.request_id, f"the request was not scored within its deadline of {request.deadline_s:g} s"
        )
    except EngineFailed as error:
        return no_scores(request.request_id, str(error))
    return Scores(request_id=request.request_id, logprobs=logprobs, policy_version=version)


def no_scores(request_id: str, error: str) -> Scores:
    """Return an answer without logprobs."""
    return Scores(request_id=request_id, logprobs=np.zeros(0, dtype=np.float32), policy_version=None, error=error)
