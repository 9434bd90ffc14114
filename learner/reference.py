"""The reference model the KL is measured against, and when it is refreshed.

Its logprobs are computed in the step that uses them, so one step never mixes two anchors; its weights and version go into
the checkpoint, so a resume never re-anchors it.
"""

from pathlib import Path

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn

from learner.batch import MicroBatch
from learner.config import ReferenceConfig
from learner.policy import frozen_copy, token_logprobs

WEIGHTS_FILE = "reference.safetensors"


class Reference:
    """A frozen copy of the policy as it was at `version`."""

    def __init__(
        self, config: ReferenceConfig, policy: nn.Module, accelerator: Accelerator, temperature: float
    ) -> None:
        self._config, self._temperature, self._accelerator = config, temperature, accelerator
        self._model = frozen_copy(policy).float().to(accelerator.device)
        self.version = 0

    @torch.no_grad()
    def logprobs(self, batch: MicroBatch) -> torch.Tensor:
        """Return the logprobs_BT of a micro-batch at the sampling temperature."""
        with self._accelerator.autocast():
            logprobs_BT, _ = token_logprobs(self._model, batch, self._temperature)
        return logprobs_BT

    def after_step(self, policy: nn.Module, version: int) -> None:
        """Refresh the reference when it is time: by a copy, or by alpha of the way.

        The reference is kept in float32 whatever the policy computes in: in bfloat16 a small alpha would change nothing.
        """
        if self._config.every_steps is None or version % self._config.every_steps != 0:
            return
        alpha = 1.0 if self._config.alpha is None else self._config.alpha
        with torch.no_grad():
            for mine, current in zip(self._model.parameters(), policy.parameters(), strict=True):
                mine.lerp_(current.to(mine), alpha)
        self.version = version

    def save(self, directory: Path) -> None:
        tensors = {name: parameter.detach().cpu().contiguous() for name, parameter in self._model.named_parameters()}
        save_file(tensors, directory / WEIGHTS_FILE)

    def load(self, directory: Path, version: int) -> None:
        tensors = load_file(directory / WEIGHTS_FILE)
        with torch.no_grad():
            for name, parameter in self._model.named_parameters():
                parameter.copy_(tensors[name])
        self.version = version


def make_reference(
    config: ReferenceConfig, policy: nn.Module, accelerator: Accelerator, temperature: float
) -> Reference | None:
    """Copy a policy that accelerate has not prepared yet, so that the copy is free of its wrappers."""
    return None if config.kind == "none" else Reference(config, policy, accelerator, temperature)
