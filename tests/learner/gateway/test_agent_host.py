"""The process of an agent ends with its learner, however that has ended."""

import select
import signal
import socket
import subprocess
import sys

import pytest

from learner.gateway.players import AGENT_HOST

TIMEOUT_S = 60.0


@pytest.mark.parametrize("last_words", ["none", "half an order", "an answer is left unread", "the agent would answer"])
def test_an_agents_process_ends_with_a_learner_that_was_killed(last_words: str) -> None:
    ours, theirs = socket.socketpair()
    ours.settimeout(TIMEOUT_S)
    command = "true" if last_words != "the agent would answer" else "sleep 1"
    with theirs:
        process = subprocess.Popen(
            [sys.executable, str(AGENT_HOST), str(theirs.fileno()), "command", command],
            pass_fds=[theirs.fileno()], start_new_session=True,
        )  # fmt: skip
    try:
        assert select.select([ours], [], [], TIMEOUT_S)[0], "it has not said that it is ready"
        if last_words != "an answer is left unread":  # else the kernel resets the connection
            ours.recv(1000)
        if last_words == "half an order":
            ours.sendall(b'{"row": ')
        if last_words == "the agent would answer":
            ours.sendall(b'{"row": {}, "base_url": "", "api_key": ""}\n')
        ours.close()
        assert process.wait(TIMEOUT_S) == -signal.SIGKILL
    finally:
        process.kill()
