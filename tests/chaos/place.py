"""One server of a run: the link that the learner uses, a directory, and the process that runs now.

Each of several servers has its own directory for log, traps and events. A single server shares the run's directory.
"""

from pathlib import Path

from tests.chaos.process import FAKE_SERVER, SERVER, Process, start_as_user, start_forked
from tests.chaos.schedule import Engine
from tests.link import Link
from tests.ports import free_port


class Place:
    """A server that keeps its number, link and directory when its process is replaced."""

    def __init__(self, number: int, engine: Engine, directory: Path, config_file: Path, *, has_http: bool) -> None:
        directory.mkdir(exist_ok=True)
        self.number, self.directory = number, directory
        self._engine, self._config_file = engine, config_file
        self.link = Link()
        self._http = Link() if has_http else None
        self.process = self._start()

    @property
    def endpoint(self) -> str:
        """Endpoint that the learner uses. It stays the same when the process is replaced."""
        return f"tcp://127.0.0.1:{self.link.port}"

    @property
    def server_endpoint(self) -> str:
        """Endpoint that the current process listens on."""
        return f"tcp://127.0.0.1:{self.link.server_port}"

    @property
    def url(self) -> str:
        """URL of the OpenAI API that the learner uses."""
        assert self._http is not None
        return f"http://127.0.0.1:{self._http.port}/v1"

    def start_again(self) -> None:
        self.process = self._start()

    def _start(self) -> Process:
        self.link.server_port = free_port()  # another process may have the previous port by now
        log, arguments = self.directory / "server.log", [str(self._config_file), "--endpoint", self.server_endpoint]
        if self._http is not None:
            self._http.server_port = free_port()
            arguments += ["--server.http-port", str(self._http.server_port)]
        if self._engine == "real":
            return start_as_user(SERVER, self.directory, log, arguments)
        return start_forked(FAKE_SERVER, self.directory, log, arguments)

    def close(self) -> None:
        self.process.kill()
        self.link.close()
        if self._http is not None:
            self._http.close()
