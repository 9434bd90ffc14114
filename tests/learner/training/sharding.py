"""FSDP2 on a CPU: accelerate shards on GPUs and their like only, so a rank of a test tells it that its CPU is one.

Run as: python -m torch.distributed.run --standalone --nproc_per_node 2 -m tests.learner.training.sharding train run.toml
"""

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from accelerate.state import PartialState
from accelerate.utils import DistributedType

from learner.__main__ import main

FSDP2 = {
    "ACCELERATE_USE_CPU": "true",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}
"""What `accelerate launch` gives the ranks for a config with FSDP2."""


def shard_on_cpu() -> None:
    """Call it on every rank, with FSDP2 in the environment, before there is an Accelerator."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def run_rank(program: Callable[[], None]) -> NoReturn:
    """Run the program of a rank, and end its process there.

    Torch's caches of DTensor keep the gloo group of the mesh to the end, where its threads now and then abort an interpreter that
    ends by itself. On GPUs the group is NCCL's.
    """
    code: int | str | None = 0
    try:
        program()
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code or 0))


if __name__ == "__main__":
    shard_on_cpu()
    run_rank(main)
