"""`python -m inference_server` whose last worker receives one wrong bit in every epoch it joins while `BREAK_FILE` exists.

vLLM's processes are spawned and import this module again, so each of them has the change. No test may import it.
"""

import os
from pathlib import Path
from typing import Any

import torch

from inference_server.__main__ import main
from inference_server.engine import receiver
from protocol.collective.group import Collective, join_collective
from protocol.messages import Rendezvous
from tests.inference_server.broken_transfer import BREAK_FILE, OneBitFlippedOnArrival


def join_breakable(epoch: str, rendezvous: Rendezvous, rank: int, device: torch.device) -> Collective:
    collective: Any = join_collective(epoch, rendezvous, rank, device)
    file = Path(os.environ[BREAK_FILE])
    if rank == rendezvous.world_size - 1 and file.exists():
        return OneBitFlippedOnArrival(collective, int(file.read_text()))
    return collective


receiver.join_collective = join_breakable

if __name__ == "__main__":
    main()
