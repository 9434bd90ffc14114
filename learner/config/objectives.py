"""Table of the built-in objectives: the keys that each one reads, and what the other sections must know of it.

A row here and a file in learner/algorithm/objectives/ make an objective; loss.py declares the keys.
This module imports no torch, so that `--help` stays fast.
"""

from typing import Literal

import msgspec

Normalization = Literal["token", "sequence", "sequence_sum", "dr_grpo"]


class ObjectiveRow(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a built-in objective."""

    bounds: dict[str, float]
    """Keys of learner.loss that the objective reads, with their defaults. All other bounds have no effect."""
    normalization: Normalization = "token"
    """Normalization of the objective's paper."""
    has_ratio: bool = True
    """Whether the ratio to the anchor multiplies the gradient."""
    is_of_completion: bool = False
    """Whether one ratio covers the whole completion, so that an excluded token would still change it."""


OBJECTIVES: dict[str, ObjectiveRow] = {
    "grpo": ObjectiveRow(bounds={"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}),
    "gspo": ObjectiveRow(
        bounds={"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": 3.0}, normalization="sequence", is_of_completion=True
    ),
    "gmpo": ObjectiveRow(
        bounds={"clip_low": 0.4, "clip_high": 0.4, "dual_clip": 3.0}, normalization="sequence", is_of_completion=True
    ),
    "cispo": ObjectiveRow(bounds={"clip_high": 4.0}),
    "sapo": ObjectiveRow(bounds={"tau_positive": 1.0, "tau_negative": 1.05}),
    "vespo": ObjectiveRow(
        bounds={"power_positive": 2.0, "decay_positive": 3.0, "power_negative": 3.0, "decay_negative": 2.0},
        is_of_completion=True,
    ),
    "dppo": ObjectiveRow(bounds={"tv_low": 0.2, "tv_high": 0.2, "log_ratio_penalty": 1e-3, "dual_clip": 3.0}),
    "ipo": ObjectiveRow(bounds={"tv_low": 0.3, "tv_high": 0.3, "log_ratio_penalty": 0.0, "dual_clip": 3.0}),
    "clip_cov": ObjectiveRow(
        bounds={
            "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0, "cov_frac": 2e-4, "cov_low": 1.0, "cov_high": 5.0,
        },
    ),
    "kl_cov": ObjectiveRow(bounds={"cov_frac": 2e-4, "cov_penalty": 1.0, "dual_clip": 3.0}),
    "reinforce": ObjectiveRow(bounds={}, has_ratio=False),
}  # fmt: skip

BOUNDS = sorted({bound for row in OBJECTIVES.values() for bound in row.bounds})
"""All keys that some objective reads."""


def is_plug_in(spec: str) -> bool:
    """Return whether a value names a user function rather than a built-in."""
    return ":" in spec
