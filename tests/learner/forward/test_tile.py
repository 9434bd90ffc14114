"""The two functions of a tile, compiled as on a GPU and compared with eager; and the detection of a wrong one."""

import math

import pytest
import torch

from learner.forward.lm_head import HeadLogprobs, LogprobSettings
from learner.forward.tile import PLAIN, LogitMap, RowSums, Tiles, fused_tiles, tiles_problem

CPU = torch.device("cpu")

pytestmark = pytest.mark.timeout(900)  # a C++ compiler on a busy machine


@pytest.fixture(scope="module")
def fused() -> Tiles:
    return fused_tiles()


@pytest.mark.system
@pytest.mark.parametrize("entropy", ["value", "gradient"])
def test_a_compiled_head_equals_the_eager_head(fused: Tiles, entropy) -> None:
    assert tiles_problem(fused, CPU, torch.float32) is None
    logit_map = LogitMap(scale=1.5, cap=3.0)
    torch.manual_seed(0)
    targets_M = torch.tensor([0, 8191, 8192, 8999, 4, 4, 17])
    hidden_ME, weight_VE = torch.randn(7, 16), torch.randn(9000, 16)
    answers = []
    for tiles in (fused, PLAIN):
        leaves = [x.clone().requires_grad_() for x in (hidden_ME, weight_VE)]
        logprobs_M, entropy_M = HeadLogprobs.apply(
            *leaves, None, targets_M, LogprobSettings(logit_map, 0.7, entropy, tiles)
        )
        loss = logprobs_M.square().sum() + (entropy_M.sum() if entropy == "gradient" else 0)
        answers.append(
            [
                logprobs_M.detach(),
                *([] if entropy_M is None else [entropy_M.detach()]),
                *torch.autograd.grad(loss, leaves),
            ]
        )
    for mine, theirs in zip(*answers, strict=True):
        assert float((mine - theirs).norm()) <= 1e-5 * float(theirs.norm())


def test_a_kernel_with_other_sums_or_gradients_is_noticed() -> None:
    def no_weighed(*args: object, **kwargs: object) -> RowSums:
        return PLAIN.sums(*args, **kwargs)._replace(weighed_m1=torch.ones(24, 1))

    def no_target(product_mv: torch.Tensor, targets_m1: torch.Tensor, *more: object) -> torch.Tensor:
        return PLAIN.gradient(product_mv, targets_m1 - 2000, *more)

    for tiles in (PLAIN._replace(sums=no_weighed), PLAIN._replace(gradient=no_target)):
        problem = tiles_problem(tiles, CPU, torch.float32)
        assert (
            problem is not None
            and problem.startswith("its compiled head has a relative error of")
            and math.isfinite(float(problem.split()[-1]))
        )
    assert tiles_problem(PLAIN, CPU, torch.float32) is None
