"""The process of an agent: the results that it reports, and its end together with the learner."""

import asyncio
import functools
import inspect
import json
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import numpy as np
import pytest

from learner.gateway.agent_host import command_of, in_loop, outcome
from learner.gateway.players import AGENT_HOST

TIMEOUT_S = 60.0
REQUEST = {"row": {"worth": 1.0}, "base_url": "http://none/v1", "api_key": "k"}


@pytest.mark.parametrize(
    ("returned", "reward"),
    [
        (np.float32(0.5), 0.5),
        (None, None),
        ({"chatcmpl-1": 1, "chatcmpl-2": 0}, {"chatcmpl-1": 1.0, "chatcmpl-2": 0.0}),
    ],
)
def test_an_agent_can_return_a_number_numbers_by_completion_or_nothing(returned: Any, reward: Any) -> None:
    async def asynchronous(row: dict[str, Any], **given: Any) -> Any:
        return returned

    def synchronous(row: dict[str, Any], **given: Any) -> Any:
        return asynchronous(row, **given)

    assert outcome(asynchronous, REQUEST) == outcome(synchronous, REQUEST) == {"reward": reward}


@pytest.mark.parametrize("returned", ["right", float("inf"), {"chatcmpl-1": "right"}])
def test_an_agent_that_raises_or_returns_another_type_has_failed(returned: Any) -> None:
    result = outcome(lambda row, **given: returned, REQUEST)["problem"]
    assert (
        result.startswith("raised TypeError: ")
        and "expected a finite number, numbers by completion id, or None" in result
    )
    for error in (ValueError("no such thing"), SystemExit(3)):

        async def fail(row: dict[str, Any], error: BaseException = error, **given: Any) -> Any:
            raise error

        assert outcome(fail, REQUEST)["problem"].startswith(f"raised {type(error).__name__}: ")


@pytest.mark.parametrize("kind", ["asynchronous", "synchronous"])
def test_the_reward_does_not_wait_for_a_thread_that_the_agent_gave_up(kind: str) -> None:
    released, ended = threading.Event(), threading.Event()

    def hang() -> None:
        released.wait(10.0)
        ended.set()

    async def give_up(row: dict[str, Any], **given: Any) -> float:
        thread = asyncio.create_task(asyncio.to_thread(hang))
        await asyncio.wait([thread], timeout=0.1)
        return 0.5

    agent = give_up if kind == "asynchronous" else lambda row, **given: give_up(row, **given)
    try:
        assert outcome(agent, REQUEST) == {"reward": 0.5} and not ended.is_set()
    finally:
        released.set()


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # keeps connections

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "3")
        self.end_headers()
        self.wfile.write(b"0.5")

    def log_message(self, *message: object) -> None:
        pass


@pytest.fixture
def service() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def test_a_client_that_an_agent_keeps_serves_all_its_episodes(service: str) -> None:
    client = httpx.AsyncClient()

    async def rate(row: dict[str, Any], **given: Any) -> float:
        return float((await client.get(service)).text)

    assert [outcome(rate, REQUEST) for _ in range(3)] == [{"reward": 0.5}] * 3
    in_loop(client.aclose())


def test_tasks_that_an_agent_leaves_behind_are_cancelled() -> None:
    left: list[asyncio.Task[None]] = []

    async def leave(row: dict[str, Any], **given: Any) -> float:
        left.append(asyncio.create_task(asyncio.sleep(600)))
        return 0.5

    assert outcome(leave, REQUEST) == {"reward": 0.5}
    assert left[0].cancelled()


class Asynchronous:
    async def __call__(self, row: dict[str, Any], *, http_client: Any, **given: Any) -> float:
        return float(inspect.iscoroutinefunction(http_client.get))


def test_an_asynchronous_object_gets_an_asynchronous_client_also_as_a_partial() -> None:
    for agent in (Asynchronous(), partial(Asynchronous())):
        assert outcome(agent, REQUEST) == {"reward": 1.0}


