"""Every algorithm of docs/objectives.md: its keys, its paper, and the packages that have the same loss."""

import math
from typing import NamedTuple

from learner.config import KlConfig, LossConfig, OffPolicyCorrectionConfig
from tests.learner.algorithm.oracle import Rule
from tests.learner.algorithm.rivals import Rivals, Trl, Verl

CLIPS = {"epsilon": 0.2, "epsilon_high": 0.28}
SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 0.02, "epsilon_high": 0.03}
PROXIMAL = {"anchor": "proximal"}


class Recipe(NamedTuple):
    paper: str
    rule: Rule
    rivals: Rivals = ()
    has_proximal: bool = False


def recipe(paper: str, loss: dict, correction: dict | None = None, *rivals: Trl | Verl) -> Recipe:
    rule = Rule(LossConfig(**loss), OffPolicyCorrectionConfig(**correction or {}))
    return Recipe(paper, rule, rivals, has_proximal=rule.off_policy_correction.anchor == "proximal")


UNBOUNDED = {"dual_clip": math.inf}
GSPO = {"objective": "gspo", "clip_low": 0.02, "clip_high": 0.03} | UNBOUNDED
RECIPES: dict[str, Recipe] = {
    "GRPO": recipe("2402.03300", {"normalization": "sequence"} | UNBOUNDED, None, Trl("grpo", CLIPS)),
    "DAPO": recipe("2503.14476", UNBOUNDED, None, Trl("dapo", CLIPS), Trl("bnpo", CLIPS)),
    "Dr. GRPO": recipe("2503.20783", {"normalization": "dr_grpo"} | UNBOUNDED, None, Trl("dr_grpo", CLIPS)),
    "dual clip": recipe(
        "1912.09729", {"dual_clip": 1.75}, None,
        Verl("vanilla", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.75}),
    ),
    "two-sided clip": recipe("2505.07291", {"dual_clip": 1.75}, None, Trl("dapo", CLIPS | {"delta": 1.75})),
    "GSPO": recipe("2507.18071", GSPO, None, Trl("grpo", SEQUENCE)),
    "LUSPO": recipe("2602.05261", GSPO | {"normalization": "sequence_sum"}, None, Trl("luspo", SEQUENCE)),
    "GMPO": recipe(
        "2507.20673", {"objective": "gmpo"} | UNBOUNDED, None,
        Trl("grpo", {"epsilon": 0.4, "epsilon_high": 0.4}, "gmpo", has_same_value=False),
        Verl("geo_mean", {"clip_ratio": 0.4}),
    ),
    "CISPO": recipe("2506.13585", {"objective": "cispo", "clip_high": 0.25}, None,
        Trl("cispo", {"epsilon_high": 1.25})),
    "SAPO": recipe("2511.20347", {"objective": "sapo", "normalization": "sequence"}, None, Trl("sapo")),
    "VESPO": recipe("2602.10693", {"objective": "vespo"}, None, Trl("vespo")),
    "DPPO": recipe(
        "2602.04879", {"objective": "dppo", "tv_low": 0.05, "tv_high": 0.1, "log_ratio_penalty": 0.0} | UNBOUNDED, None,
        Verl("dppo_tv", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.1, "clip_ratio_c": 1e9}, has_same_value=False),
    ),
    "IPO": recipe("prime-rl #3586", {"objective": "ipo", "tv_low": 0.05, "tv_high": 0.05} | UNBOUNDED),
    "Clip-Cov": recipe(
        "2505.22617", {"objective": "clip_cov", "cov_frac": 1.0, "cov_low": 0.1, "cov_high": 1.5} | UNBOUNDED, None,
        Verl("clip_cov", {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 1.5}),
    ),
    "KL-Cov": recipe(
        "2505.22617", {"objective": "kl_cov", "cov_frac": 0.25} | UNBOUNDED, None,
        Verl("kl_cov", {"kl_cov_ratio": 0.25}),
    ),
    "REINFORCE": recipe("Williams 1992", {"objective": "reinforce"}),
    "TOPR": recipe(
        "2503.14286", {"objective": "reinforce"},
        {"weight": "truncate", "granularity": "sequence", "max_weight": 1.0, "weighted_completions": "negative"},
    ),
    "IcePop": recipe(
        "2510.18855", {"clip_high": 0.2},
        PROXIMAL | {"weight": "mask", "min_weight": 0.5, "max_weight": 1.5}, Verl("vanilla", {}, "0.5_1.5"),
    ),
    "KPop": recipe("ringtech.notion.site/kpop", {}, {"max_binary_kl": 0.01}),
    "decoupled PPO": recipe(
        "2505.24298", {"clip_high": 0.2}, PROXIMAL | {"weight": "truncate", "max_weight": 1.25},
        Verl("vanilla", {}, "1.25"),
    ),
    "two-sided truncation": recipe(
        "TRL", UNBOUNDED, PROXIMAL | {"weight": "truncate", "max_weight": 1.25, "min_weight": 0.75},
        Trl("dapo", CLIPS | {"vllm_importance_sampling_clip_max": 1.25, "vllm_importance_sampling_clip_min": 0.75},
            has_weights="token_truncate"),
    ),
    "sequence mask of weights": recipe(
        "TRL", UNBOUNDED, PROXIMAL | {"weight": "mask", "granularity": "sequence", "max_weight": 3.0},
        Trl("dapo", CLIPS | {"vllm_importance_sampling_clip_max": 3.0}, has_weights="sequence_mask"),
    ),
    "off-policy sequence mask": recipe("2512.02556", UNBOUNDED, {"sequence_mask": 0.05},
        Trl("dapo", CLIPS | {"off_policy_mask_threshold": 0.05})),
    "KL in the loss": Recipe(
        "2402.03300", Rule(LossConfig(**UNBOUNDED), kl=KlConfig(coef=0.5, estimator="k3"), kl_coef=0.5),
        [Trl("dapo", CLIPS | {"beta": 0.5, "use_bias_correction_kl": False})],
    ),
    "unbiased KL in the loss": Recipe(
        "2512.02556", Rule(LossConfig(**UNBOUNDED), kl=KlConfig(coef=0.5, importance_weighted=True), kl_coef=0.5),
        [Trl("dapo", CLIPS | {"beta": 0.5, "use_bias_correction_kl": True})],
    ),
    "entropy bonus": Recipe(
        "1602.01783", Rule(LossConfig(entropy_coef=0.125, **UNBOUNDED)), [Trl("bnpo", CLIPS | {"entropy_coef": 0.125})]
    ),
}  # fmt: skip
