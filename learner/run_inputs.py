"""What a run is made of before it begins: the model's files, the tokenizer, the prompts.

Between the config and everything that is made from it. Each is read once per rank, when it is first asked for: a rank that asks
no prompts reads no data.
"""

import logging
from functools import cached_property
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from learner.config import DataConfig, LearnerRun
from learner.environments.answer import check_calls, renderer_of
from learner.environments.process import tools_of
from learner.policy.memory import ModelShape, kv_bytes_per_token, learner_memory, server_memory, shape_of, told
from learner.policy.model import load_config, load_tokenizer
from learner.policy.model_digest import digest_model
from learner.prompts.chat_template import Turns
from learner.prompts.prompts import Prompts
from protocol.doctor import of_dtype
from protocol.model_files import end_token_ids, resolve_model

log = logging.getLogger(__name__)
WORTH_A_LINE_GIB = 4.0


class RunInputs:
    """Of one run."""

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
        """What memory and speed are estimated from; None, with a warning, where the config does not tell."""
        config = self.model_config
        try:
            return shape_of(config)
        except Exception as error:  # of a config of transformers; no estimate is worth a run
            log.warning("the memory that %s needs is not known: %s: %s", self.run.model, type(error).__name__, error)
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
        is_for_agents = self.run.learner.environment.has_agent  # they ask with messages of their own
        turns = Turns(renderer, frozenset(end_token_ids(self.model_path)), goes_on=not is_for_agents)
        prompts = Prompts(data, self.tokenizer, self.run.seed, self.tools, turns)
        check_calls(prompts.template)  # likewise
        return prompts

    def tools(self) -> list[dict[str, Any]]:
        """The JSON schemas of what the policy is told that it can call. Raises ConfigError."""
        environment = self.run.learner.environment
        has_tools = environment.is_used and not environment.has_agent  # an agent tells the policy of its own
        return tools_of(environment) if has_tools else []

    def log_needs(self, accelerator: Accelerator) -> None:
        """Log what this run will compute in and need, if it is much, before anything of it is loaded."""
        shape, run = self.shape, self.run
        if shape is None:
            return
        memory = learner_memory(
            shape,
            run,
            num_ranks=accelerator.num_processes,
            is_sharded=accelerator.is_fsdp2,
            device_type=accelerator.device.type,
        )
        if memory.device_gib + memory.host_gib < WORTH_A_LINE_GIB:
            return
        log.info(of_dtype(run.dtype).text)
        log.info(
            "%s parameters; the learner needs about %s; a server of one worker %s, and %.0f KiB for each token in flight",
            f"{shape.num_parameters:,}", told(memory), told(server_memory(shape, run)), kv_bytes_per_token(shape, run) / 1024,
        )  # fmt: skip
