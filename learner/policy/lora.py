"""Train, sync and save one low-rank adapter: LoRA (Hu et al. 2021, arXiv 2106.09685).

    y = W x + alpha / rank · B (A x)        W frozen, A and B trained, B zero at the start

A weight sync sends A and B alone, if the servers can apply them, or else the sums.

Invariant: the parameters that require a gradient are exactly the adapter's, in float32.
"""

import logging
import re
from typing import cast

import msgspec
import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora.layer import Linear as AdaptedLinear
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from learner.config import LoraConfig
from learner.policy.hf_weights import CheckpointNames, held
from learner.policy.snapshot import trainable
from protocol.errors import ConfigError

log = logging.getLogger(__name__)
ADAPTER_NAME = "default"


def add_adapter(policy: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Freeze the policy and add an adapter to it, in place.

    The same seed gives every rank the same adapter, whatever else has drawn random numbers before.

    Raises:
        ConfigError: A target is not a linear layer.
    """
    targets = target_layers(policy, config)
    is_conv1d = any(isinstance(policy.get_submodule(name), Conv1D) for name in targets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(
            PeftConfig(
                r=config.rank,
                lora_alpha=config.alpha,  # type: ignore[arg-type]  # peft only divides it
                target_modules=targets,
                fan_in_fan_out=is_conv1d,  # GPT-2 keeps its weights transposed
            ),
            policy,
            adapter_name=ADAPTER_NAME,
        )
    for parameter in trainable(policy).values():
        parameter.data = parameter.data.float()  # the base may be in bfloat16, where small steps vanish


def target_layers(policy: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Return the names of the layers that target_modules selects.

    Raises:
        ConfigError: A target is not a linear layer, or is a head tied to the embedding.
    """
    linear = {name: module for name, module in policy.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    head = policy.get_output_embeddings()
    if config.target_modules == "all-linear":
        _note_left_out(policy)
        return [name for name, module in linear.items() if module is not head]
    targets: list[str] = []
    for end in config.target_modules:
        found = [name for name in linear if f".{name}".endswith(f".{end}")]
        if not found:
            ends = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"learner.lora.target_modules: no linear layer of this model is named {end!r}; use some of: "
                f"{', '.join(ends)}"
            )
        targets += found
    if any(linear[name] is head for name in targets) and policy.get_input_embeddings().weight is head.weight:
        raise ConfigError(
            "learner.lora.target_modules contains the LM head, whose weight is also the input embedding of this "
            "model: a merged adapter would change both. Remove the LM head"
        )
    return list(dict.fromkeys(targets))


def _note_left_out(policy: PreTrainedModel) -> None:
    """Log the matrices that are in no linear layer, such as experts and their routers: they stay frozen."""
    layers = [module for module in policy.modules() if isinstance(module, nn.Linear | Conv1D | nn.Embedding)]
    covered = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
    left_out = {name: one for name, one in policy.named_parameters() if one.ndim > 1 and id(one) not in covered}
    if not left_out:
        return
    names = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in left_out)
    share = sum(one.numel() for one in left_out.values()) / sum(one.numel() for one in policy.parameters())
    log.warning(
        'learner.lora.target_modules = "all-linear" leaves %s frozen, which are no linear layers (%.0f %% of the '
        "parameters); to train them too, set learner.lora.rank = 0",
        ", ".join(names), 100 * share,
    )  # fmt: skip


def has_adapter(policy: nn.Module) -> bool:
    return ADAPTER_NAME in getattr(policy, "peft_config", {})


class SyncedTensor(msgspec.Struct, frozen=True):
    """Name of A or B in a weight sync, and the factor with which it is sent."""

    name: str
    factor: float


def why_merged(policy: PreTrainedModel, names: CheckpointNames) -> str | None:
    """Return why no server can apply the adapter without its weights, or None."""
    for name, layer in _adapted_layers(policy):
        if layer is policy.get_output_embeddings():
            return f"learner.lora.target_modules contains the LM head ({name})"
        if names.unchanged(f"{name}.weight") is None:
            return f"the checkpoint has the weight of {name} in another form"
    return None


def synced_tensors(policy: PreTrainedModel, names: CheckpointNames) -> dict[str, SyncedTensor]:
    """Return the name and factor of each tensor of the adapter, by its name in memory."""
    synced: dict[str, SyncedTensor] = {}
    for name, layer in _adapted_layers(policy):
        stem, scale = str(names.unchanged(f"{name}.weight")).removesuffix(".weight"), layer.scaling[ADAPTER_NAME]
        synced[f"{name}.lora_A.{ADAPTER_NAME}.weight"] = SyncedTensor(f"{stem}.lora_A.weight", 1.0)
        synced[f"{name}.lora_B.{ADAPTER_NAME}.weight"] = SyncedTensor(f"{stem}.lora_B.weight", scale)
    return synced


def _adapted_layers(policy: PreTrainedModel) -> list[tuple[str, AdaptedLinear]]:
    return [(name, layer) for name, layer in policy.named_modules() if isinstance(layer, AdaptedLinear)]


class Weight(msgspec.Struct, frozen=True, eq=False):
    """A tensor of the model without its adapter, and the adapter's part of it."""

    tensor: torch.Tensor
    low_rank: tuple[torch.Tensor, ...] = ()
    """A and B of the adapter's layer."""
    layer: AdaptedLinear | None = None

    def made_from(self, tensor: torch.Tensor, *low_rank: torch.Tensor) -> torch.Tensor:
        """Return the tensor, or W + alpha / rank · B A in float32.

        For a sharded policy, the arguments are the gathered tensors.
        """
        return tensor if self.layer is None else tensor.float() + delta(self.layer, *low_rank)


def weights(policy: PreTrainedModel) -> dict[str, Weight]:
    """Return the weights under the names of the model without an adapter."""
    found = {name: Weight(tensor) for name, tensor in held(policy).items()}
    for name, layer in _adapted_layers(policy):
        a, b = (cast(nn.Linear, linear[ADAPTER_NAME]).weight for linear in (layer.lora_A, layer.lora_B))
        found[f"{name}.weight"] = Weight(found[f"{name}.weight"].tensor, (a, b), layer)
    return found


def delta(layer: AdaptedLinear, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return what the adapter adds to a weight.

    peft's `get_delta_weight` only knows its own A and B, of which a rank may have a shard.
    """
    return ((b @ a).T if layer.fan_in_fan_out else b @ a) * layer.scaling[ADAPTER_NAME]
