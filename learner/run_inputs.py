"""Inputs of a run: the model's files and their digest, the tokenizer and the prompts.

Each rank reads an input once, on first use, so a rank that requests no prompts reads no data. The digest is cheap
enough for every start. It shows which weights a LoRA checkpoint belongs to, and whether all ranks have loaded the
same weights.
"""

import logging
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from learner.config import DataConfig, LearnerRun
from learner.environments.answer import check_calls, renderer_of
from learner.environments.process import tools_of
from learner.forward.replay import routing_shape
from learner.policy.model import load_config, load_tokenizer
from learner.policy.model_shape import ModelShape, shape_of
from learner.prompts.chat_template import TurnFormat
from learner.prompts.prompts import Prompts
from learner.rewards.function import check_columns
from protocol.errors import ConfigError
from protocol.messages import RoutingShape
from protocol.model_digest import digest_model
from protocol.model_files import end_token_ids, resolve_model

log = logging.getLogger(__name__)


class RunInputs:
    """Inputs of one run, each read on first use."""

    def __init__(self, run: LearnerRun) -> None:
        self.run = run

    @cached_property
    def model_path(self) -> Path:
        return resolve_model(self.run.model)

    @cached_property
    def model_digest(self) -> str:
        return digest_model(self.model_path)

    @cached_property
    def model_config(self) -> PreTrainedConfig:
        return load_config(self.model_path)

    @cached_property
    def shape(self) -> ModelShape | None:
        """Model shape for memory and speed estimates.

        None, with a warning, if the model's config does not define it.
        """
        config = self.model_config
        try:
            return shape_of(config)
        except Exception as error:  # transformers configs vary; a failed estimate must not stop a run
            log.warning("cannot estimate the memory needs of %s (%s: %s)", self.run.model, type(error).__name__, error)
            return None

    @cached_property
    def experts(self) -> RoutingShape | None:
        """Shape of the routed experts to replay, or None without learner.routing_replay.

        Raises:
            ConfigError: The model has no experts.
        """
        if not self.run.learner.routing_replay:
            return None
        shape = routing_shape(self.model_config)
        if shape is None:
            raise ConfigError(
                f"learner.routing_replay = true, but the config of model = {self.run.model!r} names no experts; set "
                "learner.routing_replay = false"
            )
        return shape

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self.model_path)

    @cached_property
    def prompts(self) -> Prompts:
        return self.prompts_of(self.run.learner.data)

    def prompts_of(self, data: DataConfig, trained: DataConfig | None = None) -> Prompts:
        """Return the prompts of `data`. Raises ConfigError, DataError or RewardError if unusable.

        `trained`: the run's data, of which an evaluation of the same task has no prompt.
        """
        renderer = self.run.learner.environment.tool_call_format
        if renderer is not None:
            renderer_of(self.tokenizer, renderer)  # fails early if the format does not fit
        environment = self.run.learner.environment
        is_for_agents = environment.has_agent  # agents send their own messages
        turns = TurnFormat(renderer, frozenset(end_token_ids(self.model_path)), goes_on=not is_for_agents)
        prompts = Prompts(data, self.tokenizer, self.run.seed, self.tools, turns, trained)
        check_calls(prompts.template)  # fails early too
        if environment.is_used and not is_for_agents:
            prompts.check_one_kind(environment.named)
        if is_for_agents or (environment.is_used and prompts.are_conversations):
            prompts.check_whole(environment.named)
        check_columns(self.run.learner.reward, prompts.name, prompts.prompt_at(0).columns)
        return prompts

    def tools(self) -> list[dict[str, Any]]:
        """Return the JSON schemas of the policy's tools.

        Raises:
            ConfigError: The environment or a tool fails to load.
        """
        environment = self.run.learner.environment
        has_tools = environment.is_used and not environment.has_agent  # an agent sends its own tools
        return tools_of(environment) if has_tools else []
