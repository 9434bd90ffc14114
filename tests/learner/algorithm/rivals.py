"""The losses of TRL and verl, called on the tensors of a case. Either package may be absent.

Neither class of TRL is constructed, which would load a model: the loss reads the attributes that are set here.
Suffixes: B completions, T positions.
"""

import warnings
from collections import defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from learner.algorithm.loss import LossInputs
from tests.learner.algorithm.loss_case import MAX_TOKENS, NUM_ROWS, NUM_TOKENS


class Found(NamedTuple):
    loss: float
    gradient_BT: torch.Tensor
    has_same_value: bool = True
    """Whether the value means the same. A loss with the ratio as a weight has the gradient of ours, but -A log p; GMPO
    of TRL counts -A for a completion without tokens."""


class Trl(NamedTuple):
    """Settings of TRL's GRPOConfig, as keyword arguments, and the weights that TRL computes before the loss."""

    loss_type: str = "dapo"
    settings: dict[str, Any] = {}  # noqa: RUF012
    trainer: str = "grpo"
    has_weights: str | None = None
    """vllm_importance_sampling_mode."""
    has_same_value: bool = True

    @property
    def name(self) -> str:
        return f"TRL 1.16 {self.loss_type if self.trainer == 'grpo' else self.trainer}"

    def __call__(self, inputs: LossInputs) -> Found:
        pytest.importorskip("trl", reason="TRL is not installed: pip install trl==1.16.0")
        logprobs_BT, mask_BT = inputs.logprobs_BT.detach().clone().requires_grad_(), inputs.mask_BT.float()
        rows_are_mean = self.loss_type not in ("dapo", "cispo", "vespo", "bnpo")
        trainer = self.make(logprobs_BT, inputs.entropy_BT)
        batch = {
            "prompt_ids": torch.zeros(len(mask_BT), 1, dtype=torch.long),
            "prompt_mask": torch.ones(len(mask_BT), 1),
            "completion_ids": torch.zeros_like(mask_BT, dtype=torch.long),
            "completion_mask": mask_BT,
            "advantages": _advantages_B(inputs),
            "old_per_token_logps": inputs.behavior_logprobs_BT,
            "num_items_in_batch": torch.tensor(float(NUM_TOKENS)),
            "ref_per_token_logps": inputs.reference_logprobs_BT,
        }
        if self.has_weights is not None:
            assert inputs.proximal_logprobs_BT is not None
            batch["old_per_token_logps"] = inputs.proximal_logprobs_BT
            log_BT = (inputs.proximal_logprobs_BT - inputs.behavior_logprobs_BT) * mask_BT
            log_BT = log_BT.sum(dim=1, keepdim=True) if "sequence" in self.has_weights else log_BT
            weight_BT, high = log_BT.exp(), self.settings["vllm_importance_sampling_clip_max"]
            low = self.settings.get("vllm_importance_sampling_clip_min", 0.0)
            is_out_BT = (weight_BT > high) | (weight_BT < low)
            is_mask = "mask" in self.has_weights
            batch["importance_sampling_ratio"] = (
                weight_BT.masked_fill(is_out_BT, 0.0) if is_mask else weight_BT.clamp(low, high)
            )
        loss = trainer._compute_loss(trainer.model, batch)
        (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
        scale = len(mask_BT) / NUM_ROWS if rows_are_mean else 1.0  # TRL's batch is the case, ours is part of a step
        scale = float(mask_BT.sum()) / NUM_TOKENS if self.loss_type == "bnpo" else scale
        return Found(loss.item() * scale, gradient_BT * scale, self.has_same_value)

    def make(self, logprobs_BT: torch.Tensor, entropy_BT: torch.Tensor | None) -> Any:
        from accelerate import Accelerator

        with warnings.catch_warnings(action="ignore"):  # about the version of vLLM, and about being experimental
            from trl import GRPOConfig, GRPOTrainer
            from trl.experimental.gmpo import GMPOTrainer

        config = GRPOConfig(
            output_dir="unused",
            report_to="none",
            use_cpu=True,
            bf16=False,
            loss_type=self.loss_type,
            per_device_train_batch_size=2,
            num_generations=2,
            max_completion_length=MAX_TOKENS,
            **{"beta": 0.0} | self.settings,
        )
        trainer: Any = object.__new__(GMPOTrainer if self.trainer == "gmpo" else GRPOTrainer)
        entropies_BT = torch.zeros_like(logprobs_BT) if entropy_BT is None else entropy_BT.detach()
        for name, value in {
            "args": config,
            "loss_type": config.loss_type,
            "beta": config.beta,
            "epsilon_low": config.epsilon,
            "epsilon_high": config.epsilon if config.epsilon_high is None else config.epsilon_high,
            "top_entropy_quantile": config.top_entropy_quantile,
            "off_policy_mask_threshold": config.off_policy_mask_threshold,
            "importance_sampling_level": config.importance_sampling_level,
            "use_vllm": self.has_weights is not None,
            "vllm_importance_sampling_correction": self.has_weights is not None,
            "max_completion_length": config.max_completion_length,
            "current_gradient_accumulation_steps": config.steps_per_generation,
            "aux_loss_enabled": False,
            "accelerator": Accelerator(cpu=True),
            "model": SimpleNamespace(training=True),
            "entropy_coef": config.entropy_coef,
            "use_adaptive_entropy": config.use_adaptive_entropy,
            "_entropy_bonus_enabled": config.entropy_coef != 0 or config.use_adaptive_entropy,
            "_last_world_entropy": float("inf"),
            "_entropy_window_stats": None,
            "_metrics": {"train": defaultdict(list)},
            "_get_per_token_logps_and_entropies": lambda *_args, **_kwargs: (logprobs_BT, entropies_BT, None),
        }.items():
            object.__setattr__(trainer, name, value)
        assert config.steps_per_generation == 1
        return trainer


class VerlConfig(SimpleNamespace):
    """The attributes of verl's ActorConfig that a loss reads."""

    def get(self, name: str, default: float) -> float:
        return getattr(self, name, default)


class Verl(NamedTuple):
    """A policy loss of verl, its settings, and the threshold of its rollout correction."""

    loss: str
    settings: dict[str, float] = {}  # noqa: RUF012
    threshold: str | None = None
    has_same_value: bool = True

    @property
    def name(self) -> str:
        return f"verl 0.9 {self.loss}" + (f" + rollout_is {self.threshold}" if self.threshold else "")

    def __call__(self, inputs: LossInputs) -> Found:
        reason = "verl is not installed: pip install verl==0.9.1 tensordict omegaconf hydra-core codetiming orjson"
        with warnings.catch_warnings(action="ignore"):
            core = pytest.importorskip("verl.trainer.ppo.core_algos", reason=reason)
        names = ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef")
        config = VerlConfig(
            **{"clip_ratio": 0.2, "clip_ratio_low": None, "clip_ratio_high": None} | self.settings,
            global_batch_info={},
            policy_loss=SimpleNamespace(**{name: self.settings.get(name) for name in names}),
        )
        logprobs_BT, mask_BT = inputs.logprobs_BT.detach().clone().requires_grad_(), inputs.mask_BT.float()
        old_BT, weights_BT = inputs.behavior_logprobs_BT, None
        if self.threshold is not None:
            from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_weights

            assert inputs.proximal_logprobs_BT is not None
            log_ratio_BT = inputs.proximal_logprobs_BT - old_BT
            weights_BT, _ = compute_rollout_correction_weights(
                log_ratio_BT, mask_BT, rollout_is_threshold=self.threshold
            )
            old_BT = inputs.proximal_logprobs_BT
        advantages_BT = _advantages_B(inputs).unsqueeze(1).expand_as(mask_BT).clone()
        loss, _ = core.get_policy_loss_fn(self.loss)(
            old_BT, logprobs_BT, advantages_BT, mask_BT, "token-mean", config, weights_BT
        )
        (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
        scale = float(mask_BT.sum()) / NUM_TOKENS
        if self.loss == "geo_mean":  # the mean over completions
            scale = len(mask_BT) / NUM_ROWS
        return Found(loss.item() * scale, gradient_BT * scale, self.has_same_value)


Rival = Trl | Verl
Rivals = Sequence[Rival]


def _advantages_B(inputs: LossInputs) -> torch.Tensor:
    """Return each completion's advantage, which is that of its first trained token."""
    first_B1 = inputs.mask_BT.float().argmax(dim=1, keepdim=True)
    return inputs.advantages_BT.gather(1, first_B1).squeeze(1)
