"""Replace transformers' mask and attention when a policy runs over a pack.

    packed(model, pack): model(…) ─▶ pack_mask: Ticket as mask ─▶ layers ─▶ pack_attention(ticket, q, k, v)

On GPUs, one call of torch's variable-length kernel pairs every segment with the keys of its whole path. K and
V of a prompt are gathered once for each completion, its queries are not. The kernel's causal mask aligns the
ends of queries and keys. On CPUs, tree_attention.py computes the attention.

Invariant: a layer that needs a feature that packing does not support raises PackingError. packing_check.py then
pads the model; in a later pass, PackingError ends the run.
Suffixes: N packed tokens, L gathered keys, H heads, K key-value heads, D head size.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, cast
from weakref import WeakSet

import msgspec
import numpy as np
import torch
from torch import nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from learner.forward.pack import Pack
from learner.forward.tree_attention import Tree, TreeAttention, plan_of

HAS_GQA_SWITCH = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether varlen_attn has `enable_gqa`.

Before torch 2.12, it accepted fewer key heads than query heads without it. The kernel is the same.
"""
NAME = "slipstream_pack"
"""Name of this attention in transformers' registry."""
HARMLESS = {
    "position_ids", "cache_position", "use_cache", "output_attentions", "output_router_logits", "is_causal",
    "layer_idx",
    "dropout", "sliding_window",
}  # fmt: skip
"""Additional arguments that layers pass to their attention and that change nothing here."""


class KeyLayout(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Keys of each segment of a pack. Segments without rows are left out."""

    rows_L: torch.Tensor
    first_queries: torch.Tensor
    """Index of each segment's first query, then the number of queries, as int32. Same for `first_keys`."""
    first_keys: torch.Tensor
    max_queries: int
    max_keys: int


def varlen_attention(
    q_NHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, layout: KeyLayout, window: int | None, scale: float
) -> torch.Tensor:
    """Return out_NHD, differentiable.

    Raises:
        RuntimeError: The kernel does not support the inputs, such as float32 or large heads.
    """
    options: dict[str, Any] = {"enable_gqa": q_NHD.shape[1] != k_NKD.shape[1]} if HAS_GQA_SWITCH else {}
    out = varlen_attn(
        q_NHD,
        k_NKD.index_select(0, layout.rows_L),
        v_NKD.index_select(0, layout.rows_L),
        layout.first_queries,
        layout.first_keys,
        layout.max_queries,
        layout.max_keys,
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    return cast(torch.Tensor, out)  # a tensor, since lse is not requested


def key_layout(pack: Pack) -> KeyLayout:
    """Return the key layout of a pack, which is computed once."""
    if "varlen" not in pack.plans:
        pack.plans["varlen"] = _key_layout(pack)
    return cast(KeyLayout, pack.plans["varlen"])


def _key_layout(pack: Pack) -> KeyLayout:
    paths = {path[: depth + 1] for path in pack.paths_B for depth in range(len(path)) if path[depth].length}
    in_order = sorted(paths, key=lambda path: path[-1].start)
    queries = [path[-1].length for path in in_order]
    keys = [sum(segment.length for segment in path) for path in in_order]
    rows = [segment.rows for path in in_order for segment in path]
    device = pack.token_ids_N.device

    def starts(lengths: list[int]) -> torch.Tensor:
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)

    return KeyLayout(
        rows_L=torch.from_numpy(np.concatenate(rows)).to(device),
        first_queries=starts(queries),
        first_keys=starts(keys),
        max_queries=max(queries),
        max_keys=max(keys),
    )


class PackingError(RuntimeError):
    """Error of a model that cannot run over a pack. Its message gives the reason."""


class Pass(msgspec.Struct, frozen=True, eq=False):
    """One forward pass over a pack."""

    pack: Pack
    layers: set[int] = msgspec.field(default_factory=set)
    """Ids of the attention modules that have run."""
    of_predicting_only: frozenset[int] = frozenset()
    """Ids of the modules in which only the rows that predict are read."""


class Ticket(msgspec.Struct, frozen=True, eq=False):
    """Placeholder that goes through the model in place of a mask.

    It therefore reaches a layer again when the backward pass recomputes the layer.
    """

    current: Pass
    window: int | None
    problem: str | None
    """Reason why no layer may use this mask. Some models make masks that none of their layers uses."""
    keys: KeyLayout | None
    """Layout for the GPU kernel, computed outside of compiled code."""


compiled_layers: WeakSet[nn.Module] = WeakSet()
"""Layers whose attention was checked in a pass before they were compiled (compile.py)."""
_current: ContextVar[Pass | None] = ContextVar("_current", default=None)


def is_packed(model: PreTrainedModel) -> bool:
    """Return whether the model runs over packs, and only over packs."""
    return model.config._attn_implementation == NAME


@contextmanager
def packed(model: PreTrainedModel, pack: Pack, *, cut_layer: nn.Module | None = None) -> Iterator[None]:
    """Let the next pass of the model run over `pack`.

    The attention of `cut_layer` computes only the rows that predict.

    Raises:
        PackingError: Some layers did not use the attention for packs.
    """
    of_predicting_only = frozenset(map(id, cut_layer.modules())) if cut_layer else frozenset()
    current = Pass(pack, of_predicting_only=of_predicting_only)
    token = _current.set(current)
    try:
        yield
    finally:
        _current.reset(token)
    expected = model.config.get_text_config().num_hidden_layers - sum(m in compiled_layers for m in layers_of(model))
    if len(current.layers) < expected:
        raise PackingError(f"only {len(current.layers)} of its {expected} layers have an attention that can be packed")


def layers_of(model: Any) -> list[nn.Module]:
    """Return the decoder's `layers`, the usual name, or an empty list."""
    return list(getattr(model.get_decoder(), "layers", []))


def pack_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    **_: object,
) -> Ticket:
    """Return a ticket; transformers calls this once for each kind of layer in a pass.

    `local_size` is the sliding window of these layers.
    """
    current = _current.get()
    if current is None:
        raise PackingError("the model was called without a pack; compute its logprobs with token_logprobs")
    problem = None
    if (batch_size, q_length, kv_length) != (1, current.pack.num_tokens, current.pack.num_tokens):
        problem = f"a mask of shape {(batch_size, q_length, kv_length)} for {current.pack.num_tokens} tokens"
    elif not _is_causal(mask_function, local_size):
        problem = "a mask that is neither causal nor a sliding window"
    return Ticket(current, local_size, problem, _keys_of(current.pack))


