"""What the ranks of one learner say to each other: rank 0 has the rollouts, every rank trains on its share of the rows.

Groups travel as the same msgpack and raw frames as on the wire: nothing is pickled between ranks either.
"""

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from learner.batch import Row, ScoredGroup
from protocol.codec import pack, unpack
from protocol.messages import Part


class StepBatch(Part):
    """The groups of one optimizer step; None ends the run."""

    groups: list[ScoredGroup] | None


def share_groups(accelerator: Accelerator, groups: list[ScoredGroup] | None) -> list[ScoredGroup] | None:
    """Give every rank the groups that rank 0 took (the others pass None)."""
    if accelerator.num_processes == 1:
        return groups
    packed = np.frombuffer(pack(StepBatch(groups=groups)) if accelerator.is_main_process else b"\0", np.uint8)
    num_bytes = broadcast(torch.tensor([len(packed)], device=accelerator.device))
    buffer = torch.zeros(int(num_bytes), dtype=torch.uint8, device=accelerator.device)
    if accelerator.is_main_process:
        buffer.copy_(torch.from_numpy(packed.copy()))
    return unpack(broadcast(buffer).cpu().numpy().tobytes(), StepBatch).groups


def my_rows(accelerator: Accelerator, rows: list[Row]) -> list[Row]:
    """This rank's share, evened out by length."""
    by_length = sorted(rows, key=lambda row: row.num_tokens, reverse=True)
    return by_length[accelerator.process_index :: accelerator.num_processes]
