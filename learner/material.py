"""What a run is made of before it begins: the model's files, the tokenizer, the prompts.

Between the config and everything that is made from it. Each is read once per rank, when it is first asked for: a rank that asks
no prompts reads no data.
"""

import logging
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, PreTrainedTokenizerBase

from learner.config import DataConfig, LearnerRun
from learner.environments.answer import renderer_of
from learner.environments.process import tools_of
from learner.policy.memory import ModelShape, shape_of
from learner.policy.model import load_tokenizer
from learner.prompts.prompts import Prompts
from protocol.model_files import resolve_model

log = logging.getLogger(__name__)


class Material:
    """Of one run."""

    def __init__(self, run: LearnerRun) -> None:
        self.run = run

    @cached_property
    def model_path(self) -> Path:
        return resolve_model(self.run.model)

    @cached_property
    def model_config(self) -> PreTrainedConfig:
        return AutoConfig.from_pretrained(self.model_path)

    @cached_property
    def shape(self) -> ModelShape | None:
        """What memory and speed are reckoned with; None, and a line, for a model that cannot be built from its config alone."""
        try:
            return shape_of(self.model_config)
        except (AttributeError, KeyError, ValueError) as error:
            log.warning("the memory that %s needs is not known: %s", self.run.model, error)
            return None

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.model_path)

    @cached_property
    def prompts(self) -> Prompts:
        return self.prompts_of(self.run.learner.data)

    def prompts_of(self, data: DataConfig) -> Prompts:
        """Raises ConfigError and DataError."""
        renderer = self.run.learner.environment.renderer
        if renderer is not None:
            renderer_of(self.tokenizer, renderer)  # says now what does not fit
        return Prompts(data, self.tokenizer, self.run.seed, self.tools, renderer)

    def tools(self) -> list[dict[str, Any]]:
        """The JSON schemas of what the policy is told that it can call. Raises ConfigError."""
        environment = self.run.learner.environment
        has_tools = environment.is_used and not environment.has_agent  # an agent tells the policy of its own
        return tools_of(environment) if has_tools else []
