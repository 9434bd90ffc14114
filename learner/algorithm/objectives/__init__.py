"""Policy objectives, one file each: from a token's log-ratio and advantage to its loss.

Pure: loss.py masks, weights and sums. learner/config/objectives.py has a row for each, with the keys that it reads.
"""

from learner.algorithm.contract import Losses, Objective, Pick, PickedTokens, StepTokens, Tokens
from learner.algorithm.objectives.cispo import cispo
from learner.algorithm.objectives.clip_cov import clip_cov, clip_cov_pick
from learner.algorithm.objectives.dppo import dppo
from learner.algorithm.objectives.gmpo import gmpo
from learner.algorithm.objectives.grpo import grpo
from learner.algorithm.objectives.gspo import gspo
from learner.algorithm.objectives.ipo import ipo
from learner.algorithm.objectives.kl_cov import kl_cov, kl_cov_pick
from learner.algorithm.objectives.reinforce import reinforce
from learner.algorithm.objectives.sapo import sapo
from learner.algorithm.objectives.vespo import vespo

__all__ = ["OBJECTIVES", "PICKS", "Losses", "Objective", "Pick", "PickedTokens", "StepTokens", "Tokens"]

OBJECTIVES: dict[str, Objective] = {
    "grpo": grpo,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
    "dppo": dppo,
    "ipo": ipo,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "reinforce": reinforce,
}

PICKS: dict[str, Pick] = {"clip_cov": clip_cov_pick, "kl_cov": kl_cov_pick}
"""How the objectives that need `PickedTokens` choose them among the tokens of the whole step."""
