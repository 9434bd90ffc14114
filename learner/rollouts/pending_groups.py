"""Pending groups: admitted to the ledger, but not received yet.

Used by rollouts.py, between the slots and dispatcher.py, only in the loop thread.
Invariant: a prompt is in the ledger before it is sent. It stays here until its group arrives or its attempt
is dropped.
"""

import heapq
import logging
from collections import Counter
from collections.abc import Callable

from learner.prompts.prompts import Prompts
from learner.rollouts.group_requests import GroupRequest
from learner.rollouts.ledger import Ledger

log = logging.getLogger(__name__)


class PendingGroups:
    """Pending requests by group id; `max_attempts` failures end a slot."""

    def __init__(self, ledger: Ledger, prompts: Prompts, max_attempts: int) -> None:
        self._ledger, self._prompts, self._max_attempts = ledger, prompts, max_attempts
        self._requests: dict[str, GroupRequest] = {}
        self._held: list[tuple[int, str]] = []
        """Heap of slots and ids that a resume found. They wait for the admission rule like new slots."""
        self._num_failures = Counter(ledger.num_failures())
        """Number of failures by slot."""

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, group_id: str) -> GroupRequest | None:
        return self._requests.get(group_id)

    def pop(self, group_id: str) -> GroupRequest | None:
        """Remove and return a request, or None if it is unknown or already answered."""
        return self._requests.pop(group_id, None)

    def ask(self, slot: int, attempt: int, position: int, version: int) -> GroupRequest:
        """Admit the prompt at a position and return its request; the caller sends it."""
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

    def ask_again(self, group_id: str, slot: int, reason: str, version: int) -> GroupRequest | None:
        """Drop a group and admit its prompt again; None if the slot failed too often."""
        if self._num_failures[slot] >= self._max_attempts:
            self._ledger.drop(group_id, "failed")
            log.error(
                "gave up the prompt of slot %d after %d failures (learner.max_group_attempts)",
                slot,
                self._num_failures[slot],
            )
            return None
        self._ledger.drop(group_id, reason)
        attempt = int(group_id.partition(".")[2])
        return self.ask(slot, attempt + 1, self._ledger.position_of(slot), version)

    def count_failure(self, slot: int) -> None:
        self._num_failures[slot] += 1

    def hold(self, request: GroupRequest) -> None:
        """Hold a request until `due` returns it.

        After a restart the server may have forgotten the request, even if it was sent.
        """
        self._requests[request.group_id] = request
        heapq.heappush(self._held, (request.slot, request.group_id))

    def due(self, num_places: int, place: Callable[[int], int]) -> list[GroupRequest]:
        """Release and return held requests whose slot's place is below `num_places`.

        They are in slot order. A request whose group arrived meanwhile is left out.
        """
        due = []
        while self._held and place(self._held[0][0]) < num_places:
            _, group_id = heapq.heappop(self._held)
            if (request := self.get(group_id)) is not None:
                due.append(request)
        return due

    def request(self, slot: int, attempt: int, position: int) -> GroupRequest:
        return GroupRequest(slot=slot, attempt=attempt, prompt=self._prompts.prompt_at(position))
