"""Places for the clients of /v1 that the learner's groups never take, so that each request gets its turn.

    groups, scores ─▶ wait ─▶ a place of the learner's (server.max_concurrent_sequences)            ─┐
    guests (/v1)   ─▶ wait ─▶ a reserved place (server.reserved_sequences), or one of the learner's ─┴▶ vLLM's scheduler
                              while no group waits for it

vLLM's own scheduler stays. Only its queue of waiting requests is exchanged, through `scheduler_cls`, in the process of
each engine: the queue shows no request that has no place to go to. Who has a place is read from the requests: one that
ends, is cancelled or is preempted gives its place back, and an engine that starts again begins with all places free.

Invariant: groups run in at most max_concurrent_sequences places. A guest in a reserved place is the last request that
vLLM preempts when KV blocks run out.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.request_queue import PriorityRequestQueue

SCHEDULER = f"{__name__}.scheduler_with_guests"
"""What vLLM is told to make its scheduler with."""
FIRST_OF_GUESTS = 1
"""The lower a priority, the sooner a request is begun, and the later it is preempted. Groups have 0."""
SCORES = -1
"""Before the groups that wait: the learner may wait for the answer."""
IN_RESERVED_PLACE = -2
"""A guest's priority while it has one."""


def scheduler_with_guests(vllm_config: VllmConfig, **options: Any) -> Any:
    """Make the scheduler that vLLM would have made, with a `PlaceQueue` of waiting requests."""
    config = vllm_config.scheduler_config
    config.scheduler_cls, ours = None, config.scheduler_cls
    scheduler = config.get_scheduler_cls()(vllm_config=vllm_config, **options)  # asynchronous or not
    config.scheduler_cls = ours
    num_places = config.max_num_active_seqs
    assert num_places is not None, "the server sets it: its scheduler is asked for only where places are reserved"
    scheduler.max_num_active_reqs = config.max_num_seqs  # the queue holds back what may not go beyond num_places
    scheduler.waiting = PlaceQueue(scheduler, num_places, config.max_num_seqs - num_places)
    return scheduler


class PlaceQueue(PriorityRequestQueue):
    """Two queues by priority that look like one, which is empty while no request in them has a place to go to."""

    def __init__(self, scheduler: Any, num_places: int, num_reserved: int) -> None:
        """`scheduler.running` are the requests that have a place."""
        self._scheduler, self._num_places, self._num_reserved = scheduler, num_places, num_reserved
        self._groups, self._guests = PriorityRequestQueue(), PriorityRequestQueue()
        self._admitted: dict[Any, int] = {}
        """Guests that have left the queue, with the priority that they came with; those of them that run have a place."""

    def _num_guests_running(self) -> int:
        """Count the guests that have a place; the reserved ones belong to those that have had theirs for longest."""
        # A guest that vLLM took out of the queue only to pass it over, because its grammar is not compiled yet, does not run.
        self._admitted = {guest: asked for guest, asked in self._admitted.items() if guest.status.name == "RUNNING"}
        for guest in islice(self._admitted, self._num_reserved):
            guest.priority = IN_RESERVED_PLACE
        return len(self._admitted)

    def _next(self) -> PriorityRequestQueue | None:
        """Return the queue whose first request may be begun. vLLM itself holds to the number of all places."""
        num_guests = self._num_guests_running()
        if self._guests and num_guests < self._num_reserved:
            return self._guests
        if self._groups:
            has_room = len(self._scheduler.running) - num_guests < self._num_places
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
            raise IndexError("no waiting request has a place to go to")
        return queue

    def _of(self, request: Any) -> PriorityRequestQueue:
        return self._guests if request.priority >= FIRST_OF_GUESTS else self._groups

    def add_request(self, request: Any) -> None:
        """Also of a guest that was preempted, and has its place no more."""
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
