"""Make a model cheap and exact to probe, and restore it afterwards.

    few_layers       at least two layers, one of each kind, the last of the same kind as the model's last
    computing_in     another dtype or device; in float32, rounding is far smaller than errors
    short_windows    windows and chunks that are shorter than the rows
    loud             scores as large as in trained models or larger: soft caps, sinks and scales matter

A mistake with a kind of layer shows in the first layer of that kind.
Invariant: no second copy of the model exists; casts copy only the layers that are probed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from learner.forward.attention import layers_of

PROBE_WINDOW = 32
WINDOW_WORDS = ("window", "attention_chunk", "index_topk")
"""Parts of the names of settings that limit how many keys a query sees."""
INDEX_SUFFIXES = ("idx", "index", "number", "_id")
"""Ends of the names of attributes that number the layers."""
ROUNDING = 2.0**-21
"""Relative size of a few float32 roundings."""
LOUDEST = 100.0
"""Target for the largest score of a layer; the soft caps in use are 30 and 50."""


@contextmanager
def few_layers(model: Any) -> Iterator[None]:
    """Let the model have only its first layers, enough to show one of each kind.

    The last of them is of the same kind as the model's last layer, which a pass may cut.
    """
    decoder, config, layers = model.get_decoder(), model.config.get_text_config(), layers_of(model)
    if not layers or vars(config).get("num_hidden_layers") != len(layers):
        yield
        return
    kinds = [_kind(layer) for layer in layers]
    enough = min(len(layers), max(2, *(kinds.index(kind) + 1 for kind in kinds)))
    num_layers = kinds.index(kinds[-1], enough - 1) + 1
    whole = decoder.layers
    decoder.layers, vars(config)["num_hidden_layers"] = whole[:num_layers], num_layers
    try:
        yield
    finally:
        decoder.layers, vars(config)["num_hidden_layers"] = whole, len(whole)


def _kind(layer: nn.Module) -> tuple[object, ...]:
    """Return the properties that distinguish a kind of layer.

    These are its modules, their shapes and their switches, which may also be 0 and 1 (SmolLM3). All other
    numbers vary with depth.
    """
    switches = [
        (name, key, value if isinstance(value, bool | str) or _is_switch(key, value) else type(value))
        for name, module in layer.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, bool | str | int | float | None)
    ]
    modules = [(name, type(module)) for name, module in layer.named_modules()]
    shapes = [(name, parameter.shape) for name, parameter in layer.named_parameters()]
    return (*modules, *shapes, *switches)


def _is_switch(key: str, value: object) -> bool:
    return isinstance(value, int) and value in (0, 1) and not key.endswith(INDEX_SUFFIXES)


@contextmanager
def computing_in(model: nn.Module, dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Cast the parameters to another dtype and device; restore the tensors afterwards."""
    parameters = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    kept = [(tensor, tensor.data) for tensor in (*parameters, *model.buffers())]
    try:
        for parameter in parameters:
            parameter.data = parameter.data.to(device, dtype)
        for buffer in model.buffers():  # wider buffers stay, as in model.py
            is_narrower = buffer.is_floating_point() and buffer.itemsize < dtype.itemsize
            buffer.data = buffer.data.to(device, dtype if is_narrower else buffer.dtype)
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data


@contextmanager
def short_windows(model: Any) -> Iterator[None]:
    """Shorten windows, chunks and selections of keys to PROBE_WINDOW.

    This changes both the config, from which masks are made, and the layers.
    """
    holders = [vars(config) for config in configs_of(model.config)] + [vars(module) for module in model.modules()]
    kept = [
        (holder, key, value)
        for holder in holders
        for key, value in holder.items()
        if any(word in key for word in WINDOW_WORDS) and isinstance(value, int) and value > PROBE_WINDOW
    ]
    try:
        for holder, key, _ in kept:
            holder[key] = PROBE_WINDOW
        yield
    finally:
        for holder, key, value in kept:
            holder[key] = value


def configs_of(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return a config and all configs in it, such as of its text tower or experts."""
    inner = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(found for one in inner for found in configs_of(one))]


Largest = dict[nn.Module, float]
"""Upper bound of the scores between the queries and keys of each layer."""


@contextmanager
def listening() -> Iterator[Largest]:
    """Record how large each layer's scores can be in the passes that follow."""
    largest: Largest = {}

    def note(module: nn.Module, query: torch.Tensor, key: torch.Tensor, scale: float | None) -> torch.Tensor:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        bound = float(query.norm(dim=-1).max() * key.norm(dim=-1).max()) * scale
        largest[module] = max(bound, largest.get(module, 0.0))
        return query

    with _queries_by(note):
        yield largest


@contextmanager
def loud(largest: Largest) -> Iterator[None]:
    """Scale the queries of each layer so that its scores reach LOUDEST."""

    def scale_up(module: nn.Module, query: torch.Tensor, _key: torch.Tensor, _scale: float | None) -> torch.Tensor:
        return query * max(1.0, LOUDEST / largest[module]) if largest.get(module) else query

    with _queries_by(scale_up):
        yield


@contextmanager
def sampling(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode, as on the server."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


@contextmanager
def rounded(model: Any, amount: float = ROUNDING) -> Iterator[None]:
    """Perturb the embeddings by about the rounding error of a pass.

    `amount` is relative; the default is for float32.
    """
    generator = torch.Generator().manual_seed(0)

    def change(_module: object, _inputs: object, embedded: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(embedded.shape, generator=generator) * 2 - 1
        return (embedded * (1 + amount * noise.to(embedded.device))).to(embedded.dtype)

    hook = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def _queries_by(
    change: Callable[[nn.Module, torch.Tensor, torch.Tensor, float | None], torch.Tensor],
) -> Iterator[None]:
    """Change the queries of every attention that transformers looks up by name."""
    look_up = ALL_ATTENTION_FUNCTIONS.get_interface

    def changed(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        attention = look_up(name, default)

        def attend(module: nn.Module, query: torch.Tensor, key: torch.Tensor, *rest: Any, **wanted: Any) -> Any:
            return attention(module, change(module, query, key, wanted.get("scaling")), key, *rest, **wanted)

        return attend

    changes = vars(ALL_ATTENTION_FUNCTIONS)
    before = changes.get("get_interface")
    changes["get_interface"] = changed
    try:
        yield
    finally:
        del changes["get_interface"]
        if before is not None:
            changes["get_interface"] = before
