"""Inputs of a run: the model's files and their digest, the tokenizer and the prompts.

Each rank reads an input once, on first use, so a rank that requests no prompts reads no data. The digest is cheap
enough for every start. It shows which weights a LoRA checkpoint belongs to, and whether all ranks have loaded the
same weights.
"""

import hashlib
import json
import logging
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from learner.config import DataConfig, LearnerRun
from learner.environments.answer import check_calls, renderer_of
from learner.environments.process import tools_of
from learner.forward.replay import routing_shape
from learner.policy.memory import ModelShape, shape_of
from learner.policy.model import load_config, load_tokenizer
from learner.prompts.chat_template import TurnFormat
from learner.prompts.prompts import Prompts
from protocol.errors import ConfigError
from protocol.messages import RoutingShape
from protocol.model_files import end_token_ids, resolve_model

log = logging.getLogger(__name__)

NUM_WINDOWS = 3
WINDOW_BYTES = 256
"""Bytes in each of the NUM_WINDOWS windows of a tensor, which are spread evenly."""
VOLATILE = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")
"""Keys of config.json that change nothing. The run has its own dtype."""


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

    def prompts_of(self, data: DataConfig) -> Prompts:
        """Return the prompts of `data`. Raises ConfigError or DataError if unusable."""
        renderer = self.run.learner.environment.tool_call_format
        if renderer is not None:
            renderer_of(self.tokenizer, renderer)  # fails early if the format does not fit
        is_for_agents = self.run.learner.environment.has_agent  # agents send their own messages
        turns = TurnFormat(renderer, frozenset(end_token_ids(self.model_path)), goes_on=not is_for_agents)
        prompts = Prompts(data, self.tokenizer, self.run.seed, self.tools, turns)
        check_calls(prompts.template)  # fails early too
        return prompts

    def tools(self) -> list[dict[str, Any]]:
        """Return the JSON schemas of the policy's tools.

        Raises:
            ConfigError: The environment or a tool fails to load.
        """
        environment = self.run.learner.environment
        has_tools = environment.is_used and not environment.has_agent  # an agent sends its own tools
        return tools_of(environment) if has_tools else []


def digest_model(path: Path) -> str:
    """Return a digest of config.json and of every tensor.

    It covers the name, dtype, shape and a sample of the values, but not the distribution over files. Training
    changes all matrices and therefore the digest. Few changed values between the windows, such as a row of an
    embedding, go unnoticed.

    Raises:
        ConfigError: A file is not a safetensors file.
    """
    config = json.loads((path / "config.json").read_bytes())
    digest = hashlib.sha256(json.dumps({key: config[key] for key in sorted(config.keys() - set(VOLATILE))}).encode())
    samples: dict[str, bytes] = {}
    for file_path in sorted(path.glob("*.safetensors")):
        with file_path.open("rb", buffering=0) as file:
            samples |= _samples(file, file_path)
    for name in sorted(samples):
        digest.update(name.encode() + samples[name])
    return digest.hexdigest()[:16]


def _samples(file: BinaryIO, path: Path) -> dict[str, bytes]:
    """Return a sample of each tensor in a safetensors file.

    The file consists of 8 bytes of length, a JSON header, and the data.

    Raises:
        ConfigError: The header is longer than the file.
    """
    start = 8 + int.from_bytes(file.read(8), "little")
    if start > path.stat().st_size:
        raise ConfigError(
            f"model: {path} is not a safetensors file (a git-lfs pointer?). Run `git lfs pull` in its directory"
        )
    header: dict[str, Any] = json.loads(file.read(start - 8))
    header.pop("__metadata__", None)
    return {name: _sample(file, start, tensor) for name, tensor in header.items()}


def _sample(file: BinaryIO, start: int, tensor: dict[str, Any]) -> bytes:
    begin, end = tensor["data_offsets"]
    num_free = max(0, end - begin - NUM_WINDOWS * WINDOW_BYTES)
    sample = f"{tensor['dtype']}{tensor['shape']}".encode()
    for window in range(NUM_WINDOWS):
        offset = begin + window * WINDOW_BYTES + (window + 1) * num_free // (NUM_WINDOWS + 1)
        file.seek(start + offset)
        sample += file.read(max(0, min(WINDOW_BYTES, end - offset)))
    return sample
