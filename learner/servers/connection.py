"""The way to one inference server: its link, kept up in the learner's event loop, and the waiting for it.

    consumes: Welcome and groups of the link      produces: calls into the loop, the server that is connected now
    waits for: a welcome                          unblocked by: whatever server listens at the endpoint

Rollouts, pushes and the parity probe talk to the server through one of these, and nothing else knows how. The failure of the
link (a server that refuses this run) is one of the loop's background.
"""

import threading
import time
from collections.abc import Callable

from learner.config import LearnerRun
from learner.servers.link import OnGroup, OnWelcome, ServerLink
from learner.servers.loop_thread import LoopThread
from protocol.channel.keys import learner_keys
from protocol.errors import DeadlineExceeded, ServerLost
from protocol.messages import Hello, Welcome

OPEN_TIMEOUT_S = 10.0
LOOK_EVERY_S = 0.05


class Connection:
    """One server, reached from any thread."""

    def __init__(self, run: LearnerRun, hello: Hello, loop: LoopThread) -> None:
        self.hello, self.loop = hello, loop
        self.on_wait: Callable[[], object] = lambda: None
        """Called again and again by whoever waits for the server, or for what it gives."""
        self._run = run
        self.link = loop.call(self._open_link(), OPEN_TIMEOUT_S)

    def start(self, on_group: OnGroup, on_welcome: OnWelcome) -> None:
        """Begin to greet the server; both are called in the loop."""
        self.loop.spawn(self.link.run(on_group, on_welcome))

    @property
    def welcome(self) -> Welcome | None:
        """What the server that is connected now has said; None while there is none."""
        return self.link.welcome if self.link.connected else None

    def wait(self, closing: threading.Event | None = None) -> Welcome:
        """Block until the server has welcomed this run. Raises DeadlineExceeded, HandshakeRefused, ServerLost when `closing`."""
        deadline = time.monotonic() + self._run.learner.connect_timeout_s
        while (welcome := self.welcome) is None:
            self.loop.raise_failure()
            self.on_wait()
            if closing is not None and closing.is_set():
                raise ServerLost(f"the server at {self._run.endpoint} is no longer waited for: the learner ends")
            if time.monotonic() > deadline:
                raise self.no_server()
            time.sleep(min(LOOK_EVERY_S, max(0.0, deadline - time.monotonic())))
        return welcome

    def no_server(self) -> DeadlineExceeded:
        """The error for a server that has not answered for `learner.connect_timeout_s`."""
        keys = " and `keys` (what listens there ends every handshake)" if self.link.handshakes_fail else ""
        return DeadlineExceeded(
            f"no inference server answers at {self._run.endpoint} after {self._run.learner.connect_timeout_s:.0f} s; start one "
            f"with `inference-server run.toml`, check `endpoint`{keys}, or raise learner.connect_timeout_s"
        )

    def close(self) -> None:
        """Close the socket; the loop has stopped."""
        self.link.close()

    async def _open_link(self) -> ServerLink:
        run = self._run
        keys = learner_keys(run.keys) if run.keys is not None else None
        return ServerLink(run.endpoint, self.hello, keys=keys, insecure=run.insecure)
