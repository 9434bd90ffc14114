"""Reference and checkpoint of a policy in uneven shards on two ranks equal those of the whole policy."""

from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

from learner.config import ReferenceConfig
from learner.policy.reference import Reference
from learner.policy.shards import begin_writing, written
from tests.learner.checkpoints import whole_tensors
from tests.learner.policy.tiny_policy import BATCHES, KINDS, TEMPERATURE, move
from tests.learner.ranks import on_two_ranks

FOLLOWED = ("ema", "mixture")
NUM_STEPS = 4


def odd_policy(accelerator: Accelerator) -> nn.Module:
    """Return a policy whose 17 tokens and 9 positions are odd, with a frozen block."""
    torch.manual_seed(0)
    policy = GPT2LMHeadModel(
        GPT2Config(vocab_size=17, n_positions=9, n_embd=6, n_layer=2, n_head=2,
                   resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )  # fmt: skip
    policy.transformer.h[0].requires_grad_(False)
    if accelerator.num_processes == 1:
        return policy
    # As FSDP2 is used: each block separately, the rest with the root, which stays gathered after a forward pass.
    mesh = torch.distributed.init_device_mesh("cpu", (accelerator.num_processes,))
    for block in policy.transformer.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(policy, mesh=mesh)


def follow(accelerator: Accelerator, directory: Path) -> None:
    """Write the logprobs of references after each step, and of their checkpoints."""
    found: dict[str, torch.Tensor] = {}
    for kind in FOLLOWED:
        policy, config = odd_policy(accelerator), ReferenceConfig(kind=kind, **KINDS[kind])
        reference = Reference(config, policy, accelerator, TEMPERATURE)
        for step in range(1, NUM_STEPS + 1):
            move(policy, seed=step, scale=0.3)
            reference.after_step(policy, step, {})
            found[f"{kind}-{step}"], _ = reference.logprobs(policy, BATCHES)
        tensors, is_sharded = reference.tensors(policy), accelerator.num_processes > 1
        written(begin_writing(tensors, directory / kind, None, is_sharded=is_sharded))
        accelerator.wait_for_everyone()
        loaded = Reference(config, policy, accelerator, TEMPERATURE)
        loaded.load(directory / kind, policy, reference.state)
        found[f"{kind}-loaded"], _ = loaded.logprobs(policy, BATCHES)
    if accelerator.is_main_process:
        save_file(found, directory / "found.safetensors")


@pytest.mark.system
def test_two_ranks_have_the_reference_and_the_checkpoint_of_one_rank(accelerator: Accelerator, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for directory in (one, two):
        for kind in FOLLOWED:
            (directory / kind).mkdir(parents=True)
    follow(accelerator, one)
    on_two_ranks(follow, two)
    expected, found = load_file(one / "found.safetensors"), load_file(two / "found.safetensors")
    for kind in FOLLOWED:
        expected |= {f"{kind} on disk, {name}": tensor for name, tensor in whole_tensors(one / kind).items()}
        found |= {f"{kind} on disk, {name}": tensor for name, tensor in whole_tensors(two / kind).items()}
    assert found.keys() == expected.keys() and not any(".h.0." in name for name in found)
    assert len(found) > len(FOLLOWED) * (NUM_STEPS + 1)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0, msg=name)
    for kind in FOLLOWED:
        assert torch.equal(found[f"{kind}-{NUM_STEPS}"], found[f"{kind}-loaded"])
