"""Rows that show what a pass gets wrong, and what transformers itself makes of them.

    probe ─▶ eager_logprobs: each row alone, transformers' eager attention, whole logits          what is right
          ─▶ find_leak: what a token's logprob has of tokens that it must not see                 exactly nothing, in any dtype
          ─▶ find_influence: the same of what has no gradient, such as a choice                  nothing but rounding, in float32
          ─▶ find_excess: a group that is further off than rounding takes it                      none

Between packing_check.py and compile.py, which try out a pass, and the model. Nothing here knows packs from padded rows.

Suffixes: N packed tokens, M predicted tokens, B completions, S tokens of the longest sequence, E hidden size, V vocabulary.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import torch

from learner.forward.attention import is_packed
from learner.forward.logprobs import token_logprobs
from learner.forward.pack import Pack, Segment, pack

SHAPES = [(150, (80,)), (2, (1, 30, 25)), (9, (2, 2)), (60, (40,))]
"""Prompts and completions: a short group among long ones, and rows that outgrow convolutions, states, windows and what else has a length."""
LONGEST = max(prompt + max(lengths) for prompt, lengths in SHAPES)
WATCHED = 3
"""The completion whose first half must not depend on anything else: other groups stand on both sides of it, other completions before it,
its own second half behind it; and its prompt is so short that a convolution reaches over it."""
TIMES_ROUNDING = 3.0
"""So much further than rounding may the median of a group be off,"""
FLOOR = 1e-3
"""and by so many nats more."""
SHIFTS = (1, 2, 3, 7)
"""Of the tokens that are exchanged: a choice may come out the same with one of them."""
OTHERS = "its logprobs depend on other sequences of the pass"
LATER = "its logprobs depend on later tokens: its attention is not causal"
LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "n_ctx")


def probe_of(model: Any, device: torch.device | None = None, *, longer: int = 0) -> Pack:
    """Return the probe in tokens of a model, but for the one that pads, whose embedding may be zeros; by default where it lies.

    Rows are shorter if it has no positions for them.
    """
    embedding, config = model.get_input_embeddings(), model.config.get_text_config()
    limits = [limit for key in LIMITS if isinstance(limit := vars(config).get(key), int)]
    return probe(
        min(embedding.num_embeddings, len(model.get_output_embeddings().weight)),
        device or model.device,
        longer=longer,
        padding_id=getattr(embedding, "padding_idx", None),
        share=min(1.0, 0.9 * min(limits, default=LONGEST) / LONGEST),
    )


def probe(
    vocab_size: int, device: torch.device, *, longer: int = 0, padding_id: int | None = None, share: float = 1.0
) -> Pack:
    """Return groups of several shapes, all tokens different as far as the vocabulary goes. `longer`: by so much longer prompts."""
    order = [
        token_id for token_id in np.random.default_rng(0).permutation(vocab_size).tolist() if token_id != padding_id
    ]
    ids = itertools.cycle(order)

    def cut(length: int) -> int:
        return max(min(length, 2), int(length * share))

    return pack(
        [
            (_take(ids, cut(prompt) + longer), [_take(ids, cut(length)) for length in lengths])
            for prompt, lengths in SHAPES
        ],
        device,
    )


def _take(ids: Iterator[int], count: int) -> np.ndarray:
    return np.array(list(itertools.islice(ids, count)))


@torch.no_grad()
def eager_logprobs(model: Any, batch: Pack) -> torch.Tensor:
    """Return logprobs_M of a model that is set to eager attention, one row at a time: nothing is packed, padded, cut or fused."""
    num_predicted_B = batch.is_token_BT.sum(dim=1).tolist()
    found = []
    for path, targets in zip(batch.paths_B, batch.targets_M.split(num_predicted_B), strict=True):
        ids_1S = batch.token_ids_N[np.concatenate([segment.rows for segment in path])][None]
        logits_1SV = model(input_ids=ids_1S, attention_mask=torch.ones_like(ids_1S), use_cache=False).logits
        logprobs_TV = logits_1SV[0, -len(targets) :].float().log_softmax(-1)
        found.append(logprobs_TV.gather(1, targets[:, None])[:, 0])
    return torch.cat(found)


def find_leak(model: Any, batch: Pack) -> str | None:
    """Return what logprobs depend on beside what stands before their tokens, None if on nothing.

    Their gradient by the embedding of any other token must be exactly zero: rounding cannot hide a leak, nor look like one.
    """
    taken: list[torch.Tensor] = []

    def take(_module: object, _inputs: object, embedded: torch.Tensor) -> torch.Tensor:
        taken.append(embedded.detach().requires_grad_())
        return taken[-1].clone()  # some models add to it in place

    hook = model.get_input_embeddings().register_forward_hook(take)
    try:
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(_watched(model, batch).sum(), taken[-1])
    finally:
        hook.remove()
    others, later, num_tokens = _forbidden(batch, model)
    if len(grad.flatten(0, -2)) != num_tokens:
        return "it embeds other tokens than those of its rows"
    if not grad.isfinite().all():
        return "the gradient of its logprobs is NaN or inf"
    moved = grad.flatten(0, -2).ne(0).any(dim=-1)
    if moved[others].any():
        return OTHERS
    return LATER if moved[later].any() else None


@torch.no_grad()
def find_influence(model: Any, batch: Pack, tolerance: float) -> str | None:
    """Return what the watched logprobs move with by more than `tolerance`, on average, when its tokens are exchanged.

    Gradients show neither what is chosen (experts, keys) nor what is detached. All shapes stay as they are, and so does rounding.
    """
    own_S = np.concatenate([segment.rows for segment in batch.paths_B[WATCHED]])
    others, later = np.setdiff1d(np.arange(batch.num_tokens), own_S), own_S[_num_before(batch) :]
    right_T = _watched(model, batch)
    for (rows, what), shift in itertools.product(((others, OTHERS), (later, LATER)), SHIFTS):
        ids_N = batch.token_ids_N.clone()
        ids_N[rows] = ids_N[rows].roll(shift)
        moved = float((_watched(model, msgspec.structs.replace(batch, token_ids_N=ids_N)) - right_T).abs().mean())
        if not moved <= tolerance:
            return f"{what}, by {moved:.2g} nats"
    return None


def _watched(model: Any, batch: Pack) -> torch.Tensor:
    return token_logprobs(model, batch, 1.0)[0][WATCHED, : _num_watched(batch)]


def find_excess(
    found_M: torch.Tensor, rounded_M: torch.Tensor, right_M: torch.Tensor, batch: Pack
) -> tuple[float, float] | None:
    """Return how far the group that is furthest beyond rounding is from `right_M`, and how far rounding takes it; None if none is.

    Medians, since routers may choose other experts for single tokens; of each group, so that none is wrong behind the others.
    """
    found_G = _medians(found_M - right_M, batch)
    rounding_G = _medians(rounded_M - right_M, batch).clamp_min((rounded_M - right_M).abs().median())
    excess_G = (found_G - TIMES_ROUNDING * rounding_G - FLOOR).nan_to_num(torch.inf)
    worst = int(excess_G.argmax())
    return None if excess_G[worst] <= 0 else (float(found_G[worst]), float(rounding_G[worst]))


def _medians(difference_M: torch.Tensor, batch: Pack) -> torch.Tensor:
    """Of each group. A completion of one token would have none."""
    num_tokens: Counter[Segment] = Counter()
    for path, count in zip(batch.paths_B, batch.is_token_BT.sum(dim=1).tolist(), strict=True):
        num_tokens[path[0]] += count
    return torch.stack([of_group.median() for of_group in difference_M.abs().split(list(num_tokens.values()))])


def _forbidden(batch: Pack, model: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Which embedded tokens belong to other sequences than the watched one, which of its own are not before what is watched, and how
    many there are of all.
    """
    path = batch.paths_B[WATCHED]
    if is_packed(model):
        own_S = torch.from_numpy(np.concatenate([segment.rows for segment in path]))
        num_tokens = batch.num_tokens
    else:
        rows_BS, _ = batch.sequences()
        own_S = WATCHED * rows_BS.shape[1] + torch.arange(rows_BS.shape[1])
        num_tokens = rows_BS.numel()
    is_other = torch.ones(num_tokens, dtype=torch.bool)
    is_other[own_S] = False
    return is_other.nonzero()[:, 0], own_S[_num_before(batch) :], num_tokens


def _num_before(batch: Pack) -> int:
    """Tokens of its sequence that the watched ones may depend on."""
    return sum(segment.length for segment in batch.paths_B[WATCHED][:-1]) + _num_watched(batch) - 1


def _num_watched(batch: Pack) -> int:
    """Tokens of the watched completion."""
    return int(batch.is_token_BT[WATCHED].sum()) // 2
