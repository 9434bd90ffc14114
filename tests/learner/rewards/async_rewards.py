"""A user's file of asynchronous reward functions, with state that lives as long as their process."""

import asyncio
import functools
import os
import signal
import time
from pathlib import Path

DEADLINE_S = 60

loops: set[asyncio.AbstractEventLoop] = set()
in_flight = 0
most_in_flight = 0
num_calls = 0


async def same_loop(completions, **kwargs):
    """Return the number of event loops seen. A judge's client would belong to one of them."""
    loops.add(asyncio.get_running_loop())
    return [float(len(loops))] * len(completions)


async def most_together(completions, **kwargs):
    """Return the maximum number of concurrent calls."""
    global in_flight, most_in_flight
    in_flight += 1
    most_in_flight = max(most_in_flight, in_flight)
    await asyncio.sleep(0.02)
    in_flight -= 1
    return [float(most_in_flight)] * len(completions)


async def sleeps_on_request(completions, seconds, **kwargs):
    await asyncio.sleep(seconds[0])
    return [float(os.getpid())] * len(completions)


async def blocks_on_request(completions, seconds, **kwargs):
    time.sleep(seconds[0])
    await asyncio.sleep(0)
    return [float(os.getpid())] * len(completions)


async def is_killed_at_its_third_call(completions, flag, **kwargs):
    """Die while other calls are in flight. The file outlives the process."""
    global num_calls
    num_calls += 1
    if num_calls == 3 and not Path(flag[0]).exists():
        Path(flag[0]).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    await asyncio.sleep(0.05)
    return [1.0] * len(completions)


async def awaits_what_it_cancelled(completions, **kwargs):
    task = asyncio.create_task(asyncio.sleep(DEADLINE_S))
    task.cancel()
    await task


async def leaves(completions, **kwargs):
    os._exit(7)


async def raises(completions, **kwargs):
    raise TimeoutError("the judge is asleep")


class _Judge:
    async def __call__(self, prompts, completions, completion_ids, **kwargs):
        await asyncio.sleep(0)
        return [2.0] * len(completions)


judge_object = _Judge()
partly = functools.partial(sleeps_on_request, seconds=[0.0])


def hands_a_coroutine_on(completions, **kwargs):
    return same_loop(completions)


def waits_for_the_other(completions, mine, other, **kwargs):
    Path(mine[0]).touch()
    give_up_at = time.monotonic() + DEADLINE_S
    while not Path(other[0]).exists():
        assert time.monotonic() < give_up_at, "the other function never started"
        time.sleep(0.01)
    return [1.0] * len(completions)


def releases_the_other(completions, mine, other, **kwargs):
    return waits_for_the_other(completions, other, mine)


def logs(completions, trainer_state, log_metric, log_extra, **kwargs):
    log_metric("words", sum(len(text) for text in completions))
    log_metric("steps_left", trainer_state.max_steps - trainer_state.global_step)
    log_extra("first", [text[:1] for text in completions])
    return [0.5 + 0.1 * number for number in range(len(completions))]


def logs_what_is_taken(completions, log_metric, **kwargs):
    log_metric("mean", 1.0)
    return [0.0] * len(completions)


def logs_too_few(completions, log_extra, **kwargs):
    log_extra("first", [])
    return [0.0] * len(completions)


def takes_no_more_than_it_must(prompts, completions, completion_ids, answer, seconds):
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]
