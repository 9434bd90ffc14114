"""Read the weights once and feed the syncs of several servers, each at its own pace.

    reader (the thread that may read the policy) ─▶ window of tensors ─▶ one Share and thread per server

A server that keeps the others waiting for longer than `patience_s` is cut off. Otherwise a hanging server
would also block the other servers and the learner.
Invariant: every share that is not ended early yields every tensor, in order. At most `window_bytes` wait
between the fastest and the slowest server, or a single larger tensor.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from protocol.errors import PushError
from protocol.weights.buckets import NamedTensors

CHECK_INTERVAL_S = 0.1


class _Item:
    """Tensor in the window."""

    def __init__(self, name: str, tensor: torch.Tensor, num_left: int) -> None:
        self.name, self.tensor, self.num_left = name, tensor, num_left
        self.num_bytes = tensor.numel() * tensor.element_size()


class Share:
    """Iterator over the weights for one server; close it when the sync ends."""

    def __init__(self, fan_out: "FanOut") -> None:
        self.waiting: deque[_Item] = deque()
        self.failure: str | None = None
        self.is_closed = False
        self.is_starved = False
        """Whether the share waits for a tensor that is not read yet or that a slower server holds back."""
        self.took_at = 0.0
        self._fan_out = fan_out

    @property
    def moved_at(self) -> float:
        """Time when the share last took a tensor; the current time while it is starved."""
        return time.monotonic() if self.is_starved else self.took_at

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self

    def __next__(self) -> tuple[str, torch.Tensor]:
        item = self._fan_out.next_of(self)
        return item.name, item.tensor

    def close(self) -> None:
        self._fan_out.close(self)

    def cut_off(self, reason: str) -> None:
        """End the share from any thread; its consumer gets PushError with this reason."""
        self._fan_out.cut_off([self], reason)


class FanOut:
    """Fan-out of one weight sync.

    `timeout_s` is how long a share waits for its next tensor. `on_wait` is called repeatedly while the reader
    waits for room in the window.
    """

    def __init__(
        self, num_shares: int, window_bytes: float, timeout_s: float, patience_s: float,
        on_wait: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.shares = [Share(self) for _ in range(num_shares)]
        self._window_bytes, self._timeout_s, self._patience_s = window_bytes, timeout_s, patience_s
        self._on_wait = on_wait
        self._changed = threading.Condition()
        """Lock of all fields below and of the shares' fields."""
        self._num_bytes = 0
        """Bytes in the window."""
        self._is_read = False

    def read(self, tensors: NamedTensors) -> None:
        """Feed every tensor to the shares.

        Returns when the last tensor is in the window, or when no share is open. Raises what `tensors` raises.
        """
        try:
            for name, tensor in tensors:
                if not self._offer(name, tensor):
                    return
        except BaseException as error:
            self.cut_off(self.shares, f"the policy could not be read: {error or repr(error)}")
            raise
        with self._changed:
            self._is_read = True
            self._changed.notify_all()

    def next_of(self, share: Share) -> _Item:
        """Return the next item of a share.

        Raises:
            PushError: The share was cut off, or its next tensor did not arrive in time.
            StopIteration: The share has yielded all tensors.
        """
        with self._changed:
            share.is_starved = not share.waiting
            is_ready = self._changed.wait_for(
                lambda: share.failure or share.waiting or self._is_read, timeout=self._timeout_s
            )
            share.took_at, share.is_starved = time.monotonic(), False
            if share.failure is not None:
                raise PushError(share.failure)
            if not is_ready:
                raise PushError(
                    f"the policy's next tensor was not ready within {self._timeout_s:g} s "
                    "(learner.weight_sync.timeout_s)"
                )
            if not share.waiting:
                raise StopIteration
            item = share.waiting.popleft()
            self._release(item)
            return item

    def close(self, share: Share) -> None:
        """Close a share and release its tensors."""
        with self._changed:
            self._end(share)

    def cut_off(self, shares: list[Share], reason: str) -> None:
        """Close shares; their consumers get PushError with this reason."""
        with self._changed:
            for share in shares:
                share.failure = reason
                self._end(share)

    def _offer(self, name: str, tensor: torch.Tensor) -> bool:
        """Add a tensor once the window has room; return False if no share is open."""
        with self._changed:
            item = _Item(name, tensor, 0)
            self._wait_for_room(item.num_bytes)
            open_shares = self._open_shares()
            item.num_left = len(open_shares)
            for share in open_shares:
                share.waiting.append(item)
            self._num_bytes += item.num_bytes if open_shares else 0
            self._changed.notify_all()
            return bool(open_shares)

    def _wait_for_room(self, num_bytes: int) -> None:
        starving_since: float | None = None
        while self._num_bytes > 0 and self._num_bytes + num_bytes > self._window_bytes:
            open_shares = self._open_shares()
            slowest = max(len(share.waiting) for share in open_shares)
            if all(share.waiting for share in open_shares):
                starving_since = None  # no server waits for another
            elif starving_since is None:
                starving_since = time.monotonic()
            elif time.monotonic() - starving_since > self._patience_s:
                late = [share for share in open_shares if len(share.waiting) == slowest]
                self.cut_off(
                    late,
                    f"it kept other servers waiting for {self._patience_s:g} s "
                    "(learner.weight_sync.straggler_timeout_s) and gets its own weight sync",
                )
                starving_since = None
                continue
            self._on_wait()
            self._changed.wait(CHECK_INTERVAL_S)

    def _open_shares(self) -> list[Share]:
        return [share for share in self.shares if not share.is_closed]

    def _end(self, share: Share) -> None:
        share.is_closed = True
        while share.waiting:
            self._release(share.waiting.popleft())
        self._changed.notify_all()

    def _release(self, item: _Item) -> None:
        item.num_left -= 1
        if item.num_left == 0:
            self._num_bytes -= item.num_bytes
        self._changed.notify_all()
