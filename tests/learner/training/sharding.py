"""FSDP2 on a CPU: accelerate shards on GPUs and their like only, so a rank of a test tells it that its CPU is one."""

from accelerate.state import PartialState
from accelerate.utils import DistributedType

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
