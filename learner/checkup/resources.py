"""Whether this machine has the memory and the disk that a run will want, before anything of it is loaded."""

from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig

from learner.config import LearnerRun
from learner.policy.memory import Memory, learner_memory, shape_of
from protocol.doctor import Finding, free_memory_bytes, of_disk, of_memory, unknown
from protocol.model_files import local_model

REMEDY = "lower learner.micro_batch_tokens, set learner.gradient_checkpointing or learner.lora.rank, or shard over several ranks"


def resources(run: LearnerRun) -> Iterator[Finding]:
    """Of one rank that is not sharded; learner/policy/README.md has the formulas."""
    try:
        path = local_model(run.model)
        if path is None:
            yield unknown("memory", f"what {run.model} needs is known once it is on this machine")
            return
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        memory = learner_memory(shape_of(AutoConfig.from_pretrained(path)), run, device_type=device_type)
    except Exception as error:  # of a config of transformers, which may raise anything
        yield unknown("memory", f"what {run.model} needs is not known ({error})")
        return
    yield from _memory(memory)
    checkpoints = run.learner.checkpoint
    num_kept = max(checkpoints.keep_last, 1) + 1  # one more while it is written
    yield of_disk(Path(run.run_dir), f"run_dir with {num_kept} checkpoints", num_kept * memory.host["checkpoint"])


def _memory(memory: Memory) -> Iterator[Finding]:
    device, host = sum(memory.device.values()), sum(memory.host.values())
    if torch.cuda.is_available():
        yield of_memory("the learner's GPU", device, torch.cuda.mem_get_info()[0], REMEDY)
        yield of_memory("the learner's host", host, free_memory_bytes(), REMEDY)
    else:
        yield of_memory("the learner", device + host, free_memory_bytes(), REMEDY)
