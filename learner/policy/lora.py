"""LoRA as the policy (Hu et al. 2021, arXiv 2106.09685): what is trained, pushed and saved is one low-rank adapter.

    y = W x + alpha / rank · B (A x)        W frozen, A and B trained, B zero at the start

Between the loaded model and whatever trains it. Invariant: the parameters that require a gradient are exactly the adapter's,
in float32. The adapter is pushed merged into the weights, because vLLM 0.32 takes an adapter into a running engine only by
way of files, and its prefix cache does not know one version of it from the next.
"""

from collections.abc import Iterator

import torch
from peft import LoraConfig as PeftConfig
from peft import inject_adapter_in_model
from peft.tuners.lora.layer import Linear as AdaptedLinear
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from learner.config import LoraConfig
from learner.policy.checkpoint_names import held
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


@torch.no_grad()
def merged_tensors(policy: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights under the names of the model without an adapter, W + alpha / rank · B A where there is one.

    One sum in float32 exists at a time: the model never does twice.
    """
    layers = {f"{name}.weight": module for name, module in policy.named_modules() if isinstance(module, AdaptedLinear)}
    for name, tensor in held(policy).items():
        layer = layers.get(name)
        yield name, tensor if layer is None else tensor.float() + layer.get_delta_weight(ADAPTER_NAME)
