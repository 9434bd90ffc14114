"""A link between learner and server that carries only so many bytes per second towards the learner."""

import asyncio
import contextlib
import threading

CHUNK_BYTES = 256
TIMEOUT_S = 10.0


class SlowLink:
    """with SlowLink(server.endpoint, bytes_per_s=2_000) as link: connect a learner to link.endpoint."""

    def __init__(self, endpoint: str, bytes_per_s: float) -> None:
        self._port, self._bytes_per_s = int(endpoint.rpartition(":")[2]), bytes_per_s
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.endpoint = ""

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        listener = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        listener.close()

    async def _connect(self, from_learner: asyncio.StreamReader, to_learner: asyncio.StreamWriter) -> None:
        from_server, to_server = await asyncio.open_connection("127.0.0.1", self._port, limit=CHUNK_BYTES)
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(
                self._carry(from_server, to_learner, self._bytes_per_s), self._carry(from_learner, to_server, 1e9)
            )

    async def _carry(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, bytes_per_s: float) -> None:
        while chunk := await source.read(CHUNK_BYTES):
            await asyncio.sleep(len(chunk) / bytes_per_s)
            target.write(chunk)
            await target.drain()
        target.close()

    def __enter__(self) -> "SlowLink":
        self._thread.start()
        assert self._ready.wait(TIMEOUT_S), "the link did not start"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(TIMEOUT_S)
