"""Attention over the parts of a pack, compared with one dense mask, in float64, forward and backward."""

import math

import numpy as np
import pytest
import torch

from learner.forward.attention import key_layout, varlen_attention
from learner.forward.pack import Pack, Segment, pack
from learner.forward.packing_check import choose_attention
from learner.forward.tree_attention import CHUNK_ROWS, Tree, TreeAttention, plan_of
from tests.learner.forward.plain_pass import tiny

HEADS, KEY_HEADS, DIM = 4, 2, 8


def a_pack() -> Pack:
    """Return prompts of equal and different lengths, with completions of zero to hundreds of tokens."""
    rng = np.random.default_rng(0)
    shapes = [(5, (1, 7, 3)), (1, (4, 4)), (13, (30, 2, 12, 12, 300)), (350, (1, 9, 18, 19)), (13, (6,)), (8, (1, 1))]
    shapes += [(40, tuple(rng.integers(1, 40, 12).tolist()))] * 3
    return pack([(np.zeros(p, int), [np.zeros(c, int) for c in cs]) for p, cs in shapes], torch.device("cpu"))


def a_trie() -> Pack:
    """Return nested branches, like turns of an episode."""
    root, left, right = Segment(0, 6, 0, 29), Segment(6, 3, 6, 20), Segment(20, 9, 6, 29)
    twigs = (Segment(9, 5, 9, 14), Segment(14, 6, 9, 20))
    segments = (root, left, *twigs, right)
    positions_N = torch.cat([segment.position + torch.arange(segment.length) for segment in segments])
    predicting_M = torch.tensor([8, *range(9, 14), 8, *range(14, 20), 5, *range(20, 29)])
    none = torch.zeros(0, dtype=torch.long)
    return Pack(
        token_ids_N=positions_N, positions_N=positions_N, predicting_M=predicting_M, targets_M=none, is_token_BT=none,
        segments=segments, paths_B=((root, left, twigs[0]), (root, left, twigs[1]), (root, right)),
    )  # fmt: skip


def visible(batch: Pack, window: int | None) -> torch.Tensor:
    """Return is_visible_NN: each token sees its own path before it, within the window."""
    is_visible_NN = torch.zeros(batch.num_tokens, batch.num_tokens, dtype=torch.bool)
    for path in batch.paths_B:
        rows = torch.cat([torch.from_numpy(segment.rows) for segment in path])
        distance_SS = torch.arange(len(rows))[:, None] - torch.arange(len(rows))
        is_seen_SS = (distance_SS >= 0) & (distance_SS < (window or 1 << 40))
        is_visible_NN[rows[:, None], rows] |= is_seen_SS
    return is_visible_NN


def dense(q_NHD, k_NKD, v_NKD, sinks_H, is_visible_NN, scale):
    k_NHD, v_NHD = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (k_NKD, v_NKD))
    scores_HNN = torch.einsum("qhd,khd->hqk", q_NHD, k_NHD) * scale
    scores_HNN = scores_HNN.masked_fill(~is_visible_NN, -math.inf)
    if sinks_H is not None:
        scores_HNN = torch.cat([scores_HNN, sinks_H[:, None, None].expand(-1, len(q_NHD), 1)], 2)
    return torch.einsum("hqk,khd->qhd", scores_HNN.softmax(2)[..., : len(k_NHD)], v_NHD)


