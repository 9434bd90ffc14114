"""The directory of vLLM's sockets exists while its server runs, and is removed at its end or by the next server."""

import multiprocessing
import os
import signal
import socket
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from inference_server.engine.socket_directory import PREFIX, VARIABLE, socket_directory
from protocol.errors import ConfigError

TIMEOUT_S = 60.0


@pytest.fixture
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield a short directory: pytest's paths are too long for a socket."""
    with tempfile.TemporaryDirectory() as directory:
        monkeypatch.setenv(VARIABLE, directory)
        yield Path(directory)


def bind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))


def serve(pipe: Connection) -> None:
    with socket_directory() as directory:
        bind(directory / "socket")
        pipe.send(directory)
        pipe.recv()


def test_the_directory_is_private_passed_to_vllm_and_removed(parent: Path) -> None:
    with socket_directory() as directory:
        assert directory.parent == parent and directory.stat().st_mode & 0o777 == 0o700
        assert os.environ[VARIABLE] == str(directory)
        bind(directory / "socket")
    assert not list(parent.iterdir()) and os.environ[VARIABLE] == str(parent)


def test_the_next_server_removes_directories_of_killed_servers_only(parent: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    servers = []
    for _ in range(2):
        ours, theirs = spawn.Pipe()
        server = spawn.Process(target=serve, args=(theirs,), daemon=True)
        server.start()
        assert ours.poll(TIMEOUT_S), f"a server did not start within {TIMEOUT_S:g} s"
        servers.append((server, ours, ours.recv()))
    (killed, _, left), (living, pipe, kept) = servers
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    killed.join()
    foreign = parent / f"{PREFIX}file"
    foreign.touch()
    precious = parent / f"{PREFIX}run"  # a user's files with a similar name
    precious.mkdir()
    (precious / "checkpoint").touch()
    bind(precious / "socket")
    assert left.exists()
    with socket_directory() as mine:
        assert sorted(parent.iterdir()) == sorted([mine, kept, foreign, precious]) and (kept / "socket").exists()
    pipe.send("end")
    living.join(TIMEOUT_S)
    assert sorted(parent.iterdir()) == [foreign, precious] and len(list(precious.iterdir())) == 2


def test_a_path_too_long_for_sockets_is_an_error_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 80)
    long.mkdir()
    monkeypatch.setenv(VARIABLE, str(long))
    with pytest.raises(ConfigError, match=r"more than 107 bytes; set VLLM_RPC_BASE_PATH or TMPDIR"), socket_directory():
        pass
    assert not list(long.iterdir())
