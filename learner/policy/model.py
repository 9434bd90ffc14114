"""Load the policy, or refuse it, and set the dtype in which it computes.

    float32 parameters ─▶ a layer starts: cast ─▶ it computes as if loaded in that dtype ─▶ it ends: restored

Parameters are float32; passes run in the run's dtype, as on the server. The cast is part of the graph, so
gradients arrive in float32. Autocast is no alternative: it keeps the residual stream in float32, unlike the
server and FSDP2.

Invariant: whole on each rank, sharded by FSDP2 or loaded in bfloat16, the same weights give the same
logprobs.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from learner.forward.logprobs import recomputation_contexts
from learner.policy.hf_weights import differing_tied_weights
from learner.policy.rope import check_rope, pin_rope
from learner.policy.sharded_loading import opened
from learner.policy.sharding import is_sharded
from protocol.errors import ConfigError
from protocol.model_files import tokenizer_files

MARK = "dtype_of_passes"
INITIALIZED = "_is_hf_initialized"
"""Mark of transformers on modules and tensors whose values it keeps."""
UNREAD_OUTPUTS = ("output_router_logits", "output_hidden_states", "_output_attentions")
ROUTER_BIASES = ("e_score_correction_bias", "expert_bias")
"""Names of the biases that choose a token's experts. They have no gradient, and are float32 at the server."""


def load_policy(
    path: Path,
    *,
    gradient_checkpointing: bool,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | None = None,
    max_model_len: int | None = None,
    on_meta: bool = False,
) -> PreTrainedModel:
    """Load the model in evaluation mode, with the RoPE of the server.

    Dropout, jitter, routing for training or another RoPE would make learner and server disagree about every
    token. Trained weights must be float32: optimizer steps at RL learning rates vanish in bfloat16. A
    multimodal checkpoint yields its text tower.

    `dtype` is that of all weights except ROUTER_BIASES. `attn_implementation` is one of transformers'; None: its
    choice. `max_model_len` is the server's; None: what vLLM derives. `on_meta`: without its weights
    (sharded_loading.py), but with all else.

    Raises:
        ConfigError: The model cannot be trained, not with these arguments, or its files lack tensors.
    """
    transformers.utils.logging.disable_progress_bar()
    config = load_config(path)
    _check_trainable(config, path)
    check_rope(config, max_model_len)
    _switch_off(config)
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    kind._keep_in_fp32_modules_strict = {*(kind._keep_in_fp32_modules_strict or ()), *ROUTER_BIASES}
    try:
        model = _load(path, config, dtype, attn_implementation, on_meta=on_meta)
    except (ValueError, ImportError) as error:
        if attn_implementation is None:
            raise
        raise ConfigError(
            f'learner.attn_implementation = "{attn_implementation}" does not work with model {path}: {error}. Set it '
            'to "packed", "sdpa" or "eager"'
        ) from error
    for name, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if name not in model.all_tied_weights_keys:  # as they differ
            raise differing_tied_weights(name, source)
    _make_buffers_of_router_biases(model)
    pin_rope(model, max_model_len)
    if gradient_checkpointing:
        checkpoint_layers(model)
    return model


def checkpoint_layers(model: PreTrainedModel) -> None:
    """Let the backward pass compute the activations of each layer again, as the pass has computed them."""
    model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": recomputation_contexts})
    for module in model.modules():  # only layers in training mode are checkpointed
        module.training = isinstance(module, GradientCheckpointingLayer)


