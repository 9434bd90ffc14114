"""One server's place in a run: the link that the learner reaches it by, its directory, and the process that is there now.

Of a run's several servers each has a directory of its own, for its log, its traps and its events; one alone shares the run's.
"""

from pathlib import Path

from tests.chaos.process import FAKE_SERVER, SERVER, Process, start_as_user, start_forked
from tests.chaos.schedule import Engine
from tests.link import Link
from tests.ports import free_port


class Place:
    """Of the server of this number."""

    def __init__(self, number: int, engine: Engine, directory: Path, config_file: Path, *, has_http: bool) -> None:
        directory.mkdir(exist_ok=True)
        self.number, self.directory = number, directory
        self._engine, self._config_file = engine, config_file
        self.link = Link()
        self._http = Link() if has_http else None
        self.process = self._start()

    @property
    def endpoint(self) -> str:
        """Where the learner finds it, whichever process is there."""
        return f"tcp://127.0.0.1:{self.link.port}"

    @property
    def server_endpoint(self) -> str:
        """Where the process that is there now listens."""
        return f"tcp://127.0.0.1:{self.link.server_port}"

    @property
    def url(self) -> str:
        """The same of its OpenAI side."""
        assert self._http is not None
        return f"http://127.0.0.1:{self._http.port}/v1"

    def start_again(self) -> None:
        self.process = self._start()

    def _start(self) -> Process:
        self.link.server_port = free_port()  # the one before may be somebody else's by now
        log, arguments = self.directory / "server.log", [str(self._config_file), "--endpoint", self.server_endpoint]
        if self._http is not None:
            self._http.server_port = free_port()
            arguments += ["--server.http-port", str(self._http.server_port)]
        if self._engine == "real":
            return start_as_user(SERVER, self.directory, log, arguments)
        return start_forked(FAKE_SERVER, self.directory, log, arguments)

    def close(self) -> None:
        self.process.end()
        self.link.close()
        if self._http is not None:
            self._http.close()
