"""Logprobs and entropies in tiles, compared with whole logits in float64: values and gradients."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from learner.forward import lm_head
from learner.forward.lm_head import HeadLogprobs, LogprobSettings
from learner.forward.tile import LogitMap

MAPS = {"none": LogitMap(), "scaled": LogitMap(scale=0.25), "soft cap": LogitMap(scale=1.5, cap=3.0)}


def inputs(num_rows: int, vocab_size: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return hidden_ME, weight_VE, bias_V, targets_M, with targets in the first and the last column."""
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(num_rows, 16), torch.randn(vocab_size, 16), torch.randn(vocab_size)
    leaves = [x.to(dtype).requires_grad_() for x in (hidden, weight, bias)]
    targets = torch.randint(0, vocab_size, (num_rows,))
    targets[:2] = torch.tensor([0, vocab_size - 1])
    return [*leaves, targets]


def whole(hidden_ME, weight_VE, bias_V, targets_M, settings: LogprobSettings) -> tuple[torch.Tensor, torch.Tensor]:
    logits_MV = settings.logit_map.scale * (hidden_ME @ weight_VE.T + (0 if bias_V is None else bias_V))
    if settings.logit_map.cap is not None:
        logits_MV = settings.logit_map.cap * torch.tanh(logits_MV / settings.logit_map.cap)
    logprobs_MV = (logits_MV / settings.temperature).log_softmax(-1)
    return logprobs_MV.gather(1, targets_M[:, None])[:, 0], -(logprobs_MV.exp() * logprobs_MV).sum(-1)


@pytest.mark.parametrize("has_bias", [True, False])
def test_a_float32_head_does_not_round_the_logits_of_a_bfloat16_model(has_bias: bool) -> None:
    hidden, weight, bias, targets = inputs(200, 9000, torch.bfloat16)
    bias = bias if has_bias else None
    exact, _ = whole(
        *(x if x is None else x.double() for x in (hidden, weight, bias)),
        targets,
        LogprobSettings(LogitMap(), 1.0, "none"),
    )
    errors, gradients = [], []
    leaves = [x for x in (hidden, weight, bias) if x is not None]
    for in_float32 in (True, False):
        found, _ = HeadLogprobs.apply(
            hidden, weight, bias, targets, LogprobSettings(LogitMap(), 1.0, "none", in_float32=in_float32)
        )
        errors.append(float((found - exact).detach().abs().mean()))
        gradients.append(torch.autograd.grad(found.sum(), leaves))
    assert errors[0] < 1e-5 < 1e-3 < errors[1]
    for mine, exact_gradient in zip(gradients[0], torch.autograd.grad(exact.sum(), leaves), strict=True):
        assert mine.dtype == torch.bfloat16
        difference = (mine.double() - exact_gradient.double()).norm()
        assert difference < 0.01 * exact_gradient.double().norm()


@pytest.mark.parametrize("vocab_size", [7, 20_000])
@pytest.mark.parametrize("logit_map", MAPS.values(), ids=MAPS)
@pytest.mark.parametrize("entropy", ["none", "value", "gradient"])
def test_tiles_equal_the_whole_head(
    monkeypatch: pytest.MonkeyPatch, vocab_size: int, logit_map: LogitMap, entropy
) -> None:
    monkeypatch.setitem(lm_head.TILE_LOGITS, "cpu", 5 * min(vocab_size, lm_head.TILE_COLUMNS))  # five rows per tile
    hidden, weight, bias, targets = inputs(13, vocab_size)
    settings = LogprobSettings(logit_map, 0.7, entropy)
    found, found_entropy = HeadLogprobs.apply(hidden, weight, bias, targets, settings)
    right, right_entropy = whole(hidden, weight, bias, targets, settings)
    torch.testing.assert_close(found, right, atol=1e-12, rtol=1e-12)
    use = torch.linspace(-1, 1, 13, dtype=torch.float64)
    loss, right_loss = (use * found.exp()).sum(), (use * right.exp()).sum()
    if entropy == "none":
        assert found_entropy is None
    else:
        torch.testing.assert_close(found_entropy, right_entropy, atol=1e-11, rtol=1e-11)
    if entropy == "gradient":
        loss, right_loss = loss + (use * found_entropy).sum(), right_loss + (use * right_entropy).sum()
    elif entropy == "value":
        assert not found_entropy.requires_grad
    leaves = (hidden, weight, bias)
    for mine, theirs in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(right_loss, leaves), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-10)


def test_frozen_inputs_get_no_gradient_and_extreme_logits_stay_finite() -> None:
    hidden, weight, _, targets = inputs(3, 20_000, torch.float32)
    settings = LogprobSettings(LogitMap(), 1.0, "gradient")
    logprobs, entropy = HeadLogprobs.apply(1e4 * hidden.detach(), weight, None, targets, settings)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.isfinite(logprobs).all() and torch.isfinite(entropy).all() and torch.isfinite(weight.grad).all()
    logprobs, _ = HeadLogprobs.apply(hidden, weight.detach(), None, targets, settings)
    logprobs.sum().backward()
    assert hidden.grad is not None


def test_products_in_bfloat16_are_summed_in_float32() -> None:
    """The gradient of a weight has one rounding error, independent of the number of tiles."""
    hidden, weight, _, targets = inputs(1024, 9000, torch.bfloat16)
    settings = LogprobSettings(LogitMap(), 1.0, "none")
    HeadLogprobs.apply(hidden, weight, None, targets, settings)[0].sum().backward()
    right = torch.autograd.grad(whole(hidden.double(), weight.double(), None, targets, settings)[0].sum(), weight)[0]
    error = (weight.grad.double() - right.double()).norm() / right.double().norm()
    assert error < 0.01 and math.isfinite(error)


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that is created in the block."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return out


def test_no_tensor_of_rows_times_vocabulary_is_created() -> None:
    hidden, weight, _, targets = inputs(2000, 20_000, torch.float32)
    with LargestTensor() as largest:
        logprobs, entropy = HeadLogprobs.apply(
            hidden, weight, None, targets, LogprobSettings(LogitMap(), 0.7, "gradient")
        )
        (logprobs.sum() + entropy.sum()).backward()
    assert largest.num_elements <= lm_head.TILE_LOGITS["cpu"] < 2000 * 20_000 / 8
    with LargestTensor() as largest:
        whole(hidden, weight, None, targets, LogprobSettings(LogitMap(), 0.7, "gradient"))
    assert largest.num_elements == 2000 * 20_000, "the recorder must see whole logits"
