"""Weight of the entropy bonus over the run: constant, or adapted to hold the entropy at a target.

    policy/entropy of a step ─▶ EntropyControl.after_step ─▶ weight of the next step, and the checkpoint

Invariant: a step uses one weight, equal on all ranks, because the measured entropy is over all ranks.
"""

import msgspec

from learner.config import LossConfig


class EntropyControl(msgspec.Struct, frozen=True, kw_only=True):
    """State of the controller."""

    coef: float
    """Weight of the bonus while the entropy is at most the target."""
    entropy: float | None = None
    """Mean entropy of the latest step that had tokens; None: no step was measured."""

    def weight(self, config: LossConfig) -> float:
        """Return the weight that the next step uses.

        With a target, it is 0 until a step has been measured, and after a step with an entropy above the target.
        """
        if config.entropy_target is None:
            return config.entropy_coef
        return self.coef if self.entropy is not None and self.entropy <= config.entropy_target else 0.0

    def after_step(self, config: LossConfig, measured: float | None) -> "EntropyControl":
        """Return the state after a step with this mean entropy per token.

        coef + entropy_coef_step, at most max_entropy_coef, if measured <= entropy_target
        coef - entropy_coef_step, at least 0, otherwise        (Skywork-OR1, arXiv 2505.22312)
        """
        if config.entropy_target is None or measured is None:
            return self
        if measured <= config.entropy_target:
            coef = min(self.coef + config.entropy_coef_step, config.max_entropy_coef)
        else:
            coef = max(self.coef - config.entropy_coef_step, 0.0)
        return EntropyControl(coef=coef, entropy=measured)