@pytest.mark.parametrize("make", [a_pack, a_trie])
@pytest.mark.parametrize(("window", "has_sinks"), [(None, True), (1, False), (5, True), (100, False), (400, True)])
@pytest.mark.parametrize("predicting_only", [False, True])
def test_attention_is_the_softmax_over_the_visible_tokens_of_a_sequence(
    make, window: int | None, has_sinks: bool, predicting_only: bool
) -> None:
    batch = make()
    read = batch.read_R if predicting_only else slice(None)
    torch.manual_seed(0)
    leaves = [torch.randn(batch.num_tokens, heads, DIM, dtype=torch.float64) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    leaves = [leaf.requires_grad_() for leaf in (*leaves, torch.randn(HEADS, dtype=torch.float64))]
    sinks_H = leaves[3] if has_sinks else None
    grad_NHD = torch.zeros(batch.num_tokens, HEADS, DIM, dtype=torch.float64)
    grad_NHD[read] = torch.randn_like(grad_NHD[read])
    plan = plan_of(batch, window, predicting_only=predicting_only)
    found_NHD = TreeAttention.apply(*leaves[:3], sinks_H, Tree(plan, 0.3))
    right_NHD = dense(*leaves[:3], sinks_H, visible(batch, window), 0.3)
    torch.testing.assert_close(found_NHD[read], right_NHD[read], atol=1e-12, rtol=0)
    used = leaves if has_sinks else leaves[:3]
    for found, right in zip(
        torch.autograd.grad(found_NHD, used, grad_NHD), torch.autograd.grad(right_NHD, used, grad_NHD), strict=True
    ):
        torch.testing.assert_close(found, right, atol=1e-11, rtol=0)


def test_masks_are_built_only_for_windows_shorter_than_a_sequence() -> None:
    assert all(part.band is None for window in (None, 400) for part in plan_of(a_pack(), window).parts)
    assert any(part.band is not None for part in plan_of(a_pack(), 100).parts)


def test_gathered_tokens_are_bounded_and_long_sequences_are_not_gathered() -> None:
    long = pack([(np.zeros(1, int), [np.zeros(40_000, int)])], torch.device("cpu"))
    many = pack([(np.zeros(40, int), [np.zeros(c, int) for c in range(1, 300)])], torch.device("cpu"))
    for batch, window in ((long, 100), (many, None)):
        chunks = plan_of(batch, window).chunks
        assert len(chunks) > 1
        shared = [chunk for chunk in chunks if len(chunk.parts) > 1]
        assert all(len(chunk.queries.at_R) + len(chunk.keys.at_R) <= CHUNK_ROWS for chunk in shared)
    x_NHD = torch.zeros(long.num_tokens, 1, 1)
    (chunk,) = plan_of(long, None).chunks
    assert all(rows.of(x_NHD)[0].data_ptr() == x_NHD.data_ptr() for rows in (chunk.queries, chunk.keys))


def computed_pairs(batch: Pack, *, predicting_only: bool = False) -> int:
    """Return the kernel's computed pairs, which include the masked part of a short square."""
    parts = plan_of(batch, None, predicting_only=predicting_only).parts
    return sum(part.queries_nQ.size * part.keys_nK.shape[1] for part in parts)


def test_few_invisible_pairs_are_computed() -> None:
    square = pack([(np.zeros(1, int), [np.zeros(512, int)])], torch.device("cpu"))
    assert 0.5 < computed_pairs(square) / square.num_tokens**2 < 0.64, "the kernel must skip masked blocks"
    # Only its last row and its completions predict and see a long prompt.
    batch = pack([(np.zeros(256, int), [np.zeros(9, int)] * 8)], torch.device("cpu"))
    assert computed_pairs(batch, predicting_only=True) == 256 + 8 * 8 * 256 + 8 * 8 * 8


# The path of a pack on GPUs: the key ranges here; the kernel, on a GPU, compared with the parts on the CPU.

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")


@pytest.mark.parametrize("make", [a_pack, a_trie])
@pytest.mark.parametrize("window", [None, 5, 100])
def test_every_segment_is_causal_from_its_end(make, window: int | None) -> None:
    batch: Pack = make()
    layout = key_layout(batch)
    is_seen_NN = torch.zeros(batch.num_tokens, batch.num_tokens, dtype=torch.long)
    queries, keys = layout.first_queries.tolist(), layout.first_keys.tolist()
    for first, end, first_key, end_key in zip(queries, queries[1:], keys, keys[1:], strict=False):
        rows_K = layout.rows_L[first_key:end_key]
        behind_QK = (end - 1 - torch.arange(first, end))[:, None] - (len(rows_K) - 1 - torch.arange(len(rows_K)))
        is_seen_NN[first:end, rows_K] += (behind_QK <= 0) & (behind_QK > -(window or 1 << 40))
        assert end - first <= layout.max_queries and len(rows_K) <= layout.max_keys
    assert queries[-1] == batch.num_tokens and torch.equal(is_seen_NN, visible(batch, window).long())


@pytest.mark.gpu
@NEEDS_GPU
@pytest.mark.parametrize("make", [a_pack, a_trie])
@pytest.mark.parametrize("window", [None, 5, 100])
def test_the_kernel_equals_the_parts_forward_and_backward(make, window: int | None) -> None:
    here, there = make(), make()
    there = _on(there, torch.device("cuda"))
    torch.manual_seed(0)
    inputs = [torch.randn(here.num_tokens, heads, 64).bfloat16() for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    leaves = [x.float().requires_grad_() for x in inputs]
    copies = [x.cuda().requires_grad_() for x in inputs]
    grad = torch.randn(here.num_tokens, HEADS, 64)
    right = TreeAttention.apply(*leaves, None, Tree(plan_of(here, window), 0.125))
    found = varlen_attention(copies[0], copies[1], copies[2], key_layout(there), window, 0.125)
    pairs = [(found.detach(), right.detach())]
    gradients = torch.autograd.grad(found, copies, grad.cuda().bfloat16())
    pairs += zip(gradients, torch.autograd.grad(right, leaves, grad), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine.float().cpu(), theirs, atol=0.03 * float(theirs.abs().max()), rtol=0)


@pytest.mark.gpu
@NEEDS_GPU
def test_a_model_is_packed_on_a_gpu() -> None:
    model = tiny("Qwen2Config")
    choose_attention(model, torch.device("cuda"), torch.bfloat16)
    assert model.config._attn_implementation == "slipstream_pack"


def _on(batch: Pack, device: torch.device) -> Pack:
    tensors = {
        name: getattr(batch, name).to(device) for name in ("token_ids_N", "positions_N", "predicting_M", "targets_M")
    }
    return Pack(**tensors, is_token_BT=batch.is_token_BT.to(device), segments=batch.segments, paths_B=batch.paths_B)
