"""The reference: the earlier policy, or policies, the KL is measured against.

It stands between the micro-batches and the loss: `logprobs` is called once per step, before its first update, so one step
never mixes two references; `after_step` comes after its last. Weights (snapshot.py), versions and what decides about the
next refresh (refresh.py) are in the checkpoint, so a resume goes on with the same reference and never takes a new one.
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
from learner.policy.compute_dtype import compute_dtype
from learner.policy.refresh import RefreshState, decide, first_state
from learner.policy.shards import Tensors, read_index, read_into, require_same
from learner.policy.snapshot import as_shard, local, own_copy, seated, trainable
from protocol.errors import ConfigError

log = logging.getLogger(__name__)


class ReferenceState(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint keeps of the reference besides its weights."""

    kind: ReferenceKind
    versions: tuple[int, ...]
    """Of the policy at the time of each snapshot, oldest first; ema: at its last move."""
    refresh: RefreshState


class Reference:
    """One or several snapshots of the policy, the first of them taken here and now."""

    def __init__(
        self, config: ReferenceConfig, policy: nn.Module, accelerator: Accelerator, temperature: float
    ) -> None:
        """Call it with the policy as prepared by accelerate, on every rank, before the first step. Raises ConfigError."""
        self._config, self._accelerator, self._temperature = config, accelerator, temperature
        self._device = _existing_device(config.device)
        # A moving average in bfloat16 would not move: a small alpha's steps would be rounded away. Copies are cast in each pass anyway.
        self._dtype = torch.float32 if config.kind == "ema" else compute_dtype(policy)
        parameters = trainable(accelerator.unwrap_model(policy))
        self._refreshed_names = _refreshed_names(config.only, list(parameters))
        self._snapshots = [{name: self._copy(parameter) for name, parameter in parameters.items()}]
        self._versions: tuple[int, ...] = (0,)
        self._refresh = first_state(config)

    @property
    def version(self) -> int:
        """The policy version of the newest snapshot."""
        return self._versions[-1]

    @property
    def never_changes(self) -> bool:
        return self._config.kind == "fixed"

    @property
    def state(self) -> ReferenceState:
        return ReferenceState(kind=self._config.kind, versions=self._versions, refresh=self._refresh)

    @torch.no_grad()
    def logprobs(self, policy: nn.Module, batches: Sequence[Pack]) -> list[torch.Tensor]:
        """Return the logprobs_BT of every micro-batch at the sampling temperature: the log of the snapshots' mean probability.

        The policy computes them with each snapshot's weights in turn, and has its own back afterwards.
        """
        policy = self._accelerator.unwrap_model(policy)
        means: list[torch.Tensor] = []
        for snapshot in self._snapshots:
            with seated(policy, snapshot):
                logprobs = [token_logprobs(policy, batch, self._temperature)[0] for batch in batches]
            means = [torch.logaddexp(*both) for both in zip(means, logprobs, strict=True)] if means else logprobs
        return [mean_BT - math.log(len(self._snapshots)) for mean_BT in means]

    def after_step(self, policy: nn.Module, version: int, metrics: dict[str, float]) -> bool:
        """Refresh the reference if it is time, and return whether it was. `metrics` are those of the step that led to `version`."""
        is_due, self._refresh = decide(self._config, self._refresh, version - self.version, metrics)
        if is_due:
            self._refresh_weights(self._accelerator.unwrap_model(policy))
            self._versions = (*self._versions, version)[-len(self._snapshots) :]
            if self._config.kind != "ema":
                log.info("the reference is now the policy of version %s", " and ".join(map(str, self._versions)))
        return is_due

    @torch.no_grad()
    def _refresh_weights(self, policy: nn.Module) -> None:
        parameters = trainable(policy)
        if self._config.num_snapshots is not None:
            # The oldest goes before the newest comes, so that there are never more of them in memory.
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
        """Return what a checkpoint keeps of the reference besides its `state`, as it lies in memory."""
        parameters = trainable(self._accelerator.unwrap_model(policy))
        return {
            f"{i}/{name}": as_shard(tensor, parameters[name])
            for i, snapshot in enumerate(self._snapshots)
            for name, tensor in snapshot.items()
        }

    def load(self, directory: Path, policy: nn.Module, state: ReferenceState) -> None:
        """Become the reference of the same kind that was saved. Raises ConfigError if it is of another policy, OSError or
        RuntimeError if the directory is damaged.
        """
        parameters = trainable(self._accelerator.unwrap_model(policy))
        self._snapshots.clear()  # makes room for those that are read
        for _ in state.versions:
            self._snapshots.append({name: self._copy(parameter) for name, parameter in parameters.items()})
        tensors = self.tensors(policy)
        require_same(tensors, read_index(directory), directory)
        read_into(tensors, directory)
        self._versions, self._refresh = state.versions, state.refresh


def make_reference(
    config: ReferenceConfig, policy: nn.Module, accelerator: Accelerator, temperature: float
) -> Reference | None:
    """Return the reference, or None without one."""
    return None if config.kind == "none" else Reference(config, policy, accelerator, temperature)


def _refreshed_names(only: str | None, names: list[str]) -> list[str]:
    if only is None:
        return names
    matching = [name for name in names if re.search(only, name)]
    some = f"the {len(names)} parameters that are trained, such as {', '.join(names[:3])}"
    if not matching:
        raise ConfigError(f"learner.reference.only = {only!r} matches none of {some}; correct it")
    if len(matching) == len(names):
        log.warning("learner.reference.only = %r does nothing, because it matches all of %s", only, some)
    return matching


def _existing_device(device: str) -> torch.device | None:
    """None where the policy is."""
    if device == "same":
        return None
    if device.startswith("cuda") and int(device.removeprefix("cuda:")) >= torch.cuda.device_count():
        raise ConfigError(
            f'learner.reference.device = "{device}" is not there: {torch.cuda.device_count()} CUDA devices are visible; '
            'set it to "same" or "cpu"'
        )
    return torch.device(device)
