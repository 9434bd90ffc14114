"""A service that answers commands, well or badly, in a process of the sandbox."""

import gc
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection

import msgspec

from learner.sandbox.start import Child, fork, spawn

LARGE = 5_000_000
"""Bytes that fit into no pipe."""


def serve(pipe: Connection) -> None:
    """Answer commands, each with a text, until the learner is gone."""
    while True:
        pipe.send_bytes(answer(pipe, pipe.recv().split()[0]))


def answer(pipe: Connection, command: str) -> bytes:
    text = command
    match command:
        case "spin":
            while True:
                pass
        case "exit":
            os._exit(3)
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "close":
            for found in gc.get_objects():
                if isinstance(found, Connection):
                    found.close()
            time.sleep(600)
        case "nonsense":
            return b"\xc1"
        case "hoard":
            held = bytearray(b"x") * (300 << 20)
            time.sleep(600)
            text = str(len(held))
        case "share":
            text = str(
                subprocess.Popen(
                    [sys.executable, "-c", "import time; x = bytearray(b'x') * (300 << 20); time.sleep(600)"]
                ).pid
            )
            time.sleep(600)
        case "start":
            text = str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
        case "write":
            text = "x" * LARGE
        case "print":
            print("printed by a service")
        case "environ":
            text = str(os.environ.get("PYTHONSAFEPATH"))
    return msgspec.msgpack.encode(text)


def spawned() -> tuple[Connection, Child]:
    return spawn("service", serve)


def forked() -> tuple[Connection, Child]:
    return fork("service", __name__, serve)
