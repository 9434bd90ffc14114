"""FSDP2 on a CPU: accelerate shards on GPUs and their like only, so a rank of a test reports its CPU as one."""

import os
from functools import cache

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_multi_gpu_env

FSDP2 = ("--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
"""Switches of `accelerate launch`, as the README gives them; all others have accelerate's defaults."""
QUIET = ("--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no")
"""Switches whose defaults accelerate would warn about."""


@cache
def launched_environment(*switches: str) -> dict[str, str]:
    """Return what `accelerate launch` with these switches adds to the environment of its ranks."""
    arguments = launch_command_parser().parse_args([*QUIET, "--main_process_port", "0", *switches, "-m", "learner"])
    arguments, _, _ = _validate_launch_command(arguments)
    launched = prepare_multi_gpu_env(arguments)
    return {name: value for name, value in launched.items() if os.environ.get(name) != value}


def shard_on_cpu() -> None:
    """Call it on every rank, with FSDP2 in the environment, before there is an Accelerator."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
