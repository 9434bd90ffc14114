"""LoRA as the policy (Hu et al. 2021, arXiv 2106.09685): what is trained, pushed and saved is one low-rank adapter.

    y = W x + alpha / rank · B (A x)        W frozen, A and B trained, B zero at the start

Between the loaded model and whatever trains it. Invariant: the parameters that require a gradient are exactly the adapter's,
in float32. The adapter is pushed merged into the weights, because vLLM 0.32 takes an adapter into a running engine only by
way of files, and its prefix cache does not know one version of it from the next.
"""

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
from learner.policy.hf_weights import held
from learner.policy.snapshot import trainable
from protocol.errors import ConfigError

ADAPTER_NAME = "default"


def add_adapter(policy: PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Freeze the policy and put an adapter into it, in place. Raises ConfigError if a target is not a linear layer.

    The same seed gives every rank the same adapter, whatever else has drawn random numbers before.
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
    """The names of the layers that the config's target_modules mean. Raises ConfigError."""
    linear = {name: module for name, module in policy.named_modules() if isinstance(module, nn.Linear | Conv1D)}
    head = policy.get_output_embeddings()
    if config.target_modules == "all-linear":
        return [name for name, module in linear.items() if module is not head]
    targets: list[str] = []
    for end in config.target_modules:
        found = [name for name in linear if f".{name}".endswith(f".{end}")]
        if not found:
            ends = sorted({name.rpartition(".")[2] for name in linear})
            raise ConfigError(
                f"learner.lora.target_modules: no linear layer of this model is named {end!r}; there are: {', '.join(ends)}"
            )
        targets += found
    if any(linear[name] is head for name in targets) and policy.get_input_embeddings().weight is head.weight:
        raise ConfigError(
            "learner.lora.target_modules names the LM head, whose weight is this model's input embedding too: merged, the "
            "adapter would change both. Leave it out"
        )
    return list(dict.fromkeys(targets))


def has_adapter(policy: nn.Module) -> bool:
    return ADAPTER_NAME in getattr(policy, "peft_config", {})


class Weight(msgspec.Struct, frozen=True, eq=False):
    """A tensor of the model as it is without an adapter."""

    tensor: torch.Tensor
    low_rank: tuple[torch.Tensor, ...] = ()
    """A and B of the adapter's layer."""
    layer: AdaptedLinear | None = None

    def made_from(self, tensor: torch.Tensor, *low_rank: torch.Tensor) -> torch.Tensor:
        """Itself, or W + alpha / rank · B A in float32; of a sharded policy from what was gathered."""
        return tensor if self.layer is None else tensor.float() + delta(self.layer, *low_rank)


def weights(policy: PreTrainedModel) -> dict[str, Weight]:
    """Under the names of the model without an adapter."""
    found = {name: Weight(tensor) for name, tensor in held(policy).items()}
    for name, layer in policy.named_modules():
        if isinstance(layer, AdaptedLinear):
            a, b = (cast(nn.Linear, linear[ADAPTER_NAME]).weight for linear in (layer.lora_A, layer.lora_B))
            found[f"{name}.weight"] = Weight(found[f"{name}.weight"].tensor, (a, b), layer)
    return found


def delta(layer: AdaptedLinear, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What the adapter adds to a weight: peft's `get_delta_weight`, which knows only its own A and B, of which a rank may have a shard."""
    return ((b @ a).T if layer.fan_in_fan_out else b @ a) * layer.scaling[ADAPTER_NAME]
