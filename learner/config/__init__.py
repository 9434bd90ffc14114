"""Config of the learner's section: every key, with its default and its checks.

    config/<area>.py    keys of the package <area>/    learner.py    the whole section

contradictions.py holds the checks across sections. Every other package imports this one; it imports none of
them.
"""

from learner.config.algorithm import AdvantageConfig, KlConfig, LossConfig, OffPolicyCorrectionConfig
from learner.config.environment import EnvironmentConfig
from learner.config.evaluation import EvaluationConfig
from learner.config.learner import LearnerConfig, LearnerRun
from learner.config.policy import LoraConfig, ReferenceConfig
from learner.config.prompts import CurriculumConfig, DataConfig
from learner.config.report import ReportConfig
from learner.config.rewards import RewardConfig
from learner.config.rollouts import SamplingConfig
from learner.config.servers import ParityConfig, WeightSyncConfig
from learner.config.storage import CheckpointConfig
from learner.config.training import OptimizerConfig, WarmStartConfig

__all__ = [
    "AdvantageConfig",
    "CheckpointConfig",
    "CurriculumConfig",
    "DataConfig",
    "EnvironmentConfig",
    "EvaluationConfig",
    "KlConfig",
    "LearnerConfig",
    "LearnerRun",
    "LoraConfig",
    "LossConfig",
    "OffPolicyCorrectionConfig",
    "OptimizerConfig",
    "ParityConfig",
    "ReferenceConfig",
    "ReportConfig",
    "RewardConfig",
    "SamplingConfig",
    "WarmStartConfig",
    "WeightSyncConfig",
]  # fmt: skip
