"""Batched commits of items that arrive one by one, before they enter the ledger.

    put ─▶ (more items arrive during the last commit) ─▶ commit of all waiting items ─▶ …

A commit waits for the disk, so one commit per group would be slow. Invariant: items are committed in the
order of `put`, each exactly once.
"""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class CommitQueue(Generic[T]):
    """Commit queue for use in one event loop."""

    def __init__(self, commit: Callable[[list[T]], Awaitable[None]]) -> None:
        self._commit = commit
        self._waiting: list[T] = []
        self._has_items = asyncio.Event()

    def __len__(self) -> int:
        """Return the number of items that wait for the next commit."""
        return len(self._waiting)

    def put(self, item: T) -> None:
        self._waiting.append(item)
        self._has_items.set()

    async def run(self) -> None:
        """Commit items until canceled. Raises what `commit` raises."""
        while True:
            await self._has_items.wait()
            self._has_items.clear()
            batch, self._waiting = self._waiting, []
            await self._commit(batch)
