"""A policy whose pieces torch.compile has fused, against itself before: losses, gradients; and what becomes of one that cannot."""

import logging
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache

from learner.config.policy import LoraConfig
from learner.forward import fused, interface
from learner.forward.fused import ROTARY, fuse
from learner.forward.interface import compiled_layers, layers_of
from learner.forward.logprobs import token_logprobs
from learner.forward.pack import pack
from learner.forward.settle import probe, settle_attention
from learner.forward.varlen_attention import KeyLayout, key_layout
from learner.policy.lora import add_adapter
from tests.learner.forward.test_families import CPU, TEMPERATURE, gradients, loss_of, make_groups, tiny

pytestmark = [
    pytest.mark.timeout(900),  # a C++ compiler on a busy machine
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf"
    ),  # torch's own, while it traces
]


@pytest.fixture
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A model whose family gets its rotary embedding back after the test."""

    def make(name: str, keys: dict[str, Any] | None = None) -> Any:
        model = tiny(name, keys or {})
        home = sys.modules[type(model).__module__]
        monkeypatch.setattr(home, ROTARY, getattr(home, ROTARY))
        settle_attention(model, CPU, torch.float32)
        return model

    return make


def loss_and_gradients(model: Any) -> tuple[float, dict[str, torch.Tensor]]:
    batch = pack(make_groups(), CPU)
    logprobs_BT, entropy_BT = token_logprobs(model, batch, TEMPERATURE, entropy="gradient")
    assert entropy_BT is not None
    loss = loss_of(logprobs_BT[batch.is_token_BT], entropy_BT[batch.is_token_BT])
    return float(loss.detach()), gradients(model, loss)


def compiled_pieces(model: Any) -> list[str]:
    return [name for name, module in model.named_modules() if module._compiled_call_impl is not None]


def assert_same(found_loss: float, found: dict[str, torch.Tensor], loss: float, right: dict[str, torch.Tensor]) -> None:
    assert abs(found_loss - loss) <= 1e-6 * abs(loss)
    norm = sum(float(gradient.square().sum()) for gradient in right.values()) ** 0.5
    assert sum(float((found[n] - right[n]).square().sum()) for n in right) ** 0.5 <= 1e-5 * norm


@pytest.mark.parametrize(("name", "with_adapter"), [("Qwen3Config", False), ("LlamaConfig", True)])
def test_a_fused_policy_has_the_loss_and_the_gradients_that_it_had_before(
    tiny_model: Callable[[str], Any], name: str, with_adapter: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model(name)
    if with_adapter:
        add_adapter(model, LoraConfig(rank=2, target_modules=("q_proj", "gate_proj", "down_proj")), seed=0)
    loss, right = loss_and_gradients(model)
    plain = getattr(sys.modules[type(model).__module__], ROTARY)
    with caplog.at_level(logging.INFO):
        fuse(model, torch.float32)
    assert "compiled in" in caplog.text
    found_loss, found = loss_and_gradients(model)
    assert_same(found_loss, found, loss, right)
    assert {one.rsplit(".", 1)[-1] for one in compiled_pieces(model)} >= {"mlp", "input_layernorm", "norm"}
    assert getattr(sys.modules[type(model).__module__], ROTARY) is not plain


def segments(q_NHD, k_LKD, v_LKD, first_queries: torch.Tensor, first_keys: torch.Tensor, scale: float) -> Iterator[Any]:
    """Of each: its rows of queries and of keys, its queries, keys and values by head, and their weights_HQC."""
    groups = q_NHD.shape[1] // k_LKD.shape[1]
    for (q0, q1), (k0, k1) in zip(pairwise(first_queries.tolist()), pairwise(first_keys.tolist()), strict=True):
        q_HQD = q_NHD[q0:q1].transpose(0, 1)
        k_HCD, v_HCD = (x[k0:k1].transpose(0, 1).repeat_interleave(groups, dim=0) for x in (k_LKD, v_LKD))
        is_seen_QC = torch.ones(q1 - q0, k1 - k0, dtype=torch.bool).tril(k1 - k0 - (q1 - q0))
        scores_HQC = (scale * q_HQD @ k_HCD.mT).masked_fill(~is_seen_QC, -torch.inf)
        yield slice(q0, q1), slice(k0, k1), q_HQD, k_HCD, v_HCD, scores_HQC.softmax(-1)


@torch.library.custom_op("slipstream_tests::kernel", mutates_args=())
def kernel(
    q_NHD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, first_queries: torch.Tensor, first_keys: torch.Tensor,
    max_queries: int, max_keys: int, scale: float,
) -> torch.Tensor:  # fmt: skip
    """What torch's variable-length kernel does on a GPU, segment after segment."""
    found = segments(q_NHD, k_LKD, v_LKD, first_queries, first_keys, scale)
    return torch.cat([(weights_HQC @ v_HCD).transpose(0, 1) for *_, v_HCD, weights_HQC in found])


