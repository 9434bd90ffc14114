"""A pass of the model over a pack, whichever way the model can go; what stands behind it in the pass is the caller's.

    Pack ─▶ over the pack, each prompt once (interface.py)     or     over padded sequences, each prompt with each completion
    last layer of a packed pass: rows that predict ─▶ q_proj, attention, o_proj, feed-forward ─▶ zeros in all other rows

Of the last layer's other rows nobody reads more than their keys and values, and where prompts are long beside their completions those
are most of a pack. Invariant: what is cut there gives every row what comes of this row alone; settle.py finds a family of which that is
not true, since the last layer that it probes is of the kind of the model's last.

Suffixes: N packed tokens, M predicted tokens, B completions, S tokens of the longest sequence, R rows that predict, E hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from learner.forward.interface import is_packed, layers_of, packed
from learner.forward.pack import Pack

OF_ROWS = {"q_proj", "o_proj", "mlp", "feed_forward"}
"""What transformers calls the modules that give a row nothing of others."""
WORTH = 0.75
"""Of the rows: where more of them predict, taking them out costs what it saves."""


def run_model(model: nn.Module, inner: Any, batch: Pack) -> Any:
    """Return the model's output. `model` may be wrapped for several ranks, `inner` is it without."""
    if is_packed(inner):
        layer = _layer_to_cut(inner, batch)
        with packed(inner, batch, cut_layer=layer), _cut(layer, batch) if layer else nullcontext():
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


def _layer_to_cut(model: Any, pack: Pack) -> nn.Module | None:
    """The last one, if that is worth it. A layer that the backward pass computes again, then without us, stays whole."""
    layers = layers_of(model)
    is_last_known = len(layers) == model.config.get_text_config().num_hidden_layers
    if not is_last_known or model.is_gradient_checkpointing or len(pack.read_R) > WORTH * pack.num_tokens:
        return None
    return layers[-1]


@contextmanager
def _cut(layer: nn.Module, pack: Pack) -> Iterator[None]:
    """Let the next pass over `pack` spare what nobody reads of this layer, but for its attention; see interface.py."""
    with ExitStack() as undoing:
        for module in _of_rows(layer):
            # What stands around hooks and compiled code: torch leaves out a hook that comes after it compiled a module.
            undoing.callback(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
            module._compiled_call_impl = _on_rows(module._compiled_call_impl or module._call_impl, pack)
        yield


def _of_rows(module: nn.Module) -> Iterator[Any]:
    for name, child in module.named_children():
        if name in OF_ROWS:
            yield child
        else:
            yield from _of_rows(child)


def _on_rows(whole: Callable[..., Any], pack: Pack) -> Callable[..., Any]:
    def on_rows(x_1NE: torch.Tensor, *more: Any, **named: Any) -> Any:
        if more or named or x_1NE.shape[:-1] != (1, pack.num_tokens):
            return whole(x_1NE, *more, **named)
        found = whole(x_1NE.index_select(1, pack.read_R))
        if isinstance(found, tuple):  # of experts, and what their router said
            return _spread(found[0], pack), *found[1:]
        return _spread(found, pack)

    return on_rows


def _spread(found_1RE: torch.Tensor, pack: Pack) -> torch.Tensor:
    return found_1RE.new_zeros(1, pack.num_tokens, found_1RE.shape[2]).index_copy_(1, pack.read_R, found_1RE)
