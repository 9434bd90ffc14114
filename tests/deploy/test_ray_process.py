"""What an agent does on its node, without a cluster: its checks, the output of its process, a process that has no
node yet."""

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from deploy.ray_placement import BundleLocation, RemoteCommand
from deploy.supervisor import start_process
from protocol.errors import ConfigError
from tests.waiting import until

ray_cluster = pytest.importorskip("deploy.ray_cluster", reason="needs Ray: pip install -e '.[ray]'")


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory to enter, and to leave after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ray_cluster, "VISIBLE_WITHIN_S", 0.0)
    return tmp_path


def command(directory: Path, **needed_files: str) -> RemoteCommand:
    files = {str(directory / name): start for name, start in needed_files.items()}
    return RemoteCommand("learner", (), {}, str(directory), files)


def test_a_node_that_does_not_see_the_drivers_files_is_named_with_the_remedy(directory: Path) -> None:
    remedy = "on storage that all nodes see at the same path"
    with pytest.raises(ConfigError, match=rf"nowhere cannot be entered on node \S+ \(No such file.*{remedy}"):
        ray_cluster.enter(command(directory / "nowhere"))
    (directory / "servers").write_text("# Servers of another driver.\ntcp://")
    for name in ("servers", "missing"):
        with pytest.raises(
            ConfigError, match=rf"{name} on node \S+ is not the file of the driver; .*{remedy}.* and keys to"
        ):
            ray_cluster.enter(command(directory, **{name: "# Servers of this driver."}))
    ray_cluster.enter(command(directory, servers="# Servers of another driver.\ntcp://"))


def test_the_output_ends_with_the_process_even_if_its_child_keeps_the_pipe_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray_cluster, "GRACE_S", 0.2)
    script = "import subprocess, sys\nprint('first')\nsubprocess.Popen(['sleep', '60'])\nprint('last')\nsys.exit(3)"
    with start_process([sys.executable, "-c", script], {}, signal.SIGKILL) as popen:
        started_at = time.monotonic()
        output = "".join(ray_cluster.output_of(popen))
        assert time.monotonic() < started_at + 30, "it waited for the child"
        assert (output.splitlines(), popen.returncode) == (["first", "last"], 3)
        os.killpg(popen.pid, signal.SIGKILL)


def test_a_process_gets_ctrl_c_from_a_thread_that_blocks_it_and_is_killed_with_the_thread() -> None:
    def in_thread(make: Any) -> Any:
        made: list[Any] = []
        thread = threading.Thread(target=lambda: made.append(make()))
        thread.start()
        thread.join()
        return made[0]

    def blocked() -> Any:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        popen = start_process([sys.executable, "-c", "import time\nprint('up')\ntime.sleep(60)"], {}, signal.SIGKILL)
        with popen:
            assert popen.stdout is not None and popen.stdout.readline() == "up\n"
            popen.send_signal(signal.SIGINT)
            return popen.wait(20)

    assert in_thread(blocked) == -signal.SIGINT
    with in_thread(lambda: start_process(["sleep", "60"], {}, signal.SIGKILL)) as orphan:
        assert orphan.wait(20) == -signal.SIGKILL


def test_a_process_that_gets_a_signal_while_it_waits_for_its_files_never_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, may_start, output = threading.Event(), threading.Event(), list[Any]()

    def enter(_: RemoteCommand) -> None:
        waits.set()
        may_start.wait(20)

    monkeypatch.setattr(ray_cluster, "enter", enter)
    monkeypatch.setattr(ray_cluster, "module_command", lambda _: (sys.executable, "-S", "-c", "print('trained')"))
    agent = ray_cluster.Agent()
    thread = threading.Thread(target=lambda: output.extend(agent.run(7, command(tmp_path))))
    thread.start()
    assert waits.wait(20)
    agent.signal(7, signal.SIGINT)
    may_start.set()
    thread.join(20)
    assert output == [-signal.SIGINT]


def test_a_process_whose_agent_has_no_node_ends_at_a_signal_and_never_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_node, prepared = threading.Event(), threading.Event()

    class AgentWithoutNode:
        class host:
            @staticmethod
            def remote() -> None: ...

    def wait_for_node(*_: Any, timeout: float) -> BundleLocation:
        has_node.wait(20)
        return BundleLocation("a", "127.0.0.1", (1, 2), ())

    def prepare(host: BundleLocation) -> RemoteCommand:
        prepared.set()
        return command(tmp_path)

    monkeypatch.setattr(ray_cluster.ray, "get", wait_for_node)
    process = ray_cluster.RemoteProcess("learner", AgentWithoutNode, prepare, tmp_path / "learner.log", 20.0)
    assert process.returncode is None
    process.signal(signal.SIGINT)
    process.wait(time.monotonic() + 20)
    assert process.returncode == -signal.SIGINT
    has_node.set()
    assert prepared.wait(20)
    until(lambda: "on node 127.0.0.1" in (tmp_path / "learner.log").read_text())
    assert process.returncode == -signal.SIGINT