def _keys_of(pack: Pack) -> KeyLayout | None:
    return None if pack.token_ids_N.device.type == "cpu" else key_layout(pack)


def _is_causal(mask_function: Callable[..., torch.Tensor], window: int | None) -> bool:
    """Return whether a model's mask function is causal within its window.

    The function is evaluated on pairs around the window, where chunks (Llama 4) or blocks (images) differ.
    """
    reach = window or 64
    near = {0, 1, reach // 2, reach - 1, reach, reach + 1, 2 * reach, 3 * reach + 1}
    queries_Q1 = torch.tensor(sorted(near)).unsqueeze(1)
    keys_K = torch.tensor(sorted(near | {max(0, query - reach + offset) for query in near for offset in (-1, 0, 1)}))
    zero = torch.zeros((), dtype=torch.long)
    is_visible_QK = (keys_K <= queries_Q1) & (keys_K > queries_Q1 - (window or 1 << 40))
    return torch.equal(mask_function(zero, zero, queries_Q1, keys_K).expand_as(is_visible_QK), is_visible_QK)


def pack_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Ticket,
    **wanted: Any,
) -> tuple[torch.Tensor, None]:
    """Return the output of the attention, (1, N, H, D), and None.

    query is (1, H, N, D); key and value are (1, K, N, D). `wanted` holds the family's other attention
    arguments.
    """
    scale, sinks_H = wanted.pop("scaling", None), wanted.pop("s_aux", None)
    if not torch.compiler.is_compiling():
        _admit(module, key, attention_mask, wanted, has_sinks=sinks_H is not None)
    window, keys = attention_mask.window, attention_mask.keys
    scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
    # Kernels require one size, but multi-head latent attention has narrower values than keys. Even a padding of
    # 0 copies.
    num_missing = query.shape[-1] - value.shape[-1]
    values = nn.functional.pad(value, (0, num_missing)) if num_missing else value
    q_NHD, k_NKD, v_NKD = (x.squeeze(0).transpose(0, 1) for x in (query, key, values))
    if keys is not None:
        out_NHD = varlen_attention(q_NHD, k_NKD, v_NKD, keys, window, scale)
    else:
        current = attention_mask.current
        plan = plan_of(current.pack, window, predicting_only=id(module) in current.of_predicting_only)
        out_NHD = TreeAttention.apply(q_NHD, k_NKD, v_NKD, sinks_H, Tree(plan, scale))
    return out_NHD[..., : value.shape[-1]].unsqueeze(0), None


def _admit(module: nn.Module, key: torch.Tensor, ticket: Ticket, wanted: dict[str, Any], *, has_sinks: bool) -> None:
    """Record that the layer has run. Raises PackingError if it cannot be packed."""
    layer = type(module).__name__
    if not isinstance(ticket, Ticket):
        raise PackingError(f"{layer} creates its own mask, a {type(ticket).__name__}")
    problem = ticket.problem or _problem(wanted, ticket.window, key.shape[2], ticket.current.pack.num_tokens)
    if problem is not None:
        raise PackingError(f"{layer} has {problem}")
    if has_sinks and ticket.keys is not None:
        raise PackingError(f"{layer} has attention sinks, which the kernel for {key.device.type} does not support")
    ticket.current.layers.add(id(module))


def _problem(wanted: dict[str, Any], window: int | None, num_keys: int, num_tokens: int) -> str | None:
    """Return why the attention that a layer requests cannot be packed, or None."""
    own_window = wanted.get("sliding_window")  # the mask's window counts, as not every family passes this
    if own_window and window not in (None, own_window):
        return f"a window of {own_window}, but a mask with a window of {window}"
    if wanted.get("dropout"):
        return "dropout"
    if wanted.get("is_causal") is False:
        return "no causal order"
    if num_keys != num_tokens:
        return f"{num_keys} keys for {num_tokens} tokens"
    unknown = sorted(name for name, value in wanted.items() if value is not None and name not in HARMLESS)
    return ", ".join(unknown) or None


AttentionInterface.register(NAME, pack_attention)
AttentionMaskInterface.register(NAME, pack_mask)
