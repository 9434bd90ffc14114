"""When the reference is refreshed. Pure: the config, what was seen so far, and a step's metrics give the decision.

Every rank sees the same metrics, so every rank decides alike. The state goes into the checkpoint, so that a resumed run
refreshes at the steps at which it would have, had it not been stopped.
"""

import msgspec

from learner.config import ReferenceConfig

REWARD_AVERAGE_STEP = 0.1
"""How far the moving average of the reward goes towards each step's: it looks back over about ten steps."""


class RefreshState(msgspec.Struct, frozen=True, kw_only=True):
    """What the next decision depends on besides the step's metrics."""

    interval_steps: float | None
    """Steps that at least lie between the last refresh and the next, rounded down; None: never again."""
    steps_above: int = 0
    """adaptive: for how many steps in a row the KL has been above the threshold."""
    reward_average: float | None = None
    """adaptive: the moving average of the mean reward."""
    reward_at_refresh: float | None = None
    """adaptive: what that average was at the last refresh, or at the first step."""


def first_state(config: ReferenceConfig) -> RefreshState:
    """The state before the first step."""
    match config.kind:
        case "fixed":
            return RefreshState(interval_steps=None)
        case "adaptive":
            return RefreshState(interval_steps=config.min_every_steps or 1)
        case _:
            return RefreshState(interval_steps=config.every_steps)


def decide(
    config: ReferenceConfig, state: RefreshState, steps_since_refresh: int, metrics: dict[str, float]
) -> tuple[bool, RefreshState]:
    """Return whether the step that has these metrics ends with a refresh, and the state after it."""
    if config.kind == "adaptive":
        state = _observe(config, state, metrics)
    is_due = state.interval_steps is not None and steps_since_refresh >= int(state.interval_steps)
    if not is_due or (config.kind == "adaptive" and not _has_drifted(config, state)):
        return False, state
    return True, _after_refresh(config, state)


def _observe(config: ReferenceConfig, state: RefreshState, metrics: dict[str, float]) -> RefreshState:
    """A step without tokens to train on measured no KL, so it neither adds to the patience nor ends it; one without scorable
    completions leaves the reward's average alone.
    """
    assert config.kl_threshold is not None
    kl, steps_above = metrics.get("reference/kl"), state.steps_above
    if kl is not None:
        steps_above = steps_above + 1 if kl > config.kl_threshold else 0
    reward, average = metrics.get("reward/mean"), state.reward_average
    if reward is not None:
        average = reward if average is None else average + REWARD_AVERAGE_STEP * (reward - average)
    return msgspec.structs.replace(
        state,
        steps_above=steps_above,
        reward_average=average,
        reward_at_refresh=average if state.reward_at_refresh is None else state.reward_at_refresh,
    )


def _has_drifted(config: ReferenceConfig, state: RefreshState) -> bool:
    """Whether the policy went far enough from the reference, and not towards less reward."""
    average, before = state.reward_average, state.reward_at_refresh
    has_fallen = average is not None and before is not None and average < before
    return state.steps_above >= config.patience and not (config.reward_guard and has_fallen)


def _after_refresh(config: ReferenceConfig, state: RefreshState) -> RefreshState:
    assert state.interval_steps is not None
    interval_steps = state.interval_steps * (config.growth or 1)
    if config.max_every_steps is not None:
        interval_steps = min(interval_steps, config.max_every_steps)
    return msgspec.structs.replace(
        state, interval_steps=interval_steps, steps_above=0, reward_at_refresh=state.reward_average
    )
