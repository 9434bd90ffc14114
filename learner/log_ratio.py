"""Log-ratios of two policies' probabilities of the same tokens: the safe arithmetic under every loss.

Suffixes: B rows (completions), T predicted tokens (padded).
"""

import torch

LOG_RATIO_BOUND = 20.0
"""exp(20) is finite in float32; a larger mismatch of server and learner must not overflow."""


def masked(values_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """In float32, 0 outside the mask: selected before any arithmetic, for NaN · 0 is NaN, in gradients too."""
    return torch.where(mask_BT, values_BT.float(), 0.0)


def clamped(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the log-ratio within ±LOG_RATIO_BOUND."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
