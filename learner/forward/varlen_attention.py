"""Attention over a pack on GPUs: one call of torch's variable-length kernel, every segment before the keys of its whole path.

The keys and values of a prompt are gathered once for each completion; its queries, and everything outside the attention, are not.
The kernel is causal from the end of queries and keys, so a segment's rows see all before it and themselves.

Suffixes: N packed tokens, L gathered keys, H heads, K key-value heads, D of a head.
"""

import inspect
import itertools
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn

from learner.forward.pack import Pack

HAS_GQA_SWITCH = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Until torch 2.12 the function let fewer heads of keys than of queries pass without being told; the kernel is the same."""


class KeyLayout(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Which keys each segment of a pack has; segments without rows are left out."""

    rows_L: torch.Tensor
    first_queries: torch.Tensor
    """int32, one more than there are segments; so are the next."""
    first_keys: torch.Tensor
    max_queries: int
    max_keys: int


def varlen_attention(
    q_NHD: torch.Tensor, k_NKD: torch.Tensor, v_NKD: torch.Tensor, layout: KeyLayout, window: int | None, scale: float
) -> torch.Tensor:
    """out_NHD, differentiable. Raises RuntimeError where the kernel cannot: float32, large heads."""
    told: dict[str, Any] = {"enable_gqa": q_NHD.shape[1] != k_NKD.shape[1]} if HAS_GQA_SWITCH else {}
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
        **told,
    )
    return cast(torch.Tensor, out)  # without its lse


def key_layout(pack: Pack) -> KeyLayout:
    """Worked out once for a pack."""
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
