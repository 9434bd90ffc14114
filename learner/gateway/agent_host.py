"""The process of an agent, whose interpreter may know nothing of Slipstream.

    agent_host.py FD agent|command SPEC    a request, a JSON line on socket FD ─▶ an episode ─▶ reward or error

It imports only the standard library. `players.py` is the other end.
Invariant: the process ends with the learner, even during an episode, and with it everything it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
import io
import json
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

MAX_VARIABLE_BYTES = 32 * os.sysconf("SC_PAGE_SIZE")
"""Linux's limit of an environment variable: its name, its value and the null byte."""
CANCEL_TIMEOUT_S = 1.0
LOOP = asyncio.new_event_loop()
"""One event loop for all episodes, because the connections of a client that an agent keeps belong to their loop."""
SANDBOX = os.path.join(os.path.dirname(os.path.dirname(__file__)), "sandbox")


def load_sandbox(name: str) -> types.ModuleType:
    """Load a file of the sandbox that imports only the standard library."""
    spec = importlib.util.spec_from_file_location(f"slipstream_{name}", os.path.join(SANDBOX, f"{name}.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


descendants, user_code = load_sandbox("descendants"), load_sandbox("user_code")


def main(fd: str, kind: str, spec: str) -> None:
    """Serve one episode after another. `players.py` made this a group leader."""
    channel = socket.socket(fileno=int(fd))
    os.set_inheritable(channel.fileno(), False)  # otherwise the agent's own processes would hold it open
    sys.path[0] = os.getcwd()  # not the folder of this file
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the process may be killed at any moment
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # only the learner acts on signals sent to all, as by systemd
    descendants.adopt_orphans()
    send = partial(send_of, os.getpid(), channel)
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=read_requests, args=(channel, requests), daemon=True).start()
    try:
        run = user_code.load_named(spec) if kind == "agent" else command_of(spec)
    except user_code.NotLoaded as error:
        send(problem=str(error))
        return
    send(file_digests=user_code.digests_of_files([run]) if kind == "agent" else {})
    while True:
        send(**outcome(run, requests.get()))


def read_requests(channel: socket.socket, requests: queue.SimpleQueue[Any]) -> None:
    try:
        for line in channel.makefile("rb"):
            requests.put(json.loads(line))
    finally:  # the learner is gone. If killed, it leaves half a line or resets the connection
        descendants.end_with_descendants()


def send_of(owner: int, channel: socket.socket, **answer: Any) -> None:
    descendants.end_if_forked(owner)
    channel.sendall(json.dumps(answer).encode() + b"\n")


def outcome(run: Callable[..., Any], request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {
            "reward": checked(
                in_loop(play(run, request)) if user_code.is_asynchronous(run) else play_without_loop(run, request)
            )
        }
    except user_code.ERRORS as error:
        return {"problem": f"raised {user_code.describe(error)}"}


async def play(run: Callable[..., Any], request: dict[str, Any]) -> Any:
    async with http_client() as client:
        return await run(request["row"], base_url=request["base_url"], api_key=request["api_key"], http_client=client)


def play_without_loop(run: Callable[..., Any], request: dict[str, Any]) -> Any:
    """Call a synchronous agent, which may start its own event loop."""
    with http_client(is_asynchronous=False) as client:
        reward = run(request["row"], base_url=request["base_url"], api_key=request["api_key"], http_client=client)
        if not inspect.isawaitable(reward):
            return reward
        if not (inspect.iscoroutine(reward) and user_code.is_asynchronous(inspect.unwrap(run))):
            return in_loop(reward)
    reward.close()  # a decorator wraps an asynchronous agent, which has not started and needs the other client
    return in_loop(play(run, request))


def in_loop(reward: Awaitable[Any]) -> Any:
    """Return the result of an awaitable. Cancel the tasks that it leaves behind."""
    try:
        return LOOP.run_until_complete(awaited(reward))
    finally:
        if left := asyncio.all_tasks(LOOP):
            for task in left:
                task.cancel()
            LOOP.run_until_complete(asyncio.wait(left, timeout=CANCEL_TIMEOUT_S))


async def awaited(reward: Awaitable[Any]) -> Any:
    LOOP.set_default_executor(ThreadPoolExecutor())  # another one may have threads that an earlier episode left hanging
    return await reward


def http_client(*, is_asynchronous: bool = True) -> Any:
    """Return a client of httpx, else of aiohttp, else None, as a context manager.

    It has no timeout: the learner's deadline is the only one.
    """
    with contextlib.suppress(ImportError):
        import httpx

        return httpx.AsyncClient(timeout=None) if is_asynchronous else httpx.Client(timeout=None)
    if not is_asynchronous:
        return contextlib.nullcontext()
    with contextlib.suppress(ImportError):
        import aiohttp

        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
    return contextlib.nullcontext()


def checked(reward: Any) -> float | dict[str, float] | None:
    """Return a reward for JSON: a number, numbers by completion id, or None."""
    if reward is None:
        return None
    if isinstance(reward, dict):
        return {str(name): number(value) for name, value in reward.items()}
    return number(reward)


def number(value: Any) -> float:
    if isinstance(value, (str, bytes)) or not hasattr(value, "__float__") or not math.isfinite(float(value)):
        raise TypeError(
            f"the agent returned {value!r:.120}, expected a finite number, numbers by completion id, or None"
        )
    return float(value)


def command_of(command: str) -> Callable[..., Any]:
    """Return an agent that runs a command line."""

    def run(row: Any, *, base_url: str, api_key: str, http_client: Any) -> Any:
        as_json = json.dumps(row)
        # Files, not pipes, which leftover processes would hold open. They have no names, so that a killed episode
        # leaves none behind.
        with tempfile.TemporaryFile() as row_file, tempfile.TemporaryFile() as printed:
            row_file.write(as_json.encode())
            row_file.flush()
            of_episode = {
                "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key,
                # Anthropic's clients add /v1 themselves.
                "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"), "ANTHROPIC_API_KEY": api_key,
                "SLIPSTREAM_ROW_FILE": f"/proc/{os.getpid()}/fd/{row_file.fileno()}",
            }  # fmt: skip
            if len(f"SLIPSTREAM_ROW={as_json}") < MAX_VARIABLE_BYTES:
                of_episode["SLIPSTREAM_ROW"] = as_json
            code = subprocess.call(
                command, shell=True, stdin=subprocess.DEVNULL, stdout=printed, env={**os.environ, **of_episode}
            )
            printed.seek(0)
            text = printed.read().decode(errors="replace")
        if code:
            raise RuntimeError(f"the command ended with exit code {code}")
        return last_line(text)

    return run


def last_line(printed: str) -> Any:
    """Return the reward on the last line, or None if the line is not a reward."""
    line = printed.strip().rpartition("\n")[2]
    try:
        value = json.loads(line)
    except ValueError:
        return as_number(line)
    values = value.values() if isinstance(value, dict) else [value]
    is_reward = all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in values)
    return value if is_reward and values else None


def as_number(text: str) -> float | None:
    """Return a number that is none of JSON, such as .5 as bc prints it, or None. Names may read 2026_01_02."""
    with contextlib.suppress(ValueError):
        return None if "_" in text else float(text)
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
