"""Provide rows that reveal errors of a pass, and compare the pass with transformers' own.

    probe ─▶ eager_logprobs: each row alone, eager attention, whole logits     the correct result
          ─▶ find_leak: gradients w.r.t. tokens that must not be seen          exactly 0, in any dtype
          ─▶ find_influence: effects without gradients, such as choices        only rounding, in float32
          ─▶ find_excess: a group whose error exceeds rounding                 none

packing_check.py and compile.py use these checks for packed and padded passes alike.

Suffixes: N packed tokens, M predicted tokens, B completions, S tokens of the longest sequence, E hidden size,
V vocabulary.
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
"""Prompt length and completion lengths of each group.

A short group stands among long ones. Rows are longer than convolutions, states and windows.
"""
LONGEST = max(prompt + max(lengths) for prompt, lengths in SHAPES)
WATCHED = 3
"""Index of the completion whose first half must depend on nothing else.

Groups on both sides, completions before it and its own second half could leak into it. Its prompt is so short
that a convolution reaches across it.
"""
TIMES_ROUNDING = 3.0
"""Allowed multiple of rounding for the median error of a group."""
FLOOR = 1e-3
"""Additional allowance for this error, in nats."""
SHIFTS = (1, 2, 3, 7)
"""Rotations of the tokens to exchange. A choice may be the same after one of them."""
OTHERS = "its logprobs depend on other sequences of the pass"
LATER = "its logprobs depend on later tokens: its attention is not causal"
LIMITS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions", "n_ctx")


def probe_of(model: Any, device: torch.device | None = None, *, longer: int = 0) -> Pack:
    """Return the probe in tokens of a model's vocabulary, by default on its device.

    The padding token is left out, because its embedding may be 0. Rows are shorter if the model has too few
    positions.
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
    """Return groups of several shapes, with as many distinct tokens as possible.

    `longer` is added to the length of each prompt. `share` scales all lengths.
    """
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
    """Return logprobs_M of a model set to eager attention, one row at a time.

    Nothing is packed, padded, cut or fused.
    """
    num_predicted_B = batch.is_token_BT.sum(dim=1).tolist()
    found = []
    for path, targets in zip(batch.paths_B, batch.targets_M.split(num_predicted_B), strict=True):
        ids_1S = batch.token_ids_N[np.concatenate([segment.rows for segment in path])][None]
        logits_1SV = model(input_ids=ids_1S, attention_mask=torch.ones_like(ids_1S), use_cache=False).logits
        logprobs_TV = logits_1SV[0, -len(targets) :].float().log_softmax(-1)
        found.append(logprobs_TV.gather(1, targets[:, None])[:, 0])
    return torch.cat(found)


def find_leak(model: Any, batch: Pack) -> str | None:
    """Return what watched logprobs depend on besides earlier tokens, or None.

    Their gradient w.r.t. the embedding of any other token must be exactly 0. Rounding can neither hide nor
    imitate a leak.
    """
    taken: list[torch.Tensor] = []

    def take(_module: object, _inputs: object, embedded: torch.Tensor) -> torch.Tensor:
        taken.append(embedded.detach().requires_grad_())
        return taken[-1].clone()  # some models change embeddings in place

    hook = model.get_input_embeddings().register_forward_hook(take)
    try:
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(_watched(model, batch).sum(), taken[-1])
    finally:
        hook.remove()
    others, later, num_tokens = _forbidden(batch, model)
    if len(grad.flatten(0, -2)) != num_tokens:
        return "it embeds tokens other than those of its rows"
    if not grad.isfinite().all():
        return "the gradient of its logprobs is NaN or inf"
    moved = grad.flatten(0, -2).ne(0).any(dim=-1)
    if moved[others].any():
        return OTHERS
    return LATER if moved[later].any() else None


@torch.no_grad()
def find_influence(model: Any, batch: Pack, tolerance: float) -> str | None:
    """Return which exchanged tokens change the watched logprobs, or None.

    A mean change above `tolerance` counts. Gradients show neither choices (experts, keys) nor detached
    values. All shapes stay the same, and rounding with them.
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
    """Return error and rounding of the group with the largest excess, or None.

    The error is the median difference from `right_M`, since routers may choose other experts for single
    tokens. Each group counts separately, so none hides behind the others.
    """
    found_G = _medians(found_M - right_M, batch)
    rounding_G = _medians(rounded_M - right_M, batch).clamp_min((rounded_M - right_M).abs().median())
    excess_G = (found_G - TIMES_ROUNDING * rounding_G - FLOOR).nan_to_num(torch.inf)
    worst = int(excess_G.argmax())
    return None if excess_G[worst] <= 0 else (float(found_G[worst]), float(rounding_G[worst]))


def _medians(difference_M: torch.Tensor, batch: Pack) -> torch.Tensor:
    """Return the median of each group.

    Groups are used because a completion of one token has no useful median.
    """
    num_tokens: Counter[Segment] = Counter()
    for path, count in zip(batch.paths_B, batch.is_token_BT.sum(dim=1).tolist(), strict=True):
        num_tokens[path[0]] += count
    return torch.stack([of_group.median() for of_group in difference_M.abs().split(list(num_tokens.values()))])


def _forbidden(batch: Pack, model: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the embedded tokens that must not influence the watched logprobs.

    They are the tokens of other sequences, and the tokens of the watched sequence from the last watched one
    on. The third value is the number of all embedded tokens.
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
    """Return how many tokens of their sequence the watched ones may depend on."""
    return sum(segment.length for segment in batch.paths_B[WATCHED][:-1]) + _num_watched(batch) - 1


def _num_watched(batch: Pack) -> int:
    """Return how many tokens of the watched completion are watched."""
    return int(batch.is_token_BT[WATCHED].sum()) // 2
