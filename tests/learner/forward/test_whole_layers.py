"""Layers compiled whole, as on a GPU, its kernel spelt out for a CPU: losses and gradients, and how often torch compiles."""

import logging
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from learner.forward import attention, compile
from learner.forward.attention import KeyLayout, compiled_layers, is_packed, key_layout, layers_of
from learner.forward.compile import ROTARY, fuse
from learner.forward.logprobs import token_logprobs
from learner.forward.packing_check import choose_attention
from learner.forward.probe import probe_of
from learner.policy.model import load_policy
from tests.learner.forward.test_families import CPU, TEMPERATURE, tiny
from tests.learner.forward.test_fused import assert_same, compiled_pieces, loss_and_gradients
from tests.zoo.families import FAMILIES, save_model

pytestmark = [
    pytest.mark.timeout(900),  # a C++ compiler on a busy machine
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf"
    ),  # torch's own, while it traces
]


SOON = {"gemma3"}
"""Families that every commit tries; the others take four minutes more."""


def segments(
    q_NHD, k_LKD, v_LKD, first_queries: torch.Tensor, first_keys: torch.Tensor, window: int, scale: float
) -> Iterator[Any]:
    """Of each: its rows of queries and of keys, its queries, keys and values by head, and their weights_HQC."""
    groups = q_NHD.shape[1] // k_LKD.shape[1]
    for (q0, q1), (k0, k1) in zip(pairwise(first_queries.tolist()), pairwise(first_keys.tolist()), strict=True):
        q_HQD = q_NHD[q0:q1].transpose(0, 1)
        k_HCD, v_HCD = (x[k0:k1].transpose(0, 1).repeat_interleave(groups, dim=0) for x in (k_LKD, v_LKD))
        behind_QC = torch.arange(k1 - k0 - (q1 - q0), k1 - k0)[:, None] - torch.arange(k1 - k0)
        is_seen_QC = (behind_QC >= 0) & (behind_QC < window)
        scores_HQC = (scale * q_HQD @ k_HCD.mT).masked_fill(~is_seen_QC, -torch.inf)
        yield slice(q0, q1), slice(k0, k1), q_HQD, k_HCD, v_HCD, scores_HQC.softmax(-1)


