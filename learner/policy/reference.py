"""The reference model: the earlier policy, or policies, against which the KL is measured.

`logprobs` runs once per step, before its first update, so one step never mixes two references. `after_step`
runs after its last update. A checkpoint holds the weights (snapshot.py), the versions and the state of
`decide`. A resume therefore continues with the same reference and refreshes it at the same steps.

Invariant: `decide` is pure. Its inputs are the config, its state and the step's metrics, which all ranks
share.
"""

import logging
import math
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from accelerate import Accelerator
from torch import nn

from learner.config import ReferenceConfig
from learner.config.policy import ReferenceKind
from learner.forward.logprobs import token_logprobs
from learner.forward.pack import Pack
from learner.policy.model import compute_dtype
from learner.policy.shards import Tensors, read_index, read_into, require_same
from learner.policy.snapshot import as_shard, local, own_copy, seated, trainable
from protocol.errors import ConfigError

REWARD_AVERAGE_STEP = 0.1
"""Weight of each new reward in the moving average, which covers about ten steps."""
log = logging.getLogger(__name__)


class RefreshState(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs of the next decision besides the step's metrics."""

    interval_steps: float | None
    """Minimum steps between the last refresh and the next, rounded down; None: no more refreshes."""
    steps_above: int = 0
    """adaptive: number of steps in a row with the KL above the threshold."""
    reward_average: float | None = None
    """adaptive: moving average of the mean reward."""
    reward_at_refresh: float | None = None
    """adaptive: this average at the last refresh, or at the first step."""


def first_state(config: ReferenceConfig) -> RefreshState:
    """Return the state before the first step."""
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
    """Return whether a step with these metrics ends in a refresh, and the new state."""
    if config.kind == "adaptive":
        state = _observe(config, state, metrics)
    is_due = state.interval_steps is not None and steps_since_refresh >= int(state.interval_steps)
    if not is_due or (config.kind == "adaptive" and not _has_drifted(config, state)):
        return False, state
    return True, _after_refresh(config, state)


def _observe(config: ReferenceConfig, state: RefreshState, metrics: dict[str, float]) -> RefreshState:
    """Update the state with the metrics of a step.

    A step without tokens to train on measures no KL and leaves `steps_above` as it is. A step without
    scorable completions leaves the reward average as it is.
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
    """Return whether the policy has drifted far enough, and not to a lower reward."""
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


class ReferenceState(msgspec.Struct, frozen=True, kw_only=True):
    """State of the reference in a checkpoint, besides its weights."""

    kind: ReferenceKind
    versions: tuple[int, ...]
    """Policy version of each snapshot, oldest first; ema: at the last move."""
    refresh: RefreshState
    on_server: bool = False
    """Whether a server held the reference."""
    model_digest: str | None = None
    """Digest of a frozen server's own model."""


class Reference:
    """One or several snapshots of the policy. The constructor takes the first."""

    def __init__(
        self, config: ReferenceConfig, policy: nn.Module, accelerator: Accelerator, temperature: float
    ) -> None:
        """Take the first snapshot. `policy` is prepared by accelerate.

        Every rank calls this before the first step.

        Raises:
            ConfigError: The configured device does not exist, or `only` matches no parameter.
        """
        self._config, self._accelerator, self._temperature = config, accelerator, temperature
        self._device = _existing_device(config.device)
        # In bfloat16, the steps of a small alpha would be rounded away. Copies are cast in each pass anyway.
        self._dtype = torch.float32 if config.kind == "ema" else compute_dtype(policy)
        parameters = trainable(accelerator.unwrap_model(policy))
        self._refreshed_names = _refreshed_names(config.only, list(parameters))
        self._snapshots = [{name: self._copy(parameter) for name, parameter in parameters.items()}]
        self._versions: tuple[int, ...] = (0,)
        self._refresh = first_state(config)

    @property
    def version(self) -> int:
        """Policy version of the newest snapshot."""
        return self._versions[-1]

    @property
    def never_changes(self) -> bool:
        return self._config.kind == "fixed"

    @property
    def state(self) -> ReferenceState:
        return ReferenceState(kind=self._config.kind, versions=self._versions, refresh=self._refresh)

    @torch.no_grad()
    def logprobs(self, policy: nn.Module, batches: Sequence[Pack]) -> list[torch.Tensor]:
        """Return the logprobs_BT of every micro-batch at the sampling temperature.

        They are the log of the snapshots' mean probability. The policy computes them with each snapshot's
        weights in turn, and has its own weights back afterwards.
        """
        policy = self._accelerator.unwrap_model(policy)
        means: list[torch.Tensor] = []
        for snapshot in self._snapshots:
            with seated(policy, snapshot):
                logprobs = [token_logprobs(policy, batch, self._temperature)[0] for batch in batches]
            means = [torch.logaddexp(*both) for both in zip(means, logprobs, strict=True)] if means else logprobs
        return [mean_BT - math.log(len(self._snapshots)) for mean_BT in means]

    def after_step(self, policy: nn.Module, version: int, metrics: dict[str, float]) -> bool:
        """Refresh the reference if it is due, and return whether it was.

        `metrics` are those of the step that led to `version`.
        """
        is_due, self._refresh = decide(self._config, self._refresh, version - self.version, metrics)
        if is_due:
            self._refresh_weights(self._accelerator.unwrap_model(policy))
            self._versions = (*self._versions, version)[-len(self._snapshots) :]
            if self._config.kind != "ema":
                log.info("refreshed the reference (policy of version %s)", " and ".join(map(str, self._versions)))
        return is_due

    @torch.no_grad()
    def _refresh_weights(self, policy: nn.Module) -> None:
        parameters = trainable(policy)
        if self._config.num_snapshots is not None:
            # Drop the oldest before copying the newest, so that memory never holds one more.
            self._snapshots = self._snapshots[-(self._config.num_snapshots - 1) :]
            newest = {name: self._copy(parameters[name]) for name in self._refreshed_names}
            self._snapshots.append(self._snapshots[-1] | newest)
            return
        (snapshot,) = self._snapshots
        for name in self._refreshed_names:
            mine, current = snapshot[name], local(parameters[name])
            if self._config.alpha is None:
                mine.copy_(current)
            else:
                mine.lerp_(current.to(mine.device), self._config.alpha)

    def _copy(self, parameter: torch.Tensor) -> torch.Tensor:
        return own_copy(parameter, self._device, self._dtype)

    def tensors(self, policy: nn.Module) -> Tensors:
        """Return the tensors to save besides `state`, without copying them."""
        parameters = trainable(self._accelerator.unwrap_model(policy))
        return {
            f"{i}/{name}": as_shard(tensor, parameters[name])
            for i, snapshot in enumerate(self._snapshots)
            for name, tensor in snapshot.items()
        }

    def load(self, directory: Path, policy: nn.Module, state: ReferenceState) -> None:
        """Restore a saved reference of the same kind.

        Raises:
            ConfigError: The saved reference belongs to another policy.
            OSError, RuntimeError: The directory is damaged.
        """
        parameters = trainable(self._accelerator.unwrap_model(policy))
        self._snapshots.clear()  # frees memory for the snapshots to load
        for _ in state.versions:
            self._snapshots.append({name: self._copy(parameter) for name, parameter in parameters.items()})
        tensors = self.tensors(policy)
        require_same(tensors, read_index(directory), directory)
        read_into(tensors, directory)
        self._versions, self._refresh = state.versions, state.refresh


def _refreshed_names(only: str | None, names: list[str]) -> list[str]:
    if only is None:
        return names
    matching = [name for name in names if re.search(only, name)]
    some = f"the {len(names)} parameters that are trained, such as {', '.join(names[:3])}"
    if not matching:
        raise ConfigError(f"learner.reference.only = {only!r} matches none of {some}; correct it")
    if len(matching) == len(names):
        log.warning("learner.reference.only = %r has no effect, because it matches all of %s", only, some)
    return matching


def _existing_device(device: str) -> torch.device | None:
    """Return the configured device; None: the policy's own."""
    if device == "same":
        return None
    if device.startswith("cuda") and int(device.removeprefix("cuda:")) >= torch.cuda.device_count():
        raise ConfigError(
            f'learner.reference.device = "{device}" does not exist: {torch.cuda.device_count()} CUDA devices are '
            'visible; set it to "same" or "cpu"'
        )
    return torch.device(device)
