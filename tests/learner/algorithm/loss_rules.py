"""The loss configs of the tests: all accepted combinations of objective × anchor × weight."""

import itertools
import math
import random

from learner.config import (
    AdvantageConfig,
    DataConfig,
    KlConfig,
    LearnerConfig,
    LossConfig,
    OffPolicyCorrectionConfig,
    ReferenceConfig,
    RewardConfig,
)
from tests.learner.algorithm.oracle import Rule

NORMALIZATIONS = ("token", "sequence", "sequence_sum", "dr_grpo")
BOUNDS = {
    "grpo": [{}, {"clip_low": 0.1, "clip_high": 0.5}, {"dual_clip": 1.75}, {"dual_clip": math.inf}],
    "gspo": [{}, {"clip_low": 0.1, "clip_high": 0.2}, {"clip_low": 0.01, "clip_high": 0.02, "dual_clip": 1.25}],
    "cispo": [{}, {"clip_high": 0.25}],
    "sapo": [{}, {"tau_positive": 2.0, "tau_negative": 0.5}],
    "dppo": [{}, {"tv_low": 0.01, "tv_high": 0.02, "log_ratio_penalty": 0.5, "dual_clip": 1.75}],
    "gmpo": [{}, {"clip_low": 0.126, "clip_high": 0.251, "dual_clip": 1.375}],
    "vespo": [{}, {"power_positive": 1.0, "decay_positive": 0.5, "power_negative": 2.0, "decay_negative": 1.0}],
    "ipo": [{}, {"tv_low": 0.01, "tv_high": 0.02, "log_ratio_penalty": 0.5, "dual_clip": 1.75}],
    "clip_cov": [{}, {"clip_low": 0.1, "clip_high": 0.5, "dual_clip": 1.75}],
    "kl_cov": [{}, {"cov_penalty": 0.25, "dual_clip": 1.75}, {"dual_clip": math.inf}],
    "reinforce": [{}],
}
ANCHORS = {
    "behavior": {},
    "exact": {"anchor": "proximal"},
    "current": {"anchor": "proximal"},  # exact without a proximal logprob: the detached current one
    "log_linear": {"anchor": "proximal", "proximal": "log_linear"},
}
WEIGHTS = {
    "none": {},
    "truncate-token": {"weight": "truncate", "max_weight": 1.25},
    "truncate-sequence": {"weight": "truncate", "granularity": "sequence"},
    "truncate-token-two-sided": {"weight": "truncate", "max_weight": 1.25, "min_weight": 0.75},
    "truncate-sequence-negative": {
        "weight": "truncate",
        "granularity": "sequence",
        "max_weight": 1.0,
        "weighted_completions": "negative",
    },
    "truncate-geometric": {"weight": "truncate", "granularity": "geometric", "max_weight": 1.0625},
    "mask-token": {"weight": "mask"},
    "mask-token-negative": {"weight": "mask", "max_weight": 1.5, "weighted_completions": "negative"},
    "mask-sequence": {"weight": "mask", "granularity": "sequence"},
    "mask-geometric": {"weight": "mask", "granularity": "geometric", "max_weight": 1.0625},
    "mask-token-two-sided": {"weight": "mask", "max_weight": 1.75, "min_weight": 0.75},
    "mask-sequence-two-sided": {"weight": "mask", "granularity": "sequence", "max_weight": 3.0, "min_weight": 0.25},
    "mask-geometric-two-sided": {
        "weight": "mask",
        "granularity": "geometric",
        "max_weight": 1.125,
        "min_weight": 0.875,
    },
}
REJECTIONS = [
    {},
    {"sequence_mask": 0.05},
    {"max_binary_kl": 0.01},
    {"max_binary_kl": 0.125, "sequence_mask": 0.1},
    {"max_token_staleness": 0},
    {"max_token_staleness": 1, "stale_token_weight": 0.25, "sequence_mask": 0.0},
]
KLS = [
    {},
    {"coef": 0.5},
    {"coef": 0.25, "estimator": "k1", "importance_weighted": True},
    {"coef": 0.25, "estimator": "k2"},
    {"coef": 0.5, "estimator": "k3", "importance_weighted": True},
    {"coef": 0.5, "estimator": "k3_grad_k2"},
    {"coef": 0.25, "place": "reward"},
]
OTHERS = [{}, {"entropy_coef": 0.125}, {"top_entropy_frac": 0.5}, {"entropy_coef": 0.5, "top_entropy_frac": 0.5}]


def is_accepted(rule: Rule) -> bool:
    try:
        config = LearnerConfig(
            data=DataConfig(task="reverse"),
            reward=RewardConfig(functions=("exact_match",)),
            steps=1,
            max_staleness=4,
            updates_per_batch=2,
            loss=rule.loss,
            off_policy_correction=rule.off_policy_correction,
            kl=rule.kl,
            reference=ReferenceConfig(kind="fixed" if rule.kl.is_on else "none"),
            advantage=AdvantageConfig(scale="none"),
        )
    except ValueError:
        return False
    return not config.idle_keys()


def rules() -> dict[str, tuple[Rule, bool]]:
    """Return every accepted combination, and whether it has proximal logprobs.

    The other options (bounds, normalization, rejections, KL, entropy) are random for each combination.
    """
    found = {}
    cells = itertools.product(BOUNDS, ANCHORS, WEIGHTS)
    for seed, (objective, anchor, weight) in enumerate(cells):
        rng = random.Random(seed)
        kl = KlConfig(**rng.choice(KLS))
        # these have one ratio per completion, so no token may be masked
        whole = objective in ("gspo", "gmpo", "vespo")
        rejections = [r for r in REJECTIONS if not (whole and ("max_token_staleness" in r or "max_binary_kl" in r))]
        others = [o for o in OTHERS if not (whole and "top_entropy_frac" in o)]
        rule = Rule(
            LossConfig(
                objective=objective,
                normalization=rng.choice(NORMALIZATIONS),
                **rng.choice(BOUNDS[objective]),
                **rng.choice(others),
            ),
            OffPolicyCorrectionConfig(**ANCHORS[anchor], **WEIGHTS[weight], **rng.choice(rejections)),
            kl,
            kl.coef * rng.choice((1.0, 0.5)),  # 0.5: a schedule has halved it
        )
        if is_accepted(rule):
            found[f"{objective}-{anchor}-{weight}"] = (rule, anchor == "exact")
    return found


RULES = rules()