def test_an_asynchronous_agent_behind_a_plain_decorator_gets_an_open_asynchronous_client() -> None:
    async def agent(row: dict[str, Any], *, http_client: Any, **given: Any) -> float:
        return float(isinstance(http_client, httpx.AsyncClient) and not http_client.is_closed)

    @functools.wraps(agent)
    def decorated(*arguments: Any, **given: Any) -> Any:
        return agent(*arguments, **given)

    def undecorated(row: dict[str, Any], *, http_client: Any, **given: Any) -> Any:
        async def rate() -> float:
            return float(isinstance(http_client, httpx.Client) and not http_client.is_closed)

        return rate()

    assert outcome(decorated, REQUEST) == outcome(undecorated, REQUEST) == {"reward": 1.0}


@pytest.mark.parametrize(
    ("command", "result"),
    [
        ("echo said; echo 0.75", {"reward": 0.75}), ("echo", {"reward": None}), ("echo true", {"reward": None}),
        *((f"echo said; echo {number}", {"reward": float(number)}) for number in (".50", "-.5", "+0.5", "5.", "1E-2")),
        ("echo 1; echo run_1", {"reward": None}), ("echo 1_0", {"reward": None}),
        ("echo '{\"chatcmpl-1\": 1}'", {"reward": {"chatcmpl-1": 1.0}}),
        ("echo '{\"level\": \"info\", \"event\": 1}'", {"reward": None}), ("echo '{}'", {"reward": None}),
        ('test "$OPENAI_BASE_URL $OPENAI_API_KEY" = "http://none/v1 k" && echo "$SLIPSTREAM_ROW"',
            {"reward": {"worth": 1.0}}),
        ('cat "$SLIPSTREAM_ROW_FILE"; cat "$SLIPSTREAM_ROW_FILE"; echo; cat "$SLIPSTREAM_ROW_FILE"',
            {"reward": {"worth": 1.0}}),
        ('test "$ANTHROPIC_BASE_URL $ANTHROPIC_API_KEY" = "http://none k" && echo 1', {"reward": 1}),
    ],
)  # fmt: skip
def test_the_last_printed_line_of_a_command_is_its_reward(command: str, result: dict[str, Any]) -> None:
    assert outcome(command_of(command), REQUEST) == result


@pytest.mark.parametrize("num_extra", [0, 1, 1_000_000])
def test_a_command_reads_a_row_that_no_environment_variable_can_hold(num_extra: int) -> None:
    num_own = len('SLIPSTREAM_ROW={"worth": 1.0, "text": ""}') + 1
    row = {"worth": 1.0, "text": "x" * (32 * resource.getpagesize() - num_own + num_extra)}
    printed = 'test "${SLIPSTREAM_ROW+set}" = "%s" && wc -c < "$SLIPSTREAM_ROW_FILE"' % ("set" if not num_extra else "")
    assert outcome(command_of(printed), REQUEST | {"row": row}) == {"reward": len(json.dumps(row))}


@pytest.mark.parametrize("number", ["NaN", "nan", "-Infinity", "-inf"])
def test_a_command_whose_number_is_not_finite_has_failed(number: str) -> None:
    assert "expected a finite number" in outcome(command_of(f"echo {number}"), REQUEST)["problem"]


@pytest.mark.parametrize(("command", "code"), [("echo 1; exit 7", 7), ("kill -9 $$", -9)])
def test_a_command_that_fails_has_no_reward(command: str, code: int) -> None:
    assert f"the command ended with exit code {code}" in outcome(command_of(command), REQUEST)["problem"]


@pytest.mark.parametrize("last_words", ["none", "half an order", "an answer is left unread", "the agent would answer"])
def test_an_agents_process_ends_when_its_learner_is_killed(last_words: str) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(TIMEOUT_S)
    command = "true" if last_words != "the agent would answer" else "sleep 1"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(AGENT_HOST), str(theirs.fileno()), "command", command],
            pass_fds=[theirs.fileno()], start_new_session=True,
        )  # fmt: skip
    try:
        assert select.select([ours], [], [], TIMEOUT_S)[0], "the process did not report that it is ready"
        if last_words != "an answer is left unread":  # an unread answer resets the connection
            ours.recv(1000)
        if last_words == "half an order":
            ours.sendall(b'{"row": ')
        if last_words == "the agent would answer":
            ours.sendall(b'{"row": {}, "base_url": "", "api_key": ""}\n')
        ours.close()
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    finally:
        process.kill()
