"""The wait before a server is ended: until nothing is under way, and no longer than it may."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from deploy.drain import drain, under_way
from tests.fakes import ScriptedEngine, ServerThread

IDLE = {"push_state": "idle", "groups_running": 0, "groups_unacked": 0}


@contextmanager
def telling(statuses: list[dict[str, Any]]) -> Iterator[str]:
    """Tell these one after the other, and the last again and again."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/status"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(statuses.pop(0) if len(statuses) > 1 else statuses[0]).encode())

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_drain_ends_as_soon_as_nothing_is_under_way() -> None:
    statuses = [IDLE | {"groups_running": 2}, IDLE | {"push_state": "loading"}, IDLE | {"groups_unacked": 1}, IDLE]
    with telling(statuses) as url:
        assert drain(url, 60.0) == "drained: nothing is under way"
    assert statuses == [IDLE]


def test_a_server_that_is_always_busy_is_given_up_with_what_is_left() -> None:
    with telling([IDLE | {"groups_running": 3, "groups_unacked": 1}]) as url:
        assert drain(url, 0.2).startswith("not drained after 0.2 s: 4 groups;")


def test_a_server_that_is_gone_is_not_waited_for() -> None:
    with telling([IDLE]) as url:
        pass
    assert "does not answer" in drain(url, 60.0)


@pytest.mark.parametrize("state", ["idle", "torn"])
def test_torn_weights_are_nothing_to_wait_for(state: str) -> None:
    assert under_way(IDLE | {"push_state": state}) is None


def test_what_is_looked_at_is_what_a_server_tells() -> None:
    with ServerThread(ScriptedEngine()) as server:
        assert under_way(server.running.server.status()) is None
