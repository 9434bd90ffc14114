"""The way of a pack on GPUs: who has which keys, here; the kernel, on a GPU, against the parts on the CPU."""

import pytest
import torch

from learner.forward.attention import key_layout, varlen_attention
from learner.forward.pack import Pack
from learner.forward.packing_check import choose_attention
from learner.forward.tree_attention import Tree, TreeAttention, plan_of
from tests.learner.forward.test_families import tiny
from tests.learner.forward.test_tree_attention import HEADS, KEY_HEADS, a_pack, a_trie, visible

NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")


@pytest.mark.parametrize("make", [a_pack, a_trie])
@pytest.mark.parametrize("window", [None, 5, 100])
def test_causal_from_the_end_every_segment_sees_what_its_tokens_see(make, window: int | None) -> None:
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
def test_the_kernel_gives_the_numbers_of_the_parts_forward_and_backward(make, window: int | None) -> None:
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
def test_a_model_goes_packed_on_a_gpu() -> None:
    model = tiny("Qwen2Config", {})
    choose_attention(model, torch.device("cuda"), torch.bfloat16)
    assert model.config._attn_implementation == "slipstream_pack"


def _on(batch: Pack, device: torch.device) -> Pack:
    tensors = {
        name: getattr(batch, name).to(device) for name in ("token_ids_N", "positions_N", "predicting_M", "targets_M")
    }
    return Pack(**tensors, is_token_BT=batch.is_token_BT.to(device), segments=batch.segments, paths_B=batch.paths_B)
