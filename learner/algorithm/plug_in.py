"""Load and check the user's objective and advantage functions, such as `my_loss.py:f`, once on every rank.

    config ─▶ check_plug_ins: try each before waiting for a server ─▶ objective_of (loss.py)
                                                                   ─▶ advantages_of (training/step.py)

Invariant: the shape of a plug-in's result is checked before use, and a plug-in gets a copy of the tensors or
rewards. An exception raised by a plug-in ends the run with its traceback.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import torch

from learner.algorithm.advantages import StepRewards
from learner.algorithm.credit import AdvantagesByTurn
from learner.algorithm.objectives import OBJECTIVES, Losses, Objective, PickedTokens, Tokens
from learner.config import LearnerConfig, LossConfig, OffPolicyCorrectionConfig
from learner.sandbox.user_code import NotLoaded, describe, file_of, load_named
from protocol.errors import ConfigError

OBJECTIVE, ADVANTAGE = "learner.loss.objective", "learner.advantage.function"
"""Config keys that can name a plug-in."""


def check_plug_ins(config: LearnerConfig) -> None:
    """Load the plug-ins named in the config and try each on a small example.

    Raises:
        ConfigError: A plug-in cannot be imported, is not a function, raises, returns an invalid result, or does not go
            with the off-policy correction.
    """
    key, spec = OBJECTIVE, config.loss.objective
    try:
        if spec not in OBJECTIVES:
            log_ratio_BT = torch.tensor([[0.1, -0.2, 0.0], [0.3, 0.0, -0.1]], requires_grad=True)
            mask_BT = torch.ones(2, 3, dtype=torch.bool)
            advantages_BT = torch.tensor([[1.0, 1.0, -0.5], [-1.0, -1.0, -1.0]])
            tokens = PickedTokens(log_ratio_BT, log_ratio_BT - 1, advantages_BT, mask_BT, picked_BT=~mask_BT)
            objective_of(spec)(tokens, config.loss)
            _check_correction(spec, config.off_policy_correction)
        if config.advantage.function is not None:
            key, spec = ADVANTAGE, config.advantage.function
            rewards_P_G: list[list[float | None]] = [[1.0, 0.0, None], [None]]
            example = StepRewards(
                rewards_P_G,
                [dict.fromkeys(config.reward.names, rewards_G) for rewards_G in rewards_P_G],
                config.reward.weight_by_name,
                turn_rewards_P_G_K=[[[0.25, 0.75], [0.0], [0.0]], [[0.0]]],
                states_P_G_K=[[["start", "next"], ["start"], ["start"]], [[None]]],
            )
            advantages_of(spec, example)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{key} = {spec!r} failed on a small example: {describe(error)}. Correct the function"
        ) from error


def _check_correction(spec: str, correction: OffPolicyCorrectionConfig) -> None:
    """Check the anchor and the importance weight, as the config does for built-in objectives."""
    is_proximal = correction.anchor_used == "proximal"
    if has_ratio(spec) and not is_proximal and correction.weight_used == "truncate":
        raise ConfigError(
            f'learner.off_policy_correction.weight = "truncate" with anchor = "behavior": the ratio of {spec} already '
            'is the importance weight, which would count twice; set anchor = "proximal", or weight = "mask" to exclude '
            "tokens. If its gradient has no ratio, declare has_ratio = False on the function"
        )
    if not has_ratio(spec) and is_proximal:
        raise ConfigError(
            f'learner.off_policy_correction.anchor = "proximal" with {spec}, whose gradient has no ratio '
            "(has_ratio = False): the importance weight would stop at the proximal policy; set "
            'anchor = "behavior"'
        )


def objective_of(spec: str) -> Objective:
    """Return a built-in objective, or the user's objective with its results checked.

    Raises:
        ConfigError: The function cannot be loaded or, when called, does not declare a parameter that is set, or
            returns an invalid result.
    """
    if spec in OBJECTIVES:
        return OBJECTIVES[spec]
    function = load_function(OBJECTIVE, spec)
    defaults: dict[str, float] = _declaration(function, "parameters", {})

    def checked(tokens: Tokens, config: LossConfig) -> Losses:
        unknown = sorted(set(config.parameters) - set(defaults))
        if unknown:
            raise ConfigError(
                f"learner.loss.parameters contains {', '.join(unknown)}, which {spec} does not declare; it declares "
                f"{', '.join(defaults) or 'none'}. Correct the name, or add it to the function's `parameters`"
            )
        copies = (getattr(tokens, name).clone() for name in Tokens.__struct_fields__)
        returned = function(Tokens(*copies), msgspec.structs.replace(config, parameters=defaults | config.parameters))
        log_ratio_BT = tokens.log_ratio_BT
        match returned:
            case (torch.Tensor() as loss_BT, torch.Tensor() as held_BT) if (
                loss_BT.shape == held_BT.shape == log_ratio_BT.shape
                and loss_BT.requires_grad >= log_ratio_BT.requires_grad
            ):
                return loss_BT, held_BT.bool()
        raise ConfigError(
            f"{OBJECTIVE} = {spec!r} returned {_described(returned)}; expected (loss_BT, held_BT), two tensors of "
            f"shape {tuple(log_ratio_BT.shape)}, the first with a gradient. Return the loss of each token, and a mask "
            "of the tokens whose gradient your bound removes"
        )

    return checked


def has_ratio(spec: str) -> bool:
    """Return whether the importance ratio multiplies an objective's gradient.

    A user's objective `f` declares that it does not with `f.has_ratio = False`.
    """
    built_in = LossConfig(objective=spec).has_ratio
    return bool(_declaration(load_function(OBJECTIVE, spec), "has_ratio", True)) if built_in is None else built_in


def advantages_of(spec: str, rewards: StepRewards) -> AdvantagesByTurn:
    """Return the advantages that the user's function computes for one step.

    The function returns one number for each completion, which all its turns get, or one for each of its turns.

    Raises:
        ConfigError: The function cannot be loaded, or its result has the wrong shape or is not finite.
    """
    copied = msgspec.convert(msgspec.to_builtins(rewards), StepRewards)
    returned = load_function(ADVANTAGE, spec)(copied)
    try:
        groups = [list(advantages_G) for advantages_G in returned]
    except TypeError:
        groups = []
    problem = f"{len(groups)} groups instead of {len(rewards.rewards_P_G)}"
    advantages_P_G_K: AdvantagesByTurn = []
    if len(groups) == len(rewards.rewards_P_G):
        problem = ""
        for p, (advantages_G, rewards_G_K) in enumerate(zip(groups, rewards.turn_rewards_P_G_K, strict=True)):
            try:
                advantages_P_G_K.append(
                    [_of_turns(value, len(K)) for value, K in zip(advantages_G, rewards_G_K, strict=True)]
                )
            except (TypeError, ValueError):
                problem = problem or f"for group {p} {_described(advantages_G)}"
    if problem:
        raise ConfigError(
            f"{ADVANTAGE} = {spec!r} returned {problem}; expected one list per group, with one finite number per "
            "completion, or a list of one finite number per turn. Return 0 for a completion without a reward"
        )
    return advantages_P_G_K


def _of_turns(value: Any, num_turns: int) -> list[float]:
    """Return the advantages of a completion's turns.

    Raises:
        TypeError, ValueError: The value is neither a finite number nor one finite number for each turn.
    """
    is_number = not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0  # a tensor may be a number
    advantages_K = [float(value)] * num_turns if is_number else list(map(float, value))
    if len(advantages_K) != num_turns or not all(map(math.isfinite, advantages_K)):
        raise ValueError
    return advantages_K


def digest_of_plug_ins(config: LearnerConfig) -> str:
    """Return a digest of the plug-ins' files, for ranks on several nodes to compare."""
    digest = hashlib.sha256()
    for key, spec in ((OBJECTIVE, config.loss.objective), (ADVANTAGE, config.advantage.function)):
        if spec is not None and spec not in OBJECTIVES:
            path = file_of(load_function(key, spec))
            digest.update(Path(path).read_bytes() if path else spec.encode())
    return digest.hexdigest()


@functools.cache
def load_function(key: str, spec: str) -> Callable[..., Any]:
    """Return the function named by a config key. Raises ConfigError if loading fails."""
    try:
        function: Callable[..., Any] = load_named(spec)
    except NotLoaded as error:
        raise ConfigError(f"{key} = {spec!r}: {error}") from error
    return function


def _declaration(function: Any, name: str, default: Any) -> Any:
    """Return what a function declares in an attribute. A partial declares what its function does."""
    while isinstance(function, functools.partial) and not hasattr(function, name):
        function = function.func
    return getattr(function, name, default)


def _described(returned: Any) -> str:
    if isinstance(returned, torch.Tensor):
        return f"a tensor of shape {tuple(returned.shape)}{'' if returned.requires_grad else ' without a gradient'}"
    if isinstance(returned, tuple):
        return f"({', '.join(map(_described, returned))})"
    text = repr(returned)
    return text if len(text) <= 120 else f"{text[:120]}…"
