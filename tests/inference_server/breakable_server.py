"""`python -m inference_server` whose last worker flips one received bit in every session, while BREAK_FILE exists.

vLLM's processes have the change too: forked ones inherit it, spawned ones import this module again. No test may import
it.
"""

import os
from pathlib import Path
from typing import Any

import torch

from inference_server.__main__ import main
from inference_server.engine import weight_receiver
from protocol.messages import Rendezvous
from protocol.transports.collective import Collective
from protocol.transports.group import join_collective
from tests.inference_server.broken_transfer import BREAK_FILE, BitFlippingReceiver

LAST_RANK = 2


def join_breakable(session: str, rendezvous: Rendezvous, rank: int, device: torch.device) -> Collective:
    collective: Any = join_collective(session, rendezvous, rank, device)
    file = Path(os.environ[BREAK_FILE])
    if rank == LAST_RANK and file.exists():
        return BitFlippingReceiver(collective, int(file.read_text()))
    return collective


weight_receiver.join_collective = join_breakable

if __name__ == "__main__":
    main()
