"""A service in a sandbox process that answers commands, or misbehaves. It can be started in each of the three ways."""

import gc
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from learner.sandbox.process import PipeProcess, SandboxLimits
from learner.sandbox.start import Child, fork, run_script, spawn

LARGE = 5_000_000
"""More bytes than a pipe can hold."""
DEADLINE_S, SHORT_S = 60.0, 0.5
TEXT = msgspec.msgpack.Decoder(str)
LIMITS = SandboxLimits(section="learner.test", processes_key="num_tests", timeout_s=SHORT_S, max_memory_mib=200)
UNWATCHED = msgspec.structs.replace(LIMITS, max_memory_mib=None)
IMPORTED_IN = os.getpid()


def serve(pipe: Connection) -> None:
    """Answer each command with a text until the learner ends."""
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
        case "preloaded":
            text = str(os.getpid() != IMPORTED_IN)
    return msgspec.msgpack.encode(text)


def spawned() -> tuple[Connection, Child]:
    return spawn("service", serve)


def forked() -> tuple[Connection, Child]:
    return fork("service", __name__, serve)


def scripted() -> tuple[Connection, Child]:
    return run_script(sys.executable, Path(__file__))


WAYS = {"spawned": spawned, "forked": forked, "scripted": scripted}


def service(way: str = "forked") -> PipeProcess:
    return PipeProcess(*WAYS[way](), LIMITS)


if __name__ == "__main__":
    with suppress(EOFError):
        serve(Connection(int(sys.argv[1])))
