"""A reference of a policy that FSDP2 shards over two ranks, driven step by step; `test_sharded_reference.py` compares it."""

from pathlib import Path

import msgspec
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import GPT2Config, GPT2LMHeadModel

from learner.config import ReferenceConfig
from learner.forward.logprobs import token_logprobs
from learner.policy.reference import Reference, ReferenceState
from learner.policy.shards import begin_writing, written
from tests.learner.policy.tiny_policy import BATCHES, KINDS, METRICS, TEMPERATURE, move

NUM_STEPS = 6
Found = dict[str, torch.Tensor]


def odd_policy() -> nn.Module:
    """17 tokens and 9 positions do not divide by two ranks; the frozen block makes it a partial fine-tune."""
    torch.manual_seed(0)
    policy = GPT2LMHeadModel(
        GPT2Config(vocab_size=17, n_positions=9, n_embd=6, n_layer=2, n_head=2,
                   resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )  # fmt: skip
    policy.transformer.h[0].requires_grad_(False)
    return policy


def follow(kind: str, policy: nn.Module, accelerator: Accelerator, found: Found) -> Reference:
    """Take the steps, and one more that the reference does not see; keep the logprobs after each."""
    reference = make_reference(kind, policy, accelerator)
    for step in range(1, NUM_STEPS + 1):
        move(policy, seed=step, scale=0.3)
        reference.after_step(policy, step, METRICS[step - 1])
        keep(f"{kind}-{step}", reference, policy, found)
    move(policy, seed=99, scale=0.3)
    return reference


def make_reference(kind: str, policy: nn.Module, accelerator: Accelerator) -> Reference:
    return Reference(ReferenceConfig(kind=kind, **KINDS[kind]), policy, accelerator, TEMPERATURE)


def keep(name: str, reference: Reference, policy: nn.Module, found: Found) -> None:
    found |= {f"{name}-{i}": logprobs_BT for i, logprobs_BT in enumerate(reference.logprobs(policy, BATCHES))}


def save(reference: Reference, policy: nn.Module, directory: Path, *, is_sharded: bool) -> None:
    """Called by every rank of a sharded policy, all of which write the same state."""
    directory.mkdir(parents=True, exist_ok=True)
    written(begin_writing(reference.tensors(policy), directory, None, is_sharded=is_sharded))
    (directory / "state.json").write_bytes(msgspec.json.encode(reference.state))


def load(kind: str, policy: nn.Module, accelerator: Accelerator, directory: Path) -> Reference:
    reference = make_reference(kind, policy, accelerator)
    state = msgspec.json.decode((directory / "state.json").read_bytes(), type=ReferenceState)
    reference.load(directory, policy, state)
    return reference


def gradients(policy: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.to_local().clone() for parameter in policy.parameters() if parameter.requires_grad]


def check_that_the_policy_is_left_alone(policy: nn.Module, reference: Reference) -> None:
    """Passes before the reference's and one after it, as in a step with an update."""
    token_logprobs(policy, BATCHES[0], TEMPERATURE)[0].sum().backward()
    once = gradients(policy)
    with torch.no_grad():
        before_BT, _ = token_logprobs(policy, BATCHES[0], TEMPERATURE)
    (reference_BT,) = reference.logprobs(policy, BATCHES[:1])
    after_BT, _ = token_logprobs(policy, BATCHES[0], TEMPERATURE)
    assert torch.equal(before_BT, after_BT) and (before_BT - reference_BT).abs().max() > 0.1
    after_BT.sum().backward()  # if the reference's weights were still gathered, these gradients would be of those
    for gradient, doubled in zip(once, gradients(policy), strict=True):
        torch.testing.assert_close(doubled, 2 * gradient)


def sharded(policy: nn.Module, mesh: torch.distributed.DeviceMesh) -> nn.Module:
    """As FSDP2 is used: each block by itself, the rest with the root, which stays gathered after a forward pass."""
    for block in policy.transformer.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(policy, mesh=mesh)


def follow_sharded(accelerator: Accelerator, directory: Path) -> None:
    """What each of two ranks does."""
    mesh = torch.distributed.init_device_mesh("cpu", (accelerator.num_processes,))
    found: Found = {}
    for kind in KINDS:
        policy = sharded(odd_policy(), mesh)
        assert sum(isinstance(parameter, DTensor) for parameter in policy.parameters()) > 20
        reference = follow(kind, policy, accelerator, found)
        check_that_the_policy_is_left_alone(policy, reference)
        save(reference, policy, directory / "two" / kind, is_sharded=True)
        accelerator.wait_for_everyone()
        for ranks in ("one", "two"):
            keep(f"{kind}-of-{ranks}", load(kind, policy, accelerator, directory / ranks / kind), policy, found)
    if accelerator.is_main_process:
        save_file(found, directory / "found.safetensors")