@kernel.register_fake
def _(q_NHD, *_: Any) -> torch.Tensor:
    return torch.empty_like(q_NHD)


@torch.library.custom_op("slipstream_tests::kernel_backward", mutates_args=())
def kernel_backward(
    grad_NHD: torch.Tensor, q_NHD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, first_queries: torch.Tensor,
    first_keys: torch.Tensor, scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    dq_NHD, dk_LKD, dv_LKD = (torch.zeros_like(x) for x in (q_NHD, k_LKD, v_LKD))

    def by_key_head(d_HCD: torch.Tensor) -> torch.Tensor:
        return d_HCD.unflatten(0, (k_LKD.shape[1], -1)).sum(1).transpose(0, 1)

    for rows, keys, q_HQD, k_HCD, v_HCD, weights_HQC in segments(q_NHD, k_LKD, v_LKD, first_queries, first_keys, scale):
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
    ctx.scale = inputs[7]


def _backward(ctx: Any, grad_NHD: torch.Tensor) -> tuple[Any, ...]:
    return *kernel_backward(grad_NHD, *ctx.saved_tensors, ctx.scale), None, None, None, None, None


kernel.register_autograd(_backward, setup_context=_keep)


def on_kernel(q_NHD, k_NKD, v_NKD, layout: KeyLayout, window: int | None, scale: float) -> torch.Tensor:
    assert window is None
    k_LKD, v_LKD = (x.index_select(0, layout.rows_L) for x in (k_NKD, v_NKD))
    starts = (layout.first_queries, layout.first_keys, layout.max_queries, layout.max_keys)
    return kernel(q_NHD, k_LKD, v_LKD, *starts, scale)


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way of a GPU, its kernel spelt out: whole layers, and keys laid out for them."""
    monkeypatch.setattr(interface, "_keys_of", key_layout)
    monkeypatch.setattr(interface, "varlen_attention", on_kernel)
    monkeypatch.setattr(fused, "_whole_layers", lambda model: layers_of(model)[:-1])


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
        token_logprobs(model, probe(model.config.vocab_size, CPU, longer=longer), TEMPERATURE)[0].sum().backward()
    assert counters["stats"]["unique_graphs"] == num_graphs


def test_where_torch_cannot_compile_a_layer_whole_it_compiles_its_pieces(
    tiny_model: Callable[..., Any], like_a_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaking(*args: Any) -> torch.Tensor:
        torch._dynamo.graph_break()
        return on_kernel(*args)

    monkeypatch.setattr(interface, "varlen_attention", breaking)
    model = tiny_model("Qwen2Config")
    loss, right = loss_and_gradients(model)
    with caplog.at_level(logging.INFO):
        fuse(model, torch.float32)
    assert "its layers cannot be compiled whole" in caplog.text and "compiled in" in caplog.text
    assert not any(layer in compiled_layers for layer in layers_of(model))
    assert {one.rsplit(".", 1)[-1] for one in compiled_pieces(model)} >= {"mlp", "input_layernorm", "norm"}
    assert_same(*loss_and_gradients(model), loss, right)


def assert_goes_on_without(model: Any, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    loss, _ = loss_and_gradients(model)
    plain = getattr(sys.modules[type(model).__module__], ROTARY)
    with caplog.at_level(logging.WARNING):
        fuse(model, torch.float32)
    assert f"learner.compile: {type(model).__name__} cannot" in caplog.text and reason in caplog.text
    assert compiled_pieces(model) == [] and getattr(sys.modules[type(model).__module__], ROTARY) is plain
    assert loss_and_gradients(model)[0] == loss


def test_where_there_is_no_compiler_a_policy_goes_on_without(
    tiny_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(inductor.cpp, "cxx", ("no-such-compiler",))
    torch._dynamo.reset()
    with fresh_cache():
        assert_goes_on_without(tiny_model("Qwen2Config"), caplog, "compiler")


def test_a_policy_that_would_have_other_numbers_fused_goes_on_without(
    tiny_model: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_wrongly(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: tuple(2 * one for one in function(*args, **kwargs))

    model = tiny_model("Qwen2Config")
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    monkeypatch.setattr(torch, "compile", compile_wrongly)
    assert_goes_on_without(model, caplog, "its logprobs differ by")
