"""Start processes that run user code.

    spawn         a new interpreter that imports what it needs    reward functions
    fork          a fork of a server with preloaded modules       environments, within milliseconds
    run_script    a script in an interpreter of the user's own    environments with `python`, agents

Invariant: the process leads its own group, ends with the learner, inherits none of the learner's threads, sockets
and tensors, and is no rank of the learner. Each function returns the learner's end of the process's pipe.
"""

import errno
import io
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import connection, forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from learner.sandbox.descendants import adopt_orphans, end_with_descendants
from protocol.errors import ConfigError
from protocol.installation import is_elsewhere
from protocol.signals import ignore_shutdown_signals, signals_blocked

SPAWNED = multiprocessing.get_context("spawn")
FORKED = multiprocessing.get_context("forkserver")
SAFE_PATH = "PYTHONSAFEPATH"
EXHAUSTED = {errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
"""Numbers of the OSErrors of a machine without room for another process."""
OF_RANKS = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
}  # fmt: skip
"""Environment variables of torchrun, with which user code that initializes torch or accelerate would join the ranks."""
_POLLING = threading.Lock()
"""Lock for polling child processes. multiprocessing polls all of them whenever it starts one. If two threads
poll an ended process of the fork server at once, one of them reads exit code 255, whatever it was."""


class ForkedChild:
    """A process of multiprocessing, safe for use from several threads."""

    def __init__(self, process: BaseProcess) -> None:
        """Start the process. It unblocks signals in _end_with_the_learner."""
        self._process = process
        with _POLLING, signals_blocked():
            process.start()
        assert process.pid is not None
        self.pid, self.sentinel = process.pid, process.sentinel

    @property
    def exitcode(self) -> int | None:
        with _POLLING:
            return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        connection.wait([self.sentinel], timeout)
        while self.exitcode is None and time.monotonic() < deadline:
            time.sleep(0.001)  # a spawned process closes its sentinel a moment before it has an exit code
        with _POLLING:
            self._process.join(0)


class ScriptChild:
    """A script in any interpreter, which gets the numbers of its file descriptors as first arguments."""

    sentinel = None
    lifeline: Connection | None = None
    """Connection that closes with the learner, for a script that waits for its end."""

    def __init__(
        self, python: str, script: Path, fds: Sequence[int], arguments: Sequence[str],
        environ: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        """Start the script.

        Raises:
            ConfigError: The interpreter cannot be started.
            OSError: The machine cannot start another process now.
        """
        command = [python, str(script), *map(str, fds), *arguments]
        try:
            self._process = subprocess.Popen(
                command, pass_fds=fds, start_new_session=True, stdin=subprocess.DEVNULL,
                env=without_ranks(os.environ if environ is None else environ),
                stdout=2,  # the learner's stdout may carry a command's output (`--json`)
            )  # fmt: skip
        except OSError as error:
            if error.errno in EXHAUSTED:
                raise
            raise ConfigError(
                f"learner.environment.python = {python!r} cannot be started: {error}; name an interpreter"
            ) from error

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout: float) -> None:
        with suppress(subprocess.TimeoutExpired):  # multiprocessing's join does not raise either
            self._process.wait(timeout)


Child = ForkedChild | ScriptChild


def spawn(name: str, serve: Callable[..., None], *arguments: Any) -> tuple[Connection, Child]:
    """Run `serve(pipe, *arguments)` in a new interpreter.

    Raises:
        OSError: The machine cannot start another process now.
    """
    return _start(SPAWNED, name, serve, arguments)


def fork(name: str, preloaded: str, serve: Callable[..., None], *arguments: Any) -> tuple[Connection, Child]:
    """Run `serve(pipe, *arguments)` in a fork of a process that has imported only the module `preloaded`.

    That module imports `serve`, and what the learner's main module imports, which every fork imports again.

    Raises:
        OSError: The machine cannot start another process now.
    """
    FORKED.set_forkserver_preload([preloaded])  # affects this whole process, so only when needed
    safe_path = os.environ.get(SAFE_PATH)
    if is_elsewhere():  # only the environment variable reaches multiprocessing's `python -c`
        os.environ[SAFE_PATH] = "1"
    try:
        with _POLLING, signals_blocked():  # if a signal ended the fork server, the learner would lose all forks
            forkserver.ensure_running()
    finally:
        _set_safe_path(safe_path)
    try:
        return _start(FORKED, name, serve, arguments)
    except (EOFError, ConnectionError) as error:  # a failed fork ends the fork server
        raise OSError(errno.EAGAIN, "the server that forks it has ended") from error


def run_script(python: str, script: Path, *arguments: str) -> tuple[Connection, Child]:
    """Run a script with the numbers of its pipe and its lifeline, then `arguments`.

    The lifeline reads as ended when the learner is gone.

    Raises:
        ConfigError: The interpreter cannot be started.
        OSError: The machine cannot start another process now.
    """
    pipe, theirs = multiprocessing.Pipe()
    lifeline, ours = multiprocessing.Pipe(duplex=False)
    with theirs, lifeline:
        child = ScriptChild(python, script, [theirs.fileno(), lifeline.fileno()], arguments)
    child.lifeline = ours
    return pipe, child


def _start(
    context: BaseContext, name: str, serve: Callable[..., None], arguments: tuple[Any, ...]
) -> tuple[Connection, Child]:
    pipe, theirs = context.Pipe()
    with theirs:
        started = (theirs, os.environ.get(SAFE_PATH), serve, arguments)
        return pipe, ForkedChild(context.Process(target=_serve, args=started, name=name))  # type: ignore[attr-defined]


def without_ranks(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that make a process a rank."""
    return {
        name: value for name, value in environ.items() if name not in OF_RANKS and not name.startswith("TORCHELASTIC_")
    }


def _set_safe_path(value: str | None) -> None:
    if value is None:
        os.environ.pop(SAFE_PATH, None)
    else:
        os.environ[SAFE_PATH] = value


# --- in the process -----------------------------------------------------------------------------------------
def _serve(pipe: Connection, safe_path: str | None, serve: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    _set_safe_path(safe_path)  # what the user's code starts gets the user's own setting
    for name in os.environ.keys() - without_ranks(os.environ).keys():
        del os.environ[name]
    _end_with_the_learner()
    with suppress(EOFError, ConnectionError):  # the learner is gone
        serve(pipe, *arguments)
    end_with_descendants()


def _end_with_the_learner() -> None:
    """Make this process and its descendants end with the learner.

    The process then leads its own session and leaves signals to the learner. It prints to stderr, because
    stdout belongs to the learner's command (`--json`).
    """
    ignore_shutdown_signals()
    os.setsid()
    adopt_orphans()
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # the process may be killed at any moment
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    connection.wait([sentinel])
    end_with_descendants()
