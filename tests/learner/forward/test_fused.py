"""A policy whose pieces torch.compile has fused, against itself before: losses, gradients; and what becomes of one that cannot."""

import logging
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch._inductor import config as inductor
from torch._inductor.utils import fresh_cache

from learner.config.policy import LoraConfig
from learner.forward.compile import ROTARY, fuse
from learner.forward.logprobs import token_logprobs
from learner.forward.pack import pack
from learner.forward.packing_check import choose_attention
from learner.policy.lora import add_adapter
from learner.policy.model import compute_in
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
        choose_attention(model, CPU, torch.float32)
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


@pytest.mark.parametrize(
    ("name", "with_adapter"), [pytest.param("Qwen3Config", False, marks=pytest.mark.slow), ("LlamaConfig", True)]
)
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
    assert "compiled the policy in" in caplog.text
    found_loss, found = loss_and_gradients(model)
    assert_same(found_loss, found, loss, right)
    assert {one.rsplit(".", 1)[-1] for one in compiled_pieces(model)} >= {"mlp", "input_layernorm", "norm"}
    assert getattr(sys.modules[type(model).__module__], ROTARY) is not plain


def assert_goes_on_without(
    model: Any, caplog: pytest.LogCaptureFixture, reason: str, dtype: torch.dtype = torch.float32
) -> None:
    loss, _ = loss_and_gradients(model)
    plain = getattr(sys.modules[type(model).__module__], ROTARY)
    with caplog.at_level(logging.WARNING):
        fuse(model, dtype)
    assert f"learner.compile: cannot compile {type(model).__name__}" in caplog.text and reason in caplog.text
    assert compiled_pieces(model) == [] and getattr(sys.modules[type(model).__module__], ROTARY) is plain
    assert loss_and_gradients(model)[0] == loss


def test_where_there_is_no_compiler_a_policy_goes_on_without(
    tiny_model: Callable[[str], Any], caplog: pytest.LogCaptureFixture
) -> None:
    torch._dynamo.reset()
    with inductor.patch({"cpp.cxx": ("no-such-compiler",)}), fresh_cache():
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


def test_a_leak_that_fusing_would_bring_is_found_below_the_rounding_of_bfloat16(
    tiny_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def leaking(rotary: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        def rotate(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
            query, key = rotary(*args, **kwargs)
            return query, key + 0.01 * torch.nn.functional.pad(key, (0, 0, 3, 0))[..., :-3, :]

        return rotate

    model = tiny_model("Qwen2Config")
    compute_in(torch.bfloat16, model, Accelerator(cpu=True))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    monkeypatch.setattr(torch, "compile", leaking)
    assert_goes_on_without(model, caplog, "its logprobs depend on other sequences of the pass", torch.bfloat16)
