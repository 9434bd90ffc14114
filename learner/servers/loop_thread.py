"""An asyncio event loop in its own thread, so that sockets are served while the main thread computes.

Invariant: a failure in the background is not lost: the next `raise_failure` raises the first one.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from protocol.errors import DeadlineExceeded

log = logging.getLogger(__name__)
T = TypeVar("T")

STOP_TIMEOUT_S = 10.0


class LoopThread:
    """Event loop thread for coroutines from any thread. `stop` cancels what is left."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._failure: BaseException | None = None
        self._background: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine in the loop. Canceling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Run a coroutine in the loop and return its result, or raise its error.

        Raises:
            DeadlineExceeded: The coroutine did not finish within `timeout_s`.
        """
        future = self.submit(coroutine)
        try:
            return future.result(timeout_s)
        except TimeoutError as error:
            if future.done():
                raise
            future.cancel()
            name = getattr(coroutine, "__qualname__", "a call")
            raise DeadlineExceeded(f"{name} did not finish within {timeout_s:g} s") from error

    def end(self, coroutine: Coroutine[Any, Any, None], timeout_s: float) -> None:
        """Run a coroutine that ends something. If it is slow, warn, because what the run has done counts."""
        try:
            self.call(coroutine, timeout_s)
        except DeadlineExceeded as error:
            log.warning("the run ends without waiting longer: %s", error)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in the background, from any thread; `raise_failure` raises its error."""
        self.loop.call_soon_threadsafe(self._begin, work)

    def call_soon(self, act: Callable[..., object], *args: Any) -> None:
        """Call a plain function in the loop, from any thread."""
        self.loop.call_soon_threadsafe(act, *args)

    def raise_failure(self) -> None:
        """Raise the error of the first background task that failed, if any."""
        if self._failure is not None:
            raise self._failure

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(work)
        self._background.add(task)  # the event loop keeps only a weak reference
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        failure = None if task.cancelled() else task.exception()
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        self._failure = self._failure or failure

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(STOP_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        # Spawned work that has not started must start, so that it is canceled too.
        self.loop.run_until_complete(asyncio.sleep(0))
        while left := asyncio.all_tasks(self.loop):
            for task in left:
                task.cancel()
            self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.run_until_complete(
            self.loop.shutdown_default_executor()
        )  # a running commit ends before the ledger closes
        self.loop.run_until_complete(asyncio.sleep(0))  # the last closed connections release their sockets
        self.loop.close()
