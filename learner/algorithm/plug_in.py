"""Functions of yours in the place of the built-in objective and advantages: `my_loss.py:f`, loaded once on every rank.

    config ─▶ check_plug_ins, before a server is waited for ─▶ loss.py: objective_of     training/step.py: advantages

Invariant: what a plug-in returns has the right shape before it is used; an exception of its own ends the run with its traceback.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from learner.algorithm.advantages import StepRewards
from learner.algorithm.objectives import OBJECTIVES, Losses, Tokens
from learner.config import LearnerConfig, LossConfig
from learner.user_code import NotLoaded, load_named
from protocol.errors import ConfigError


def check_plug_ins(config: LearnerConfig) -> None:
    """Load what the config names.

    Raises:
        ConfigError: It cannot be imported, or is no function.
    """
    objective_of(config.loss.objective)
    if config.advantage.function is not None:
        load_function("learner.advantage.function", config.advantage.function)


def objective_of(spec: str) -> Callable[[Tokens, LossConfig], Losses]:
    """Return a built-in objective, or yours. Raises ConfigError, also for what yours returns."""
    if spec in OBJECTIVES:
        return OBJECTIVES[spec]
    function = load_function("learner.loss.objective", spec)

    def checked(tokens: Tokens, config: LossConfig) -> Losses:
        returned = function(tokens, config)
        shape = tokens.log_ratio_BT.shape
        match returned:
            case (torch.Tensor() as loss_BT, torch.Tensor() as held_BT) if loss_BT.shape == held_BT.shape == shape:
                return loss_BT, held_BT.bool()
        raise ConfigError(
            f"learner.loss.objective = {spec!r} returned {_described(returned)}; expected (loss_BT, held_BT), two tensors of shape "
            f"{tuple(shape)}. Return the loss of each token, and where your bound holds its gradient back"
        )

    return checked


def advantages_of(spec: str, rewards: StepRewards) -> list[list[float]]:
    """Return what your function makes of the rewards of a step. Raises ConfigError for what it returns."""
    returned = load_function("learner.advantage.function", spec)(rewards)
    expected = [len(rewards_G) for rewards_G in rewards.rewards_P_G]
    try:
        advantages_P_G = [[float(value) for value in advantages_G] for advantages_G in returned]
    except (TypeError, ValueError):
        advantages_P_G = []
    if [len(advantages_G) for advantages_G in advantages_P_G] != expected or not all(
        math.isfinite(value) for advantages_G in advantages_P_G for value in advantages_G
    ):
        raise ConfigError(
            f"learner.advantage.function = {spec!r} returned {_described(returned)}; expected {len(expected)} lists, one for each group, "
            f"of {expected[0]} finite numbers, one for each completion. Return 0 for a completion without a reward"
        )
    return advantages_P_G


@cache
def load_function(key: str, spec: str) -> Callable[..., Any]:
    try:
        function: Callable[..., Any] = load_named(spec)
    except NotLoaded as error:
        raise ConfigError(f"{key} = {spec!r}: {error}") from error
    return function


def _described(returned: Any) -> str:
    if isinstance(returned, torch.Tensor):
        return f"a tensor of shape {tuple(returned.shape)}"
    if isinstance(returned, tuple):
        return f"({', '.join(map(_described, returned))})"
    text = repr(returned)
    return text if len(text) <= 120 else f"{text[:120]}…"
