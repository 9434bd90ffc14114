"""Compute the logprobs that a policy gives to the tokens of a pack.

    Pack ─▶ run_model, packed (attention.py) or over padded sequences ─▶ hidden states that predict
         ─▶ lm_head.py ─▶ logprobs_BT, entropy_BT: one row for each completion

The model is called as a whole, so its wrappers (DDP, FSDP2, an adapter) see an ordinary pass.

Invariant: the modules that `_cut` runs on fewer rows compute each row from that row alone, and on the same rows
when gradient checkpointing computes them again. packing_check.py detects models that violate the former,
because it probes a last layer of the same kind.

Suffixes: N packed tokens, M predicted tokens, B completions, T tokens of the longest completion, S tokens of
a row that the pass computes or of the longest sequence, R rows that predict, E hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from learner.forward.attention import is_packed, layers_of, packed
from learner.forward.lm_head import EntropyUse, HeadLogprobs, LogprobSettings
from learner.forward.pack import Pack, pack
from learner.forward.replay import Routing, replayed, routed_again
from learner.forward.tile import PLAIN, LogitMap, Tiles
from protocol.errors import ConfigError

Answer = tuple[torch.Tensor, torch.Tensor | None]
_cut_in_this_pass: ContextVar[tuple[nn.Module, Pack] | None] = ContextVar("_cut_in_this_pass", default=None)
"""Layer that the current pass cuts, and its pack."""
logit_maps: WeakKeyDictionary[nn.Module, LogitMap] = WeakKeyDictionary()
"""Logit map of each model that has had a pass.

Finding a map takes a pass of its own, which all ranks of a sharded model must make.
"""
tiles_of: WeakKeyDictionary[nn.Module, Tiles] = WeakKeyDictionary()
"""Compiled tile functions of each model with a fused head (compile.py)."""
float32_heads: WeakSet[nn.Module] = WeakSet()
"""Models that compute in bfloat16, except for their logits (`head_dtype`)."""
OF_ROWS = {"q_proj", "o_proj", "mlp", "feed_forward"}
"""Names in transformers of modules that compute each row from that row alone."""
WORTH = 0.75
"""Maximum share of rows that predict. Above it, selecting them costs more than it saves."""
LARGE, SMALL = 2.0**23, 2.0**-20
"""Probe logits, exact in every dtype: one far above every soft cap, and one that no soft cap bends."""


def token_logprobs(
    model: nn.Module, batch: Pack, temperature: float, *, entropy: EntropyUse = "none", routing: Routing | None = None
) -> Answer:
    """Return (logprobs_BT, entropy_BT) of the completions' tokens at `temperature`.

    entropy_BT is None if `entropy` is "none". With `routing`, the routers choose the experts that it names
    (replay.py). If the policy is sharded, all ranks call this together.

    Raises:
        ConfigError: The learner cannot compute the logits of this model.
    """
    inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
    if inner not in logit_maps:
        logit_maps[inner] = logit_map_of(inner)
    settings = LogprobSettings(
        logit_maps[inner], temperature, entropy, tiles_of.get(inner, PLAIN), in_float32=inner in float32_heads
    )

    def of_hidden(hidden_ME: torch.Tensor) -> Answer:
        weight_VE, bias_V = _weight_and_bias(inner.get_output_embeddings(), hidden_ME.dtype)
        return HeadLogprobs.apply(hidden_ME, weight_VE, bias_V, batch.targets_M, settings)

    answering = _answering(inner, predicting_rows(inner, batch), of_hidden)
    with answering, replayed(inner, batch, routing, is_packed=is_packed(inner)):
        logprobs_M, entropy_M = run_model(model, inner, batch)
    return batch.unpacked(logprobs_M), None if entropy_M is None else batch.unpacked(entropy_M)


@torch.no_grad()
def sequences_logprobs(model: nn.Module, sequences: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    """Return the logprobs of each sequence's tokens after its first.

    The result is on the CPU, one sequence after the other. One pass computes all of them.
    """
    ids = [np.array(sequence) for sequence in sequences]
    batch = pack([(one[:1], [one[1:]]) for one in ids], device)
    logprobs_BT, _ = token_logprobs(model, batch, 1.0)
    return logprobs_BT[batch.is_token_BT].cpu()


@contextmanager
def _answering(inner: Any, predicting_M: torch.Tensor, of_hidden: Callable[[torch.Tensor], Answer]) -> Iterator[None]:
    """Let a pass return `of_hidden` of the predicting hidden states, not logits.

    The head computes a single row; a hook takes its input. `of_hidden` runs inside the pass, where the
    weights of a sharded policy are gathered and its hooks see what is returned.
    """
    taken: list[torch.Tensor] = []

    def take(_head: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        taken.append(inputs[0])
        return (inputs[0][:1, :1], *inputs[1:])

    def answer(*_: object) -> Answer:
        (hidden_BSE,) = taken
        return of_hidden(hidden_BSE.flatten(0, 1).index_select(0, predicting_M))

    hooks = [
        inner.get_output_embeddings().register_forward_pre_hook(take),
        inner.register_forward_hook(answer, prepend=True),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _weight_and_bias(head: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return weight and bias of the head, including its adapter, in `dtype`.

    `dtype` is that of the head's input, as for the other layers.
    """
    adapters = head.active_adapters if isinstance(head, BaseTunerLayer) else ()
    linear = head.get_base_layer() if adapters else head
    weight_VE = linear.weight
    for name in adapters:
        weight_VE = weight_VE + head.get_delta_weight(name)
    return weight_VE.to(dtype), None if linear.bias is None else linear.bias.to(dtype)


