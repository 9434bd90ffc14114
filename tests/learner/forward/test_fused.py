"""A policy that torch.compile has fused, in pieces or whole layers, against itself before; and what becomes of one
that cannot."""

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache

from learner.config.policy import LoraConfig
from learner.forward import attention
from learner.forward.attention import compiled_layers, is_packed, layers_of
from learner.forward.compile import ROTARY, fuse
from learner.forward.logprobs import token_logprobs
from learner.forward.pack import pack
from learner.forward.packing_check import choose_attention
from learner.forward.probe import probe_of
from learner.policy.lora import add_adapter
from learner.policy.model import compute_in
from tests.learner.forward.plain_pass import (
    CPU,
    MIXED,
    TEMPERATURE,
    Gradients,
    assert_same,
    make_groups,
    pass_over,
    tiny,
)
from tests.learner.forward.spelt_kernel import like_a_gpu, on_kernel, trace_only

pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(900),  # a C++ compiler on a busy machine
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf"
    ),  # torch's own, while it traces
]


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Let a model choose its attention; its family gets its rotary embedding back after the test."""

    def settle(model: Any) -> Any:
        home = sys.modules[type(model).__module__]
        if hasattr(home, ROTARY):
            monkeypatch.setattr(home, ROTARY, getattr(home, ROTARY))
        choose_attention(model, CPU, torch.float32)
        return model

    return settle


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    like_a_gpu(monkeypatch)


def rotary_of(model: Any) -> Any:
    return getattr(sys.modules[type(model).__module__], ROTARY)


def loss_and_gradients(model: Any) -> tuple[float, Gradients]:
    _, _, loss, gradients = pass_over(model, pack(make_groups(), CPU))
    return loss, gradients


def compiled_pieces(model: Any) -> set[str]:
    """By the last part of their names."""
    compiled = [name for name, module in model.named_modules() if module._compiled_call_impl is not None]
    return {name.rsplit(".", 1)[-1] for name in compiled}


PIECES = {"mlp", "input_layernorm", "norm"}


def test_a_fused_policy_has_the_loss_and_the_gradients_that_it_had_before(
    settled: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    model = settled(tiny("LlamaConfig"))
    add_adapter(model, LoraConfig(rank=2, target_modules=("q_proj", "gate_proj", "down_proj")), seed=0)
    right, plain = loss_and_gradients(model), rotary_of(model)
    with caplog.at_level(logging.INFO):
        fuse(model, torch.float32)
    assert "compiled the policy in" in caplog.text
    assert_same(*loss_and_gradients(model), *right)
    assert compiled_pieces(model) >= PIECES and rotary_of(model) is not plain


def assert_goes_on_without(
    model: Any, caplog: pytest.LogCaptureFixture, reason: str, dtype: torch.dtype = torch.float32
) -> None:
    loss, plain = loss_and_gradients(model)[0], rotary_of(model)
    with caplog.at_level(logging.WARNING):
        fuse(model, dtype)
    assert f"learner.compile: cannot compile {type(model).__name__}" in caplog.text and reason in caplog.text
    assert not compiled_pieces(model) and rotary_of(model) is plain
    assert loss_and_gradients(model)[0] == loss


def test_where_there_is_no_compiler_a_policy_goes_on_without(
    settled: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}), fresh_cache():
        assert_goes_on_without(settled(tiny("Qwen2Config")), caplog, "compiler")


def doubled(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: tuple(2 * one for one in function(*args, **kwargs))


def leaking(rotary: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    def rotate(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = rotary(*args, **kwargs)
        return query, key + 0.01 * torch.nn.functional.pad(key, (0, 0, 3, 0))[..., :-3, :]

    return rotate


@pytest.mark.parametrize(
    ("compiled", "dtype", "reason"),
    [
        (doubled, torch.float32, "its logprobs differ by"),
        # far below the rounding of bfloat16
        (leaking, torch.bfloat16, "its logprobs depend on other sequences of the pass"),
    ],
    ids=["other numbers", "a leak"],
)
def test_a_policy_that_fusing_would_change_goes_on_without(
    settled: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    compiled: Callable[..., Any], dtype: torch.dtype, reason: str,
) -> None:  # fmt: skip
    model = settled(tiny("Qwen2Config"))
    compute_in(dtype, model)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    monkeypatch.setattr(torch, "compile", compiled)
    assert_goes_on_without(model, caplog, reason, dtype)


def test_whole_layers_have_the_loss_and_the_gradients_of_the_pass_without_and_are_compiled_once_for_any_length(
    settled: Callable[[Any], Any], as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace_only(monkeypatch)
    windows = {"use_sliding_window": True, "sliding_window": 8, "layer_types": MIXED["layer_types"] * 2}
    model = settled(tiny("Qwen2Config", windows | {"num_hidden_layers": 4}))
    assert is_packed(model)
    right = loss_and_gradients(model)
    fuse(model, torch.float32)
    assert [layer in compiled_layers for layer in layers_of(model)] == [True, True, True, False]
    loss_and_gradients(model)
    num_graphs = counters["stats"]["unique_graphs"]
    assert_same(*loss_and_gradients(model), *right)
    for longer in (1, 7, 20):
        token_logprobs(model, probe_of(model, longer=longer), TEMPERATURE)[0].sum().backward()
    assert counters["stats"]["unique_graphs"] == num_graphs


def test_where_torch_cannot_compile_a_layer_whole_it_compiles_its_pieces(
    settled: Callable[[Any], Any], as_on_a_gpu: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaking(*args: Any) -> torch.Tensor:
        torch._dynamo.graph_break()
        return on_kernel(*args)

    monkeypatch.setattr(attention, "varlen_attention", breaking)
    trace_only(monkeypatch)
    model = settled(tiny("Qwen2Config"))
    right = loss_and_gradients(model)
    with caplog.at_level(logging.INFO):
        fuse(model, torch.float32)
    assert "cannot compile whole layers" in caplog.text and "compiled the policy in" in caplog.text
    assert not any(layer in compiled_layers for layer in layers_of(model))
    assert compiled_pieces(model) >= PIECES
    assert_same(*loss_and_gradients(model), *right)
