"""The groups that were admitted and have not come. Between the slots and asking.py; used by rollouts.py.

Invariant: a prompt is in the ledger before it is sent, and stays here until its group has come or its attempt is dropped.
Only the loop thread uses it.
"""

import heapq
import logging
from collections import Counter
from collections.abc import Callable

from learner.prompts.prompts import Prompts
from learner.rollouts.ledger import Ledger
from learner.rollouts.request import Request

log = logging.getLogger(__name__)


class Outstanding:
    """Requests by group id. `max_attempts` failures of one slot end it."""

    def __init__(self, ledger: Ledger, prompts: Prompts, max_attempts: int) -> None:
        self._ledger, self._prompts, self._max_attempts = ledger, prompts, max_attempts
        self._requests: dict[str, Request] = {}
        self._held: list[tuple[int, str]] = []
        """Slots and ids, as a heap, of those that a resume found; they wait for the admission rule like new ones."""
        self._num_failures = Counter(ledger.num_failures())
        """By slot."""

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, group_id: str) -> Request | None:
        return self._requests.get(group_id)

    def pop(self, group_id: str) -> Request | None:
        """Take the request that a group answers, or None: nothing, or a duplicate of what has come."""
        return self._requests.pop(group_id, None)

    def ask(self, slot: int, attempt: int, position: int, version: int) -> Request:
        """Admit the prompt at a position; the caller sends it."""
        request = self.request(slot, attempt, position)
        self._ledger.admit(
            slot=slot,
            attempt=attempt,
            position=position,
            epoch=self._prompts.epoch_of(position),
            prompt_id=request.prompt.prompt_id,
            version=version,
        )
        self._requests[request.group_id] = request
        return request

    def ask_again(self, group_id: str, slot: int, reason: str, version: int) -> Request | None:
        """Drop a group and admit its prompt under the next attempt; None if the slot has failed too often."""
        if self._num_failures[slot] >= self._max_attempts:
            self._ledger.drop(group_id, "failed")
            log.error(
                "the prompt of slot %d is given up after %d failures (learner.max_group_attempts)",
                slot,
                self._num_failures[slot],
            )
            return None
        self._ledger.drop(group_id, reason)
        attempt = int(group_id.partition(".")[2])
        return self.ask(slot, attempt + 1, self._ledger.position_of(slot), version)

    def count_failure(self, slot: int) -> None:
        self._num_failures[slot] += 1

    def hold(self, request: Request) -> None:
        """Keep a request until `due`: sent or not, the server may have forgotten it with the run before this one."""
        self._requests[request.group_id] = request
        heapq.heappush(self._held, (request.slot, request.group_id))

    def due(self, num_places: int, place: Callable[[int], int]) -> list[Request]:
        """Return those held back whose slot's place is below `num_places`, in slot order; they are held no more.

        A group may have arrived meanwhile: its request is left out.
        """
        due = []
        while self._held and place(self._held[0][0]) < num_places:
            _, group_id = heapq.heappop(self._held)
            if (request := self.get(group_id)) is not None:
                due.append(request)
        return due

    def request(self, slot: int, attempt: int, position: int) -> Request:
        return Request(slot=slot, attempt=attempt, prompt=self._prompts.prompt_at(position))
