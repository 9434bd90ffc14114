"""A reference of a policy that FSDP2 shards over two ranks, driven step by step; `test_sharded_reference.py` compares it."""

from pathlib import Path

import msgspec
import torch
from accelerate import Accelerator
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import GPT2Config, GPT2LMHeadModel

from learner.config import ReferenceConfig
from learner.forward.logprobs import token_logprobs
from learner.policy.reference import Reference, ReferenceState
from learner.policy.shards import begin_writing, written
from tests.learner.policy.test_reference import BATCHES, KINDS, METRICS, TEMPERATURE

NUM_STEPS = 6


def odd_policy() -> nn.Module:
    """17 tokens and 9 positions do not divide by two ranks; the frozen block makes it a partial fine-tune."""
    torch.manual_seed(0)
    policy = GPT2LMHeadModel(
        GPT2Config(vocab_size=17, n_positions=9, n_embd=6, n_layer=2, n_head=2,
                   resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    )  # fmt: skip
    policy.transformer.h[0].requires_grad_(False)
    return policy


def move(policy: nn.Module, step: int) -> None:
    """The same change of every weight, sharded or not."""
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in policy.parameters():
            change = 0.3 * torch.randn(parameter.shape, generator=generator)
            if isinstance(parameter, DTensor):
                change = distribute_tensor(change, parameter.device_mesh, parameter.placements)
            if parameter.requires_grad:
                parameter.add_(change)


def follow(kind: str, policy: nn.Module, accelerator: Accelerator, found: dict[str, torch.Tensor]) -> Reference:
    """Take the steps, note the logprobs after each."""
    reference = Reference(ReferenceConfig(kind=kind, **KINDS[kind]), policy, accelerator, TEMPERATURE)
    for step in range(1, NUM_STEPS + 1):
        move(policy, step)
        reference.after_step(policy, step, METRICS[step - 1])
        note(f"{kind}-{step}", reference, policy, found)
    return reference


def note(name: str, reference: Reference, policy: nn.Module, found: dict[str, torch.Tensor]) -> None:
    for i, logprobs_BT in enumerate(reference.logprobs(policy, BATCHES)):
        found[f"{name}-{i}"] = logprobs_BT


def save(reference: Reference, policy: nn.Module, directory: Path, *, is_writer: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    is_sharded = any(isinstance(parameter, DTensor) for parameter in policy.parameters())
    if is_sharded or is_writer:
        written(begin_writing(reference.tensors(policy), directory, None, is_sharded=is_sharded))
    if is_writer:
        (directory / "state.json").write_bytes(msgspec.json.encode(reference.state))


def load(kind: str, policy: nn.Module, accelerator: Accelerator, directory: Path) -> Reference:
    reference = Reference(ReferenceConfig(kind=kind, **KINDS[kind]), policy, accelerator, TEMPERATURE)
    state = msgspec.json.decode((directory / "state.json").read_bytes(), type=ReferenceState)
    reference.load(directory, policy, state)
    return reference


def shards(policy: nn.Module, *, of_gradients: bool) -> list[torch.Tensor]:
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    tensors = [parameter.grad if of_gradients else parameter for parameter in trained]
    return [tensor.detach().to_local().clone() for tensor in tensors]


def check_that_the_policy_is_left_alone(policy: nn.Module, reference: Reference) -> None:
    """A pass before it and one after it, as in a step with a survey and an update."""
    token_logprobs(policy, BATCHES[0], TEMPERATURE)[0].sum().backward()
    weights, gradients = shards(policy, of_gradients=False), shards(policy, of_gradients=True)
    with torch.no_grad():
        before_BT, _ = token_logprobs(policy, BATCHES[0], TEMPERATURE)
    (reference_BT,) = reference.logprobs(policy, BATCHES[:1])
    after_BT, _ = token_logprobs(policy, BATCHES[0], TEMPERATURE)
    assert torch.equal(before_BT, after_BT) and (before_BT - reference_BT).abs().max() > 0.1
    after_BT.sum().backward()  # as long as another's weights were gathered, these gradients would be of those
    doubled = shards(policy, of_gradients=True)
    for before, after in zip(weights, shards(policy, of_gradients=False), strict=True):
        assert torch.equal(before, after)
    for once, twice in zip(gradients, doubled, strict=True):
        torch.testing.assert_close(twice, 2 * once)


def sharded(policy: nn.Module, mesh: torch.distributed.DeviceMesh) -> nn.Module:
    """As FSDP2 is used: each block by itself, the rest with the root, which stays gathered after a forward pass."""
    for block in policy.transformer.h:
        fully_shard(block, mesh=mesh)
    return fully_shard(policy, mesh=mesh)


def follow_sharded(accelerator: Accelerator, directory: Path) -> None:
    """What each of two ranks does."""
    mesh = torch.distributed.init_device_mesh("cpu", (accelerator.num_processes,))
    found: dict[str, torch.Tensor] = {}
    for kind in KINDS:
        policy = sharded(odd_policy(), mesh)
        assert sum(isinstance(parameter, DTensor) for parameter in policy.parameters()) > 20
        reference = follow(kind, policy, accelerator, found)
        move(policy, step=99)
        check_that_the_policy_is_left_alone(policy, reference)
        save(reference, policy, directory / "two" / kind, is_writer=accelerator.is_main_process)
        for ranks in ("one", "two"):
            accelerator.wait_for_everyone()
            note(f"{kind}-of-{ranks}", load(kind, policy, accelerator, directory / ranks / kind), policy, found)
    if accelerator.is_main_process:
        save_file(found, directory / "found.safetensors")