def run_model(model: nn.Module, inner: Any, batch: Pack) -> Any:
    """Return the model's output.

    `model` may be wrapped for several ranks; `inner` is the model without the wrapper.
    """
    if is_packed(inner):
        layer = _layer_to_cut(inner, batch)
        with packed(inner, batch, cut_layer=layer), _cut(layer, batch) if layer else nullcontext():
            return _called(model, batch.token_ids_N[None], position_ids=batch.positions_N[None])
    rows_BS, _ = batch.sequences()
    # Padding follows every token that is read, so causal attention hides it without a mask.
    # Flash kernels support this too.
    return _called(model, batch.token_ids_N[rows_BS])


def _called(model: nn.Module, token_ids_BS: torch.Tensor, **positions: torch.Tensor) -> Any:
    # Without a mask, transformers guesses sequences from the positions and warns about padding.
    return model(input_ids=token_ids_BS, attention_mask=torch.ones_like(token_ids_BS), use_cache=False, **positions)


def predicting_rows(inner: Any, batch: Pack) -> torch.Tensor:
    """Return which of the rows that the pass computes predict the M tokens.

    Padded sequences are flattened, one after the other.
    """
    return batch.predicting_M if is_packed(inner) else batch.sequences()[1]


def _layer_to_cut(model: Any, pack: Pack) -> nn.Module | None:
    """Return the last layer if cutting it pays off, else None.

    Only K and V are read of rows that do not predict, which are most of a pack with long prompts.
    """
    layers = layers_of(model)
    is_last_known = len(layers) == model.config.get_text_config().num_hidden_layers
    if not is_last_known or len(pack.read_R) > WORTH * pack.num_tokens:
        return None
    return layers[-1]


@contextmanager
def _cut(layer: nn.Module, pack: Pack) -> Iterator[None]:
    """Let the next pass over `pack` skip the rows of this layer that nothing reads.

    attention.py does the same for the attention itself.
    """
    with ExitStack() as undoing:
        undoing.callback(_cut_in_this_pass.reset, _cut_in_this_pass.set((layer, pack)))
        for module in _of_rows(layer):
            # Replace the call around hooks and compiled code: torch ignores hooks added after compilation.
            undoing.callback(setattr, module, "_compiled_call_impl", module._compiled_call_impl)
            module._compiled_call_impl = _on_rows(module._compiled_call_impl or module._call_impl, pack)
        yield


def recomputation_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return the contexts of a checkpointed layer: in the pass, and when the backward pass computes it again.

    The pass is over by then, and with it the cut of the last layer and the choices of the routers.
    """
    cut = _cut_in_this_pass.get()
    return nullcontext(), _both(_cut(*cut) if cut else nullcontext(), routed_again())


@contextmanager
def _both(first: AbstractContextManager[None], second: AbstractContextManager[None]) -> Iterator[None]:
    with first, second:
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
        if isinstance(found, tuple):  # experts return their router's output too
            return _spread(found[0], pack), *found[1:]
        return _spread(found, pack)

    return on_rows


def _spread(found_1RE: torch.Tensor, pack: Pack) -> torch.Tensor:
    return found_1RE.new_zeros(1, pack.num_tokens, found_1RE.shape[2]).index_copy_(1, pack.read_R, found_1RE)


@torch.no_grad()
def logit_map_of(model: Any) -> LogitMap:
    """Find what a model does to the output of its head, by substituting known logits.

    No config key is read. All ranks call this together if the model is sharded.

    Raises:
        ConfigError: The map is neither a scaling nor a soft cap.
    """
    known_V = torch.linspace(-100.0, 100.0, model.get_input_embeddings().num_embeddings, dtype=torch.float64)
    known_V[:2] = torch.tensor([LARGE, SMALL])
    known_V = known_V.to(model.device)

    def replace(_head: nn.Module, _inputs: object, logits: torch.Tensor) -> torch.Tensor:
        return known_V.expand(*logits.shape[:-1], len(known_V))  # float64, so that the scale is exact

    hook = model.get_output_embeddings().register_forward_hook(replace)
    try:
        one_token = pack([(np.zeros(1, np.int64), [np.zeros(1, np.int64)])], model.device)
        found_V = run_model(model, model, one_token).logits[0, 0].double()
    finally:
        hook.remove()
    scale = float(found_V[1] / SMALL)
    cap = None if float(found_V[0]) > 0.01 * LARGE * scale else float(found_V[0])
    expected_V = known_V * scale
    expected_V = expected_V if cap is None else cap * torch.tanh(expected_V / cap)
    if not torch.allclose(found_V, expected_V, rtol=1e-5, atol=1e-5):
        raise ConfigError(
            f"model: {type(model).__name__} changes its logits by something other than a scaling or a soft cap (it "
            f"maps {LARGE:g} to {float(found_V[0]):g} and {SMALL:g} to {float(found_V[1]):g}), so the learner cannot "
            "compute them; use another model"
        )
    return LogitMap(scale, cap)
