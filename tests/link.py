"""The link between learner and server: a TCP proxy whose connections can be cut, stalled or slowed down."""

import asyncio
import contextlib
import socket

from learner.servers.loop_thread import LoopThread

CALL_TIMEOUT_S = 60.0
CHUNK_BYTES = 1 << 16
SLOW_CHUNK_BYTES = 256
"""Chunk of a slow link, which delays each chunk by its transfer time."""


class Link:
    """Forwards `port` to `server_port` on the loopback. Only the control channel uses the link, not the weights.

    `bytes_per_s` and `bytes_per_s_to_server` limit the speed towards the learner and the server.
    """

    def __init__(
        self, server_port: int = 0, bytes_per_s: float | None = None, bytes_per_s_to_server: float | None = None
    ) -> None:
        self.server_port = server_port
        """May change. New connections use the new port."""
        self._bytes_per_s, self._bytes_per_s_to_server = bytes_per_s, bytes_per_s_to_server
        self.seen = bytearray()
        """All bytes that have passed, as an eavesdropper would see them."""
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._thread = LoopThread("link")
        self._flows = asyncio.Event()
        self._flows.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._server = self._thread.call(asyncio.start_server(self._forward, sock=self._listener), CALL_TIMEOUT_S)

    def cut(self) -> None:
        """Reset all connections, and every new one, until `restore`."""
        self._thread.loop.call_soon_threadsafe(self._cut)

    def stall(self) -> None:
        """Keep connections open, but forward no byte until `restore`."""
        self._thread.loop.call_soon_threadsafe(self._flows.clear)

    def restore(self) -> None:
        self._thread.loop.call_soon_threadsafe(self._restore)

    def close(self) -> None:
        self.cut()
        self._thread.loop.call_soon_threadsafe(self._server.close)
        self._thread.stop()

    def _cut(self) -> None:
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    def _restore(self) -> None:
        self._is_cut = False
        self._flows.set()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        try:
            await self._flows.wait()
            if self._is_cut:
                return
            there, back = await asyncio.open_connection("127.0.0.1", self.server_port)
            writers.append(back)
            self._writers.update(writers)
            ways = [
                asyncio.create_task(self._carry(reader, back, self._bytes_per_s_to_server)),
                asyncio.create_task(self._carry(there, writer, self._bytes_per_s)),
            ]
            await asyncio.wait(ways, return_when="FIRST_COMPLETED")
            for way in ways:
                way.cancel()
        except OSError:
            pass  # no server listens: the learner's connection ends as it would without the proxy
        finally:
            self._writers.difference_update(writers)
            for each in writers:
                each.transport.abort()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bytes_per_s: float | None
    ) -> None:
        with contextlib.suppress(OSError):
            while chunk := await reader.read(SLOW_CHUNK_BYTES if bytes_per_s else CHUNK_BYTES):
                if bytes_per_s:
                    await asyncio.sleep(len(chunk) / bytes_per_s)
                await self._flows.wait()
                self.seen += chunk
                writer.write(chunk)
                await writer.drain()
