"""Reserved slots for /v1 requests (guests), which the learner's groups never take.

    groups, scores ─▶ a learner slot (server.max_concurrent_sequences) ──────────────────┐
    guests (/v1) ─▶ a reserved slot (server.reserved_sequences), or a free learner slot ─┴▶ vLLM's scheduler

Through `scheduler_cls`, each engine process keeps vLLM's scheduler with another waiting queue, which hides
requests without a free slot. Used slots are counted from the requests: a request that ends, is canceled or is
preempted frees its slot, and a restarted engine starts with all slots free.
A guest gets a learner slot only while no group waits for it.
Invariant: groups use at most max_concurrent_sequences slots. vLLM preempts a guest in a reserved slot last.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.request_queue import PriorityRequestQueue

SCHEDULER = f"{__name__}.scheduler_with_guests"
"""Value of vLLM's scheduler_cls argument."""
FIRST_OF_GUESTS = 1
"""Lowest priority value of a guest. A lower value starts sooner and is preempted later. Groups have 0."""
SCORES = -1
"""Priority of scores. They precede waiting groups, because the learner may wait for the answer."""
RESERVED_SLOT = -2
"""Priority of a guest in a reserved slot."""


def scheduler_with_guests(vllm_config: VllmConfig, **options: Any) -> Any:
    """Create vLLM's scheduler with a `SlotQueue` as its waiting queue."""
    config = vllm_config.scheduler_config
    config.scheduler_cls, ours = None, config.scheduler_cls
    # The class depends on asynchronous scheduling.
    scheduler = config.get_scheduler_cls()(vllm_config=vllm_config, **options)
    config.scheduler_cls = ours
    num_slots = config.max_num_active_seqs
    assert num_slots is not None, "the server sets max_num_active_seqs wherever it reserves slots"
    # The queue holds back requests beyond num_slots.
    scheduler.max_num_active_reqs = config.max_num_seqs
    scheduler.waiting = SlotQueue(scheduler, num_slots, config.max_num_seqs - num_slots)
    return scheduler


class SlotQueue(PriorityRequestQueue):
    """Two priority queues that act as one.

    The queue looks empty while no request in it has a free slot.
    """

    def __init__(self, scheduler: Any, num_slots: int, num_reserved: int) -> None:
        """Create empty queues. `scheduler.running` contains the requests that have a slot."""
        self._scheduler, self._num_slots, self._num_reserved = scheduler, num_slots, num_reserved
        self._groups, self._guests = PriorityRequestQueue(), PriorityRequestQueue()
        self._admitted: dict[Any, int] = {}
        """Guests that have left the queue, with their original priority. The running ones have a slot."""

    def _num_guests_running(self) -> int:
        """Count the guests that have a slot. The first admitted hold the reserved slots."""
        # A guest that left the queue may not run: vLLM skips a request while its grammar is being compiled.
        self._admitted = {
            guest: priority for guest, priority in self._admitted.items() if guest.status.name == "RUNNING"
        }
        for guest in islice(self._admitted, self._num_reserved):
            guest.priority = RESERVED_SLOT
        return len(self._admitted)

    def _next(self) -> PriorityRequestQueue | None:
        """Return the queue whose first request may start. vLLM enforces the total of all slots."""
        num_guests = self._num_guests_running()
        if self._guests and num_guests < self._num_reserved:
            return self._guests
        if self._groups:
            has_room = len(self._scheduler.running) - num_guests < self._num_slots
            return self._groups if has_room else None
        return self._guests or None

    def __bool__(self) -> bool:
        return self._next() is not None

    def peek_request(self) -> Any:
        return self._of_next().peek_request()

    def pop_request(self) -> Any:
        queue = self._of_next()
        request = queue.pop_request()
        if queue is self._guests:
            self._admitted[request] = request.priority
        return request

    def _of_next(self) -> PriorityRequestQueue:
        queue = self._next()
        if queue is None:
            raise IndexError("no waiting request has a free slot")
        return queue

    def _of(self, request: Any) -> PriorityRequestQueue:
        return self._guests if request.priority >= FIRST_OF_GUESTS else self._groups

    def add_request(self, request: Any) -> None:
        """Add a request, or a preempted guest, which has lost its slot."""
        request.priority = self._admitted.pop(request, request.priority)
        self._of(request).add_request(request)

    def prepend_request(self, request: Any) -> None:
        self.add_request(request)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        for request in requests:
            self.add_request(request)

    def remove_request(self, request: Any) -> None:
        self._of(request).remove_request(request)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        gone = set(requests)
        for queue in (self._groups, self._guests):
            queue.remove_requests(gone)

    def __len__(self) -> int:
        return len(self._groups) + len(self._guests)

    def __iter__(self) -> Iterator[Any]:
        yield from self._guests
        yield from self._groups
