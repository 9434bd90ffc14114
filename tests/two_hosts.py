"""Two hosts on one machine: network namespaces with a wire that can be slow, lossy or cut (wire.py).

with TwoHosts() as hosts:
    server = hosts.start(0, ["-m", "inference_server", "run.toml"], log)  # reachable from host 1 at hosts.addresses[0]
    hosts.wire(cut=True)
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from tests.wire import DEVICE

ROOT = Path(__file__).parent.parent
END_TIMEOUT_S = 10.0
TIMEOUT_S = 240.0
_numbers = itertools.count()


def why_not() -> str | None:
    """Return why this machine cannot simulate two hosts, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "there is no /dev/net/tun"
    probe = f"slipstream-{os.getpid()}-probe"
    added = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "delete", probe], capture_output=True)
    return f"network namespaces are not permitted: {added.stderr.strip()}" if added.returncode else None


class TwoHosts:
    """Two simulated hosts. Leaves no process, device or namespace behind."""

    def __init__(self, *, has_plain_link: bool = False) -> None:
        """With a plain link, the kernel carries the packets, however busy the machine is; there is no `wire`."""
        self._has_plain_link = has_plain_link
        name = f"slipstream-{os.getpid()}-{next(_numbers)}"
        self._namespaces = [f"{name}-{host}" for host in (0, 1)]
        self.addresses = ["10.77.0.1", "10.77.0.2"]
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "TwoHosts":
        try:
            for namespace in self._namespaces:
                _ip("netns", "add", namespace)
            self._connect()
            for namespace, address in zip(self._namespaces, self.addresses, strict=True):
                _ip("-n", namespace, "link", "set", "lo", "up")
                _ip("-n", namespace, "address", "add", f"{address}/30", "dev", DEVICE)
                _ip("-n", namespace, "link", "set", DEVICE, "up")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _connect(self) -> None:
        if self._has_plain_link:
            one, other = self._namespaces
            _ip("link", "add", DEVICE, "netns", one, "type", "veth", "peer", "name", DEVICE, "netns", other)
            return
        self._wire = subprocess.Popen(
            [sys.executable, "-m", "tests.wire", *self._namespaces],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._wire.stdout is not None and self._wire.stdout.readline() == "ready\n"

    def wire(self, **changes: Any) -> dict[str, int]:
        """Change attributes of the wire (wire.Wire). Return the numbers of carried and lost packets so far."""
        assert self._wire.stdin is not None and self._wire.stdout is not None
        self._wire.stdin.write(json.dumps(changes) + "\n")
        self._wire.stdin.flush()
        return json.loads(self._wire.stdout.readline())

    def translate(self, host: int, public: str, port: int) -> None:
        """Make `host` reachable from the other host at this port only by the address `public`."""
        _ip("-n", self._namespaces[1 - host], "route", "add", public, "dev", DEVICE)
        self.wire(translated=[self.addresses[host], public], translated_port=port)

    def start(self, host: int, arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
        """Start python on one of the hosts."""
        command = ["ip", "netns", "exec", self._namespaces[host], sys.executable, *arguments]
        with log.open("a") as file:
            process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=file)
        self._processes.append(process)
        return process

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._processes:  # `ip netns exec` replaces itself with the command
            process.kill()
            process.wait()
        if hasattr(self, "_wire"):
            self._wire.kill()
            self._wire.communicate()
        for namespace in self._namespaces:
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=END_TIMEOUT_S)


def wait_for(is_so: Callable[[], bool], *logs: Path, timeout_s: float = TIMEOUT_S) -> None:
    """Wait until a condition holds. The error contains the logs."""
    give_up_at = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < give_up_at, "\n".join(log.read_text() for log in logs if log.exists())
        time.sleep(0.05)


def steps_of(run_dir: Path) -> list[int]:
    """Return the steps that a run has recorded so far."""
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []
    return [json.loads(line)["step"] for line in lines]


def power_off(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children without a word."""
    for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        one.kill()
