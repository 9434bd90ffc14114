"""A pass of the model over a pack, whichever way the model can go; what stands behind it in the pass is the caller's.

    Pack ─▶ over the pack, each prompt once (interface.py)     or     over padded sequences, each prompt with each completion

Suffixes: N packed tokens, M predicted tokens, B completions, S tokens of the longest sequence.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from learner.forward.interface import is_packed, packed
from learner.forward.last_layer import cut, layer_to_cut
from learner.forward.pack import Pack


def run_model(model: nn.Module, inner: Any, batch: Pack) -> Any:
    """Return the model's output. `model` may be wrapped for several ranks, `inner` is it without."""
    if is_packed(inner):
        layer = layer_to_cut(inner, batch)
        with packed(inner, batch, cut_layer=layer), cut(layer, batch) if layer else nullcontext():
            return _called(model, batch.token_ids_N[None], position_ids=batch.positions_N[None])
    rows_BS, _ = batch.sequences()
    # What is padded stands behind everything that is read: causal attention, which flash kernels know, hides it without a mask.
    return _called(model, batch.token_ids_N[rows_BS])


def _called(model: nn.Module, token_ids_BS: torch.Tensor, **positions: torch.Tensor) -> Any:
    # Without a mask transformers guesses sequences from the positions, and warns of padding.
    return model(input_ids=token_ids_BS, attention_mask=torch.ones_like(token_ids_BS), use_cache=False, **positions)


def predicting_rows(inner: Any, batch: Pack) -> torch.Tensor:
    """Which of the rows that the pass computes predict the M tokens; rows of one sequence after the other."""
    return batch.predicting_M if is_packed(inner) else batch.sequences()[1]
