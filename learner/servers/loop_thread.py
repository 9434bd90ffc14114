"""An asyncio event loop in a thread of its own, so that the sockets are served while the main thread computes."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from protocol.errors import DeadlineExceeded

T = TypeVar("T")

STOP_TIMEOUT_S = 10.0


class LoopThread:
    """Runs coroutines from any thread; `stop` cancels what is left."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop. To cancel the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine in the loop and wait for its result. Raises what it raises, or DeadlineExceeded."""
        future = self.submit(coroutine)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            raise DeadlineExceeded(f"{coroutine} did not finish within {timeout_s} s") from error

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.close()
