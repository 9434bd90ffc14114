"""Start an environment's process: fork within milliseconds, or run another interpreter.

Invariant: the process leads its own group and ends with the learner. `start` returns the learner's end of its
pipe.
"""

import multiprocessing
import os
import subprocess
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

from learner.config import EnvironmentConfig
from learner.environments.host import serve
from learner.sandbox.child import ForkedProcess, end_with_the_learner, start_fork_server
from learner.sandbox.descendants import end_with_descendants
from protocol.errors import ConfigError
from protocol.installation import is_elsewhere

OWN_INTERPRETER = Path(__file__).with_name("own_interpreter.py")
# Forked from a process that has imported only this module. The learner's threads, sockets and tensors must
# not be inherited, and importing this module in each of dozens of processes would take seconds.
CONTEXT = multiprocessing.get_context("forkserver")
PRELOADED = [__name__]
SAFE_PATH = "PYTHONSAFEPATH"


class Begun(Protocol):
    """A started process, as in multiprocessing, that several threads may query."""

    @property
    def pid(self) -> int | None: ...

    @property
    def exitcode(self) -> int | None: ...

    def is_alive(self) -> bool: ...

    def kill(self) -> None: ...

    def join(self, timeout: float) -> None: ...


def start(config: EnvironmentConfig, *, takes_text: bool) -> tuple[Connection, Begun]:
    """Start the process. Raises ConfigError if the interpreter cannot be started."""
    return _forked(config, takes_text) if config.python is None else _in(config.python, config, takes_text)


def _forked(config: EnvironmentConfig, takes_text: bool) -> tuple[Connection, Begun]:
    CONTEXT.set_forkserver_preload(PRELOADED)  # affects this whole process, so not before it is needed
    safe_path = os.environ.get(SAFE_PATH)
    if is_elsewhere():  # only the environment variable reaches multiprocessing's `python -c`
        os.environ[SAFE_PATH] = "1"
    try:
        start_fork_server()
    finally:
        _set_safe_path(safe_path)
    pipe, theirs = CONTEXT.Pipe()
    arguments = (theirs, safe_path, config.factory, config.tools, takes_text)
    process = CONTEXT.Process(target=_serve_forked, args=arguments, name="environment")
    begun = ForkedProcess(process)
    theirs.close()
    return pipe, begun


def _set_safe_path(value: str | None) -> None:
    if value is None:
        os.environ.pop(SAFE_PATH, None)
    else:
        os.environ[SAFE_PATH] = value


def _serve_forked(
    pipe: Connection, safe_path: str | None, factory: str | None, tools: tuple[str, ...], takes_text: bool
) -> None:
    _set_safe_path(safe_path)  # processes that the environment starts get the user's own setting
    end_with_the_learner()
    serve(pipe, factory, tools, takes_text)
    end_with_descendants()  # the learner is gone


def _in(python: str, config: EnvironmentConfig, takes_text: bool) -> tuple[Connection, Begun]:
    pipe, theirs = multiprocessing.Pipe()
    lifeline, ours = os.pipe()
    fds = (theirs.fileno(), lifeline)
    command = [python, str(OWN_INTERPRETER), *map(str, fds), config.factory or "", str(takes_text), *config.tools]
    try:
        process = subprocess.Popen(command, pass_fds=fds, start_new_session=True, stdin=subprocess.DEVNULL, stdout=2)
    except OSError as error:
        os.close(ours)
        pipe.close()
        raise ConfigError(
            f"learner.environment.python = {python!r} cannot be started: {error}; name an interpreter"
        ) from error
    finally:
        theirs.close()
        os.close(lifeline)
    return pipe, _InItsOwn(process, ours)


class _InItsOwn:
    """A process that was not forked."""

    def __init__(self, process: subprocess.Popen[bytes], lifeline: int) -> None:
        self._process, self._lifeline = process, lifeline

    def __del__(self) -> None:
        os.close(self._lifeline)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def is_alive(self) -> bool:
        return self.exitcode is None

    def kill(self) -> None:
        self._process.kill()

    def join(self, timeout: float) -> None:
        with suppress(subprocess.TimeoutExpired):  # multiprocessing's join does not raise either
            self._process.wait(timeout)
