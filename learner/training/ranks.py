"""What the ranks of one learner say to each other: rank 0 has the rollouts, every rank trains on its share of the rows.

Groups travel as the same msgpack and raw frames as on the wire: nothing is pickled between ranks either.
If the policy is sharded, all ranks have a part in each of its passes, so each makes as many of them.
"""

import logging
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, broadcast
from torch import nn

from learner.config import LearnerRun
from learner.rollouts.scored_group import ScoredGroup
from learner.training.batch import MicroBatch, Row, micro_batches
from protocol.codec import pack, unpack
from protocol.messages import Part

log = logging.getLogger(__name__)


class StepBatch(Part):
    """The groups of one optimizer step; None ends the run."""

    groups: list[ScoredGroup] | None


@contextmanager
def ranks_of(run: LearnerRun) -> Iterator[Accelerator]:
    """Meet the other ranks, and part in the end. While rank 0 waits for the server it says so (policy/published.py), so none is silent for long.

    Gloo's threads abort a process that ends before them. And a model of several ranks that outlives their group would take it along
    when it is freed, waiting, with the GIL held, for a thread that may wait for the GIL: so whatever has it must have returned.
    """
    patience = InitProcessGroupKwargs(timeout=timedelta(seconds=run.learner.rank_timeout_s))
    accelerator = Accelerator(mixed_precision="bf16" if run.dtype == "bfloat16" else "no", kwargs_handlers=[patience])
    if accelerator.num_processes > 1:
        log.info("rank %d of %d on %s", accelerator.process_index, accelerator.num_processes, accelerator.device)
    try:
        yield accelerator
    except BaseException as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        accelerator.free_memory()
        accelerator.end_training()


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


def my_batches(accelerator: Accelerator, rows: list[Row], max_tokens: int) -> list[MicroBatch]:
    """This rank's micro-batches; of a sharded policy's, with masked ones up to the most that a rank has."""
    batches = list(micro_batches(my_rows(accelerator, rows), max_tokens, accelerator.device))
    if accelerator.is_fsdp2:
        count = torch.tensor([len(batches)], device=accelerator.device)
        num_missing = int(accelerator.gather(count).max()) - len(batches)
        batches += num_missing * list(micro_batches([], max_tokens, accelerator.device))
    return batches


def gradient_sync(accelerator: Accelerator, policy: nn.Module, *, is_last: bool) -> AbstractContextManager[None]:
    """Around the forward and backward pass of a micro-batch: reduce the gradient over the ranks with the last one's alone; that
    of a sharded policy with every one's, because until it is reduced each rank holds the whole model's.
    """
    return nullcontext() if is_last or accelerator.is_fsdp2 else accelerator.no_sync(policy)
