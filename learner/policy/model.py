"""The policy: loading it from the disk, or refusing it there, and the dtype in which it computes.

    float32 parameters ─▶ a layer begins: cast ─▶ it computes as if it had been loaded in that dtype ─▶ it ends: put back

Parameters are float32; passes are in the run's dtype, as the server's are. Invariant: whole on each rank, sharded by FSDP2 or loaded in
bfloat16, the same weights give the same logprobs; the cast is part of the graph, so gradients arrive in float32. Autocast would not do:
under it the sum that the layers add to stays float32, which it is neither in the server nor under FSDP2.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.policy.rope import check_rope, pin_rope
from protocol.errors import ConfigError

MARK = "dtype_of_passes"


def load_policy(
    path: Path,
    *,
    gradient_checkpointing: bool,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    max_model_len: int | None = None,
) -> PreTrainedModel:
    """Load the model in evaluation mode, as it samples: without the dropout, jitter and other routing of training, and with the
    RoPE of the server. Any of those would make both sides disagree about every token.

    What is trained must be float32: optimizer steps at RL learning rates vanish in bfloat16. Of a multimodal checkpoint it is the
    text tower. `attn_implementation`: of those of transformers; None: its choice. `max_model_len`: the server's; None: what vLLM
    derives. Raises ConfigError if the model cannot be trained, or not so.
    """
    transformers.utils.logging.disable_progress_bar()
    config = load_config(path)
    _check_trainable(config, path)
    check_rope(config, max_model_len)
    _switch_off_dropout(config)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation=attn_implementation
        )
    except (ValueError, ImportError) as error:
        if attn_implementation is None:
            raise
        raise ConfigError(
            f'learner.attn_implementation = "{attn_implementation}" and model: {path}: {error}. Set it to "packed", "sdpa" or '
            '"eager"'
        ) from error
    pin_rope(model, max_model_len)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable()
        for module in model.modules():  # in evaluation mode nothing is checkpointed
            module.training = isinstance(module, GradientCheckpointingLayer)
    return model


def load_config(path: Path) -> PreTrainedConfig:
    """Raises ConfigError for a config.json in which something is missing, such as a factor of its RoPE."""
    try:
        return AutoConfig.from_pretrained(path)
    except KeyError as error:
        raise ConfigError(f"model: {path}/config.json cannot be read: {error.args[0]}. Complete it") from error


def _switch_off_dropout(config: PreTrainedConfig) -> None:
    """Under all its names, in the config and in those that it holds: layers that are checkpointed are in training mode themselves."""
    for key, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _switch_off_dropout(value)
        elif "drop" in key and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(config, key, type(value)(0))  # some configs check it


def _check_trainable(config: PreTrainedConfig, path: Path) -> None:
    text = config.get_text_config()
    models: dict[type, Any] = AutoModelForCausalLM._model_mapping
    if type(config) not in models or (text is not config and models[type(config)].config_class is type(config)):
        raise ConfigError(
            f"model: {path} is of the kind {config.model_type!r}, of which transformers has no language model that can be trained "
            "by itself; set model to a checkpoint of text alone (learner/README.md#which-models-run)"
        )


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(path)


def compute_in(dtype: torch.dtype, policy: nn.Module, accelerator: Accelerator) -> None:
    """Let every later pass of `policy`, which accelerate has not prepared yet, compute in `dtype`. Buffers stay as they are."""
    setattr(policy, MARK, dtype)
    if accelerator.is_fsdp2:
        if dtype != torch.float32:
            mixed = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
            accelerator.state.fsdp_plugin.mixed_precision_policy = mixed
        return
    for module, owners in _parts(policy):
        part = _Part(owners, dtype)
        if part.needs_cast:
            module.register_forward_pre_hook(part.enter)
            # Always: a layer that is computed again for its gradient is left by an exception as soon as there is enough of it.
            module.register_forward_hook(part.leave, always_call=True)


def compute_dtype(policy: nn.Module) -> torch.dtype:
    """The dtype in which `policy`, prepared or not, computes."""
    marks = (
        getattr(module, MARK) for module in policy.modules() if hasattr(module, MARK)
    )  # DDP stands around the policy
    return next(marks, next(policy.parameters()).dtype)


def _parts(policy: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """A layer with all that is in it, for layers read weights of modules that they do not call; any other module alone."""
    of_layers: set[nn.Module] = set()
    for module in policy.modules():
        if module in of_layers:
            continue
        owners = list(module.modules()) if isinstance(module, GradientCheckpointingLayer) else [module]
        of_layers.update(owners)
        yield module, owners


class _Part:
    """Parameters that are cast together."""

    def __init__(self, owners: Iterable[nn.Module], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._places = [
            (owner, name)
            for owner in owners
            for name, parameter in owner._parameters.items()
            if parameter is not None and parameter.is_floating_point()
        ]
        self._parameters: list[nn.Parameter | None] = []
        """While the part runs, what is to be put back."""

    @property
    def needs_cast(self) -> bool:
        return any(cast(nn.Parameter, owner._parameters[name]).dtype != self._dtype for owner, name in self._places)

    def enter(self, module: nn.Module, args: Any) -> Any:
        self._parameters = [owner._parameters[name] for owner, name in self._places]
        # No Parameters but tensors that were computed from them: so they are a part of the graph, as FSDP2's are.
        for (owner, name), low in zip(self._places, _all_in(self._dtype, self._parameters), strict=True):
            owner._parameters[name] = cast(nn.Parameter, low)
        # Mamba casts what comes to its head to the dtype that its weight has outside of it.
        return (args[0].to(self._dtype), *args[1:]) if isinstance(module, nn.Linear) and args else None

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        for (owner, name), parameter in zip(self._places, self._parameters, strict=False):
            owner._parameters[name] = parameter
        self._parameters = []


def _all_in(dtype: torch.dtype, parameters: Sequence[Any]) -> list[torch.Tensor]:
    """All in `dtype`; those that are trained and are not yet, at once."""
    is_other = [parameter.requires_grad and parameter.dtype != dtype for parameter in parameters]
    lows = iter(
        _Cast.apply(dtype, *(parameter for parameter, other in zip(parameters, is_other, strict=True) if other))
    )
    return [next(lows) if other else parameter.to(dtype) for parameter, other in zip(parameters, is_other, strict=True)]


class _Cast(torch.autograd.Function):
    """Of several tensors by one node and, on a GPU, a few kernels: a layer has a dozen, and more launches than work would be theirs."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        ctx.set_materialize_grads(False)
        return tuple(_cast(tensors, [dtype] * len(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        places = [i for i, grad in enumerate(grads) if grad is not None]
        found = _cast([cast(torch.Tensor, grads[i]) for i in places], [ctx.dtypes[i] for i in places])
        by_place = dict(zip(places, found, strict=True))
        return None, *(by_place.get(i) for i in range(len(grads)))


def _cast(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    if found:
        torch._foreach_copy_(found, list(tensors))
    return found
