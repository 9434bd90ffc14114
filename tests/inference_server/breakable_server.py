"""`python -m inference_server` whose last worker does wrong while there is a file: `BREAK_FILE` flips one bit that it receives in
every session it joins, `HANG_FILE` keeps it for ever in the call that loads a push.

vLLM's processes are spawned and import this module again, so each of them has the change. No test may import it.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch

from inference_server.__main__ import main
from inference_server.engine import weight_receiver as receiver
from inference_server.engine.interface import PushOrder
from protocol.messages import Rendezvous
from protocol.transports.collective import Collective
from protocol.transports.group import join_collective
from tests.inference_server.broken_transfer import BREAK_FILE, HANG_FILE, OneBitFlippedOnArrival

LAST_RANK = 2


def join_breakable(session: str, rendezvous: Rendezvous, rank: int, device: torch.device) -> Collective:
    collective: Any = join_collective(session, rendezvous, rank, device)
    file = Path(os.environ[BREAK_FILE])
    if rank == LAST_RANK and file.exists():
        return OneBitFlippedOnArrival(collective, int(file.read_text()))
    return collective


class HangingReceiver(receiver.Receiver):
    """Whose caller never comes back."""

    def successor(self, order: PushOrder) -> receiver.Successor | None:
        if self._rank == LAST_RANK and Path(os.environ[HANG_FILE]).exists():
            time.sleep(3600)
        return super().successor(order)


receiver.join_collective = join_breakable
receiver.Receiver = HangingReceiver  # type: ignore[misc]

if __name__ == "__main__":
    main()
