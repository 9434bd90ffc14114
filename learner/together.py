"""What comes one by one and is committed together. Between the link, or the reward workers, and the ledger.

    put ─▶ (while the last batch is committed, more comes) ─▶ commit of all that has come ─▶ …

A commit waits for the disk, so it must not cost one wait for each group. Invariant: in the order of `put`, each exactly once.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Together(Generic[T]):
    """Used in one event loop."""

    def __init__(self, commit: Callable[[list[T]], Awaitable[None]]) -> None:
        self._commit = commit
        self._waiting: list[T] = []
        self._has_come = asyncio.Event()

    def __len__(self) -> int:
        """How many wait for the commit that is under way."""
        return len(self._waiting)

    def put(self, item: T) -> None:
        self._waiting.append(item)
        self._has_come.set()

    async def run(self) -> None:
        """Until cancelled. Raises what `commit` raises."""
        while True:
            await self._has_come.wait()
            self._has_come.clear()
            batch, self._waiting = self._waiting, []
            await self._commit(batch)
