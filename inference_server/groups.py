"""The groups of the one learner: sampled by the engine, kept until the learner has acknowledged them.

Generate ──▶ running ──▶ finished ──▶ Ack ▸ forgotten
                │           └── sent again on a new connection, never twice on one: what waits on a slow link would only grow
                └── GroupFailed: said once, the learner asks again
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence

import numpy as np

from inference_server.engine.interface import Engine, EngineFailed, EngineLimits
from protocol.messages import Generate, Group, GroupFailed, Message, Sampling

log = logging.getLogger(__name__)

MAX_COMPLETIONS = 16_384
"""vLLM's own bound on the completions of one request."""

Deliver = Callable[[Message], Awaitable[bool]]
"""Sends a message to the learner; False if it cannot be reached now."""

Spawn = Callable[[Coroutine[None, None, None], str], asyncio.Task[None]]
"""Runs what needs the engine, under a name."""


class Groups:
    """Running and finished groups by id; all of them belong to the current learner."""

    def __init__(self, engine: Engine, deliver: Deliver, spawn: Spawn) -> None:
        self._engine, self._deliver, self._spawn = engine, deliver, spawn
        self._running: dict[str, asyncio.Task[None]] = {}
        self._finished: dict[str, Group] = {}
        self._undelivered: set[str] = set()
        """Of the finished ones: those not handed to the learner's present connection."""
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
        """Seconds in which no group was running."""
        return self._idle_s + (0.0 if self._idle_since is None else time.monotonic() - self._idle_since)

    def ask(self, request: Generate) -> None:
        """Start a group; one that is running goes on, one that is finished is on its way."""
        group_id = request.group_id
        if group_id in self._running or group_id in self._finished:
            return
        if self._idle_since is not None:
            self._idle_s, self._idle_since = self.idle_s, None
        task = self._spawn(self._generate(request), f"group {group_id}")
        self._running[group_id] = task
        task.add_done_callback(lambda task: self._ended(group_id, task))

    def acknowledge(self, group_ids: Iterable[str]) -> None:
        for group_id in group_ids:
            self._finished.pop(group_id, None)
            self._undelivered.discard(group_id)

    def cancel(self, group_ids: Sequence[str]) -> None:
        for group_id in group_ids:
            # Gone from the table at once: a task takes a turn of the loop to end, and the same id may be asked for again.
            if task := self._running.pop(group_id, None):
                task.cancel()
        self._note_idle()
        self.acknowledge(group_ids)

    def forget_all(self) -> None:
        """Abort what is running and drop what is finished."""
        self.cancel([*self._running, *self._finished])

    async def deliver_again(self) -> None:
        """Send every finished group on a new connection."""
        self._undelivered = set(self._finished)
        await self.deliver_rest()

    async def deliver_rest(self) -> None:
        """Send what the learner could not be reached for."""
        for group_id in list(self._undelivered):
            await self._send(group_id)

    async def _generate(self, request: Generate) -> None:
        group_id, sampling = request.group_id, request.sampling
        asked_at = time.monotonic()
        try:
            async with asyncio.timeout(request.deadline_s):
                completions, entered_version = await self._engine.generate(request.prompt_token_ids, sampling)
        except TimeoutError:
            await self._deliver(
                GroupFailed(
                    group_id=group_id, code="deadline", retryable=True,
                    message=f"{sampling.num_completions} completions of at most {sampling.max_tokens} tokens were not done "
                    f"within the group's deadline of {request.deadline_s:g} s; raise the deadline, ask for fewer groups at "
                    "a time, or raise server.max_concurrent_sequences",
                )
            )  # fmt: skip
        except EngineFailed as error:  # not EngineDead: the learner asks the next engine for the same groups
            log.warning("group %s failed: %s", group_id, error)
            await self._deliver(GroupFailed(group_id=group_id, code="engine_error", message=str(error), retryable=True))
        else:
            self.tokens_generated += sum(len(completion.token_ids) for completion in completions)
            self._finished[group_id] = Group(
                group_id=group_id,
                entered_version=entered_version,
                completions=completions,
                server_s=time.monotonic() - asked_at,
            )
            self._undelivered.add(group_id)
            await self._send(group_id)

    async def _send(self, group_id: str) -> None:
        group = self._finished.get(group_id)  # None: acknowledged while others were sent
        if group is not None and await self._deliver(group):
            self._undelivered.discard(group_id)

    def _ended(self, group_id: str, task: asyncio.Task[None]) -> None:
        if self._running.get(group_id) is task:
            del self._running[group_id]
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._running and self._idle_since is None:
            self._idle_since = time.monotonic()


def why_invalid(prompt_token_ids: np.ndarray, sampling: Sampling, limits: EngineLimits) -> str | None:
    """Return what is wrong with a request, with the values and the remedy, or None. Vouches for what vLLM does not check:
    an id beyond the vocabulary kills its engine."""
    if problem := why_not_tokens(prompt_token_ids, limits):
        return problem
    num_tokens = len(prompt_token_ids) + sampling.max_tokens
    out_of_range = [
        f"{name} is {value}, expected {expected}"
        for name, value, expected, fits in (
            ("num_completions", sampling.num_completions, f"1 to {MAX_COMPLETIONS}",
             1 <= sampling.num_completions <= MAX_COMPLETIONS),
            ("max_tokens", sampling.max_tokens, "at least 1", sampling.max_tokens >= 1),
            # vLLM would raise one in between to 0.01 without a word, and the logprobs would be of that.
            ("temperature", sampling.temperature, "0, or 0.01 to 2",
             sampling.temperature == 0 or 0.01 <= sampling.temperature <= 2),
            ("temperature", sampling.temperature, "more than 0, for without sampling all completions would be equal",
             sampling.temperature > 0 or sampling.num_completions <= 1),
            ("top_p", sampling.top_p, "more than 0 and at most 1", 0 < sampling.top_p <= 1),
            ("top_k", sampling.top_k, "0 (off) or more", sampling.top_k >= 0),
            ("seed", sampling.seed, "0 to 2**62", sampling.seed is None or 0 <= sampling.seed < 1 << 62),
            ("stop_token_ids", sampling.stop_token_ids, f"ids below the vocabulary's {limits.vocab_size}",
             all(0 <= token < limits.vocab_size for token in sampling.stop_token_ids)),
        )
        if not fits
    ]  # fmt: skip
    if out_of_range:
        return f"sampling: {'; '.join(out_of_range)}"
    if num_tokens > limits.max_model_len:
        return (
            f"the prompt has {len(prompt_token_ids)} tokens and max_tokens is {sampling.max_tokens}, together {num_tokens}; "
            f"the server allows {limits.max_model_len} (server.max_model_len): shorten the prompt, lower max_tokens, or raise it"
        )
    return None


def why_not_tokens(token_ids: np.ndarray, limits: EngineLimits) -> str | None:
    """Return why these cannot be tokens of this model, or None."""
    if len(token_ids) == 0:
        return "the prompt has no tokens; expected at least one"
    low, high = int(token_ids.min()), int(token_ids.max())
    if low < 0 or high >= limits.vocab_size:
        return (
            f"the prompt has token id {low if low < 0 else high}; expected 0 to {limits.vocab_size - 1}, the model's vocabulary: "
            "is it the tokenizer of this model?"
        )
    return None