def attend(
    q_NHD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, first_queries: torch.Tensor, first_keys: torch.Tensor,
    max_queries: int, max_keys: int, window: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    """What torch's variable-length kernel does on a GPU, segment after segment."""
    found = segments(q_NHD, k_LKD, v_LKD, first_queries, first_keys, window, scale)
    return torch.cat([(weights_HQC @ v_HCD).transpose(0, 1) for *_, v_HCD, weights_HQC in found])


kernel = torch.library.custom_op("slipstream_tests::kernel", attend, mutates_args=())


@kernel.register_fake
def _(q_NHD, *_: Any) -> torch.Tensor:
    return torch.empty_like(q_NHD)


@torch.library.custom_op("slipstream_tests::kernel_backward", mutates_args=())
def kernel_backward(
    grad_NHD: torch.Tensor, q_NHD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, first_queries: torch.Tensor,
    first_keys: torch.Tensor, window: int, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    dq_NHD, dk_LKD, dv_LKD = (torch.zeros_like(x) for x in (q_NHD, k_LKD, v_LKD))

    def by_key_head(d_HCD: torch.Tensor) -> torch.Tensor:
        return d_HCD.unflatten(0, (k_LKD.shape[1], -1)).sum(1).transpose(0, 1)

    for rows, keys, q_HQD, k_HCD, v_HCD, weights_HQC in segments(
        q_NHD, k_LKD, v_LKD, first_queries, first_keys, window, scale
    ):
        grad_HQD = grad_NHD[rows].transpose(0, 1)
        by_weight_HQC = grad_HQD @ v_HCD.mT
        by_score_HQC = weights_HQC * (by_weight_HQC - (by_weight_HQC * weights_HQC).sum(-1, keepdim=True))
        dq_NHD[rows] = scale * (by_score_HQC @ k_HCD).transpose(0, 1)
        dk_LKD[keys] = by_key_head(scale * by_score_HQC.mT @ q_HQD)
        dv_LKD[keys] = by_key_head(weights_HQC.mT @ grad_HQD)
    return dq_NHD, dk_LKD, dv_LKD


@kernel_backward.register_fake
def _(grad_NHD, *inputs: Any) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(x) for x in inputs[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])
    ctx.window_and_scale = inputs[7:]


def _backward(ctx: Any, grad_NHD: torch.Tensor) -> tuple[Any, ...]:
    return *kernel_backward(grad_NHD, *ctx.saved_tensors, *ctx.window_and_scale), None, None, None, None, None, None


kernel.register_autograd(_backward, setup_context=_keep)


def on_kernel(
    q_NHD,
    k_NKD,
    v_NKD,
    layout: KeyLayout,
    window: int | None,
    scale: float,
    kernel: Callable[..., torch.Tensor] = kernel,
) -> torch.Tensor:
    k_LKD, v_LKD = (x.index_select(0, layout.rows_L) for x in (k_NKD, v_NKD))
    starts = (layout.first_queries, layout.first_keys, layout.max_queries, layout.max_keys)
    return kernel(q_NHD, k_LKD, v_LKD, *starts, window or 1 << 40, scale)


@pytest.fixture
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    def make(name: str, keys: dict[str, Any]) -> Any:
        model = tiny(name, keys)
        keep_rotary(model, monkeypatch)
        choose_attention(model, CPU, torch.float32)
        return model

    return make


def keep_rotary(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its family gets its rotary embedding back after the test."""
    home = sys.modules[type(model).__module__]
    if hasattr(home, ROTARY):
        monkeypatch.setattr(home, ROTARY, getattr(home, ROTARY))


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU, its kernel spelt out: whole layers, and keys laid out for them."""
    monkeypatch.setattr(attention, "_keys_of", key_layout)
    monkeypatch.setattr(attention, "varlen_attention", on_kernel)
    monkeypatch.setattr(compile, "_whole_layers", lambda model: layers_of(model)[:-1] if is_packed(model) else [])


def test_whole_layers_have_the_loss_and_the_gradients_of_the_pass_without_and_are_compiled_once_for_any_length(
    tiny_model: Callable[..., Any], like_a_gpu: None
) -> None:
    model = tiny_model("Qwen2Config", {"num_hidden_layers": 4})
    loss, right = loss_and_gradients(model)
    fuse(model, torch.float32)
    assert [layer in compiled_layers for layer in layers_of(model)] == [True, True, True, False]
    loss_and_gradients(model)
    num_graphs = counters["stats"]["unique_graphs"]
    found_loss, found = loss_and_gradients(model)
    assert_same(found_loss, found, loss, right)
    for longer in (1, 7, 20):
        token_logprobs(model, probe_of(model, longer=longer), TEMPERATURE)[0].sum().backward()
    assert counters["stats"]["unique_graphs"] == num_graphs


@pytest.mark.slow
def test_where_torch_cannot_compile_a_layer_whole_it_compiles_its_pieces(
    tiny_model: Callable[..., Any], like_a_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaking(*args: Any) -> torch.Tensor:
        torch._dynamo.graph_break()
        return on_kernel(*args)

    monkeypatch.setattr(attention, "varlen_attention", breaking)
    model = tiny_model("Qwen2Config", {})
    loss, right = loss_and_gradients(model)
    with caplog.at_level(logging.INFO):
        fuse(model, torch.float32)
    assert "cannot compile whole layers" in caplog.text and "compiled the policy in" in caplog.text
    assert not any(layer in compiled_layers for layer in layers_of(model))
    assert {one.rsplit(".", 1)[-1] for one in compiled_pieces(model)} >= {"mlp", "input_layernorm", "norm"}
    assert_same(*loss_and_gradients(model), loss, right)


@pytest.mark.parametrize(
    "family", [pytest.param(family, marks=[] if family in SOON else pytest.mark.slow) for family in FAMILIES]
)
def test_a_family_has_the_same_numbers_with_whole_layers_or_goes_on_without_them(
    tmp_path: Path, family: str, like_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traced as always, but not compiled, which would take a minute each."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(traced_only, torch.compile))
    save_model(family, tmp_path)
    policy: Any = load_policy(tmp_path, gradient_checkpointing=False)
    keep_rotary(policy, monkeypatch)
    choose_attention(policy, CPU, torch.float32)
    loss, right = loss_and_gradients(policy)
    fuse(policy, torch.float32)
    assert_same(*loss_and_gradients(policy), loss, right)
    is_whole = all(layer in compiled_layers for layer in layers_of(policy)[:-1])
    assert is_whole == is_packed(policy)


def traced_only(compile: Callable[..., Any], function: Any, *, options: dict[str, Any], **how: Any) -> Any:
    return compile(function, backend="aot_eager", **how)