def _load(
    path: Path, config: PreTrainedConfig, dtype: torch.dtype, attn_implementation: str | None, *, on_meta: bool
) -> PreTrainedModel:
    """Return the model as transformers loads it from the files that vLLM reads.

    transformers itself would read others: pickles, an adapter, or model.safetensors despite an index.
    """
    kind: Any = AutoModelForCausalLM._model_mapping[type(config)]
    text = config.get_text_config()
    with opened(path) as slices:
        tensors = dict(slices)
        if on_meta:
            tensors = {name: torch.empty(one.get_shape(), device="meta") for name, one in slices.items()}
        model: PreTrainedModel
        model, report = kind.from_pretrained(
            None,
            config=text if kind.config_class is type(text) else config,
            dtype=dtype,
            attn_implementation=attn_implementation,
            state_dict=tensors,
            device_map={"": "meta"} if on_meta else None,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    _check_complete(report, path)
    if on_meta:
        # transformers cannot compare tensors on the meta device, and leaves two untied. CheckpointReader compares them.
        model.tie_weights(recompute_mapping=False)
        _make_buffers(model)
    return model


def _check_complete(report: Mapping[str, Any], path: Path) -> None:
    """Refuse a checkpoint without all tensors, which transformers would initialize at random."""
    for name, found, expected in sorted(report["mismatched_keys"]):
        raise ConfigError(
            f"model: {name} has the shape {tuple(found)} in the files of {path}, but {tuple(expected)} by config.json; "
            "use the config.json that was saved with the weights"
        )
    if missing := sorted(report["missing_keys"]):
        raise ConfigError(
            f"model: the files of {path} lack {len(missing)} of the model's tensors, such as {missing[0]}; download or "
            "save all of them. A model that was saved without its language model head cannot be trained"
        )


def _make_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint has, such as the frequencies of RoPE, as transformers does."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set:
                module._buffers[name] = torch.empty_like(buffer, device="cpu")
        setattr(module, INITIALIZED, False)  # of every module, as some make the buffers of others
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_meta:
            setattr(tensor, INITIALIZED, True)
    model.initialize_weights()


def _make_buffers_of_router_biases(model: PreTrainedModel) -> None:
    """Make the biases buffers where they are parameters, which passes cast and transformers unfreezes as it loads."""
    for module in model.modules():
        for name in module._parameters.keys() & set(ROUTER_BIASES):
            parameter = module._parameters.pop(name)
            module.register_buffer(name, cast(nn.Parameter, parameter).detach())


def load_config(path: Path) -> PreTrainedConfig:
    """Load the config of a model.

    Raises:
        ConfigError: config.json is incomplete, for example without a factor of its RoPE, or has a wrong value, or
            is of a model that transformers does not have.
    """
    try:
        return _load_natively(AutoConfig, path)
    except KeyError as error:
        raise ConfigError(f"model: {path}/config.json is incomplete: {error.args[0]}. Complete the file") from error


def _switch_off(config: PreTrainedConfig) -> None:
    """Switch off dropout, under all its names, and outputs that nothing reads, in a config and all configs in it.

    Layers with gradient checkpointing are in training mode, so evaluation mode does not switch off dropout. From the
    routers' logits, which training with an auxiliary loss leaves on, transformers computes that loss in every pass. It
    fails where the last layer is cut.
    """
    for key, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            _switch_off(value)
        elif key in UNREAD_OUTPUTS:
            setattr(config, key, False)
        elif "drop" in key and isinstance(value, float | int) and not isinstance(value, bool):
            setattr(config, key, type(value)(0))  # some configs check the type


def _check_trainable(config: PreTrainedConfig, path: Path) -> None:
    text = config.get_text_config()
    models: dict[type, Any] = AutoModelForCausalLM._model_mapping
    if type(config) not in models or (text is not config and models[type(config)].config_class is type(config)):
        raise ConfigError(
            f"model: {path} has the type {config.model_type!r}, for which transformers has no separate language model "
            "to train; set model to a text-only checkpoint (docs/models.md#which-models-run)"
        )


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Raises:
        ConfigError: The model has none, transformers does not have it, or its files are incomplete.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = _load_natively(AutoTokenizer, path)
    except KeyError as error:
        raise ConfigError(f"model: the tokenizer in {path} has no {error}. Save it again") from error
    tokenizer_files(path)  # without any, transformers has made a tokenizer without tokens
    return tokenizer


def _load_natively(kind: Any, path: Path) -> Any:
    """Load a part of a model without code of the model, which transformers would otherwise offer to run."""
    try:
        return kind.from_pretrained(path, trust_remote_code=False)
    except ValueError as error:
        reason, remedy = str(error).strip(), ""
        if "custom code" in reason or "does not recognize" in reason:
            reason = reason.splitlines()[0]  # further lines advise to run that code
            remedy = "; set model to one that transformers supports without code of the model's own"
        reason = " ".join(reason.split()).rstrip(" .") or type(error).__name__
        raise ConfigError(f"model: transformers cannot load {path}: {reason}{remedy}") from error


def compute_in(dtype: torch.dtype, policy: nn.Module) -> None:
    """Let every later pass of `policy` compute in `dtype`.

    Call this once the policy is sharded, if it is: FSDP2 then casts the weights that it gathers. Buffers stay
    as they are.
    """
    setattr(policy, MARK, dtype)
    if is_sharded(policy):
        return
    for module, owners in _parts(policy):
        part = _Part(owners, dtype)
        if part.needs_cast:
            module.register_forward_pre_hook(part.enter)
            # always_call: checkpointing leaves a recomputed layer by an exception once it has enough.
            module.register_forward_hook(part.leave, always_call=True)


def compute_dtype(policy: nn.Module) -> torch.dtype:
    """Return the dtype in which `policy`, prepared or not, computes."""
    # DDP wraps the policy, so the mark may be on an inner module.
    marks = (getattr(module, MARK) for module in policy.modules() if hasattr(module, MARK))
    return next(marks, next(policy.parameters()).dtype)


def _parts(policy: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yield modules, each with the modules whose parameters are cast with it.

    A layer is cast as a whole, because layers read weights of modules that they do not call.
    """
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
        self._owners = [
            (owner, name)
            for owner in owners
            for name, parameter in owner._parameters.items()
            if parameter is not None and parameter.is_floating_point()
        ]
        self._parameters: list[nn.Parameter | None] = []
        """Original parameters, to restore when the part has run."""

    @property
    def needs_cast(self) -> bool:
        return any(cast(nn.Parameter, owner._parameters[name]).dtype != self._dtype for owner, name in self._owners)

    def enter(self, module: nn.Module, args: Any) -> Any:
        self._parameters = [owner._parameters[name] for owner, name in self._owners]
        # Tensors computed from the parameters keep the cast in the graph, as under FSDP2.
        for (owner, name), low in zip(self._owners, _all_in(self._dtype, self._parameters), strict=True):
            owner._parameters[name] = cast(nn.Parameter, low)
        # Mamba casts its head's input to the dtype that the weight has before this cast.
        return (args[0].to(self._dtype), *args[1:]) if isinstance(module, nn.Linear) and args else None

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        for (owner, name), parameter in zip(self._owners, self._parameters, strict=False):
            owner._parameters[name] = parameter
        self._parameters = []


def _all_in(dtype: torch.dtype, parameters: Sequence[Any]) -> list[torch.Tensor]:
    """Return all parameters in `dtype`, and cast those to be trained with one call."""
    is_other = [parameter.requires_grad and parameter.dtype != dtype for parameter in parameters]
    lows = iter(
        _Cast.apply(dtype, *(parameter for parameter, other in zip(parameters, is_other, strict=True) if other))
    )
    return [next(lows) if other else parameter.to(dtype) for parameter, other in zip(parameters, is_other, strict=True)]


class _Cast(torch.autograd.Function):
    """Autograd function that casts several tensors with one node.

    On a GPU, a few kernels cast all of them. A layer has a dozen, and a launch for each would cost more than
    the work.
    """

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        ctx.set_materialize_grads(False)
        return tuple(_cast(tensors, [dtype] * len(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        indices = [i for i, grad in enumerate(grads) if grad is not None]
        found = _cast([cast(torch.Tensor, grads[i]) for i in indices], [ctx.dtypes[i] for i in indices])
        by_index = dict(zip(indices, found, strict=True))
        return None, *(by_index.get(i) for i in range(len(grads)))


def _cast(tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]) -> list[torch.Tensor]:
    found = [torch.empty_like(tensor, dtype=dtype) for tensor, dtype in zip(tensors, dtypes, strict=True)]
    if found:
        torch._foreach_copy_(found, list(tensors))
    return found
