"""Config of the learner's section: every key, with its default and its checks.

    config/<area>.py    keys of the package <area>/    learner.py    the whole section

contradictions.py holds the checks across sections. Every other package imports this one; it imports none of
them.
"""

from learner.config.algorithm import AdvantageConfig, KlConfig, OffPolicyCorrectionConfig
from learner.config.evaluation import EvaluationConfig
from learner.config.learner import LearnerConfig, LearnerRun
from learner.config.loss import LossConfig
from learner.config.outputs import CheckpointConfig, ReportConfig
from learner.config.policy import LoraConfig, OptimizerConfig, ReferenceConfig, WarmStartConfig
from learner.config.rewards import RewardConfig
from learner.config.servers import ParityConfig, SamplingConfig, WeightSyncConfig
from learner.config.tasks import CurriculumConfig, DataConfig, EnvironmentConfig

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
