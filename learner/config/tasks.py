"""Config of the prompts, and of the environment in which the policy acts over several turns."""

import sys
from typing import Annotated, Any, Literal

import msgspec
import tyro

from learner.config.section import AtLeastOne, Fraction, Section, Timeout, require
from protocol.config_keys import MayChange

MIN_WEIGHT = 0.01
OWN_TEMPLATE_KWARGS = {"conversation", "tokenize", "return_dict", "add_generation_prompt", "continue_final_message"}
"""Arguments of the chat template that prompts/chat_template.py passes."""


class DataConfig(Section):
    """Source of the prompts: exactly one of task, path and dataset."""

    task: str | None = None
    """Built-in task. reverse, sort or arithmetic: for `tiny:digits`; guess or calculator: for the environment
    of that name; sums, sums_held_out, products or products_held_out: for a pretrained model. A held-out task
    shares no prompt with its counterpart."""
    path: MayChange[str | None] = None
    """JSONL file, with one prompt and its columns per line."""
    dataset: MayChange[str | None] = None
    """`datasets` dataset: a hub name, or a local path written by save_to_disk or containing data files."""
    revision: MayChange[str | None] = None
    """Revision of a hub dataset: a commit, tag or branch. Pin a commit, because a resume refuses data other
    than the run's."""
    dataset_config: MayChange[str | None] = None
    """Configuration of the dataset, if it has several."""
    split: MayChange[str] = "train"
    """Split of the dataset."""
    num_prompts: MayChange[AtLeastOne[int] | None] = None
    """Maximum number of prompts, taken from the start. For a task: number of prompts to generate, 4096 by
    default. A resume may change this key, path and those of the dataset only if the prompts stay the same."""
    num_digits: AtLeastOne[int] | None = None
    """Digits of each number in a task's prompt. Default: 8 for reverse, 4 for sort, 2 for arithmetic and
    calculator."""
    prompt_column: str = "prompt"
    """Column with the prompt: a text, or a list of messages with role and content. The reward functions get
    all other columns."""
    system_prompt: str | None = None
    """System prompt before every prompt, which turns a plain prompt into a conversation. Empty: a
    conversation without a system message."""
    chat_template_kwargs: Annotated[dict[str, Any], tyro.conf.Suppress] = msgspec.field(default_factory=dict)
    """Arguments of the chat template, as in `chat_template_kwargs = {enable_thinking = false}`."""
    max_prompt_tokens: MayChange[AtLeastOne[int] | None] = None
    """Maximum number of tokens of a prompt; overlong_prompts decides what happens above it. Unset: a prompt that
    leaves no room for max_tokens in the server's context is an error."""
    overlong_prompts: Literal["error", "drop", "truncate"] = "error"
    """Handling of prompts above max_prompt_tokens. error: an error; drop: left out; truncate: sampled
    without their first tokens, while reward functions see the whole prompt; not for conversations with an
    environment, nor for agents. Their number is logged at the start and shown in the report."""
    num_workers: MayChange[AtLeastOne[int]] = 1
    """Number of processes that tokenize a file or dataset when it is first read. Later starts reuse the cache
    of `datasets` (HF_DATASETS_CACHE)."""
    shuffle: bool = True
    """Whether to use a new order of the prompts in every data epoch."""

    def unmet_needs(self) -> dict[str, str]:
        unmet_needs = {} if self.task else {"num_digits": "task"}
        if not self.dataset:
            unmet_needs |= dict.fromkeys(("dataset_config", "split", "revision"), "dataset")
        return unmet_needs if self.path or self.dataset else unmet_needs | {"num_workers": "path or dataset"}

    def check(self) -> None:
        sources = {key: value for key in ("task", "path", "dataset") if (value := getattr(self, key)) is not None}
        require(bool(sources), "task, path and dataset are unset; set one of them")
        require(
            len(sources) == 1,
            f"{', '.join(f'{key} = {value!r}' for key, value in sources.items())} are set; expected exactly one of "
            "task, path and dataset",
        )
        taken = ", ".join(key for key in self.chat_template_kwargs if key in OWN_TEMPLATE_KWARGS)
        require(
            not taken, f"chat_template_kwargs contains {taken}, which every call of the template sets itself; remove it"
        )
        require(
            self.overlong_prompts == "error" or self.max_prompt_tokens is not None,
            f'overlong_prompts = "{self.overlong_prompts}" needs max_prompt_tokens, because the choice of prompts must '
            "not depend on the server; set max_prompt_tokens",
        )


class CurriculumConfig(Section):
    """Sampling frequency of prompts."""

    kind: Literal["none", "pass_rate"] = "none"
    """Kind of curriculum. none: every prompt once per data epoch; pass_rate: mostly solved or mostly failed
    prompts less often."""
    reward: MayChange[str | None] = None
    """Name of the reward function whose mean over a group, from 0 to 1, is the pass rate. Unset: the first
    function."""
    easy_above: float = 0.75
    """Pass rate above which a prompt is easy."""
    hard_below: float = 0.25
    """Pass rate below which a prompt is hard."""
    easy_weight: MayChange[float] = 0.2
    """Share of the data epochs in which an easy prompt is sampled. It is 1 for all other prompts that are not
    hard, and for unseen ones."""
    hard_weight: MayChange[float] = 0.2
    """Share of the data epochs in which a hard prompt is sampled."""
    drop_above: MayChange[float | None] = None
    """Pass rate at or above which a prompt is not sampled again."""
    drop_below: MayChange[float | None] = None
    """Pass rate at or below which a prompt is not sampled again."""
    decay: Fraction[float] = 0.5
    """Decay of a prompt's pass rate: decay · old rate + (1 - decay) · rate of its newest group. 0: the newest
    group alone."""

    def unmet_needs(self) -> dict[str, str]:
        if self.kind == "none":
            return {key: 'kind = "pass_rate"' for key in self.__struct_fields__ if key != "kind"}
        if (self.easy_weight, self.hard_weight, self.drop_above, self.drop_below) == (1, 1, None, None):
            return {"kind": "easy_weight or hard_weight below 1, drop_above or drop_below"}
        return {}

    def check(self) -> None:
        require(
            0 <= self.hard_below <= self.easy_above <= 1,
            f"hard_below = {self.hard_below}, easy_above = {self.easy_above}: expected 0 <= hard_below <= easy_above "
            "<= 1",
        )
        for key in ("easy_weight", "hard_weight"):
            value = getattr(self, key)
            require(value == 0 or MIN_WEIGHT <= value <= 1, f"{key} = {value} must be 0, or from {MIN_WEIGHT} to 1")
        require(
            self.drop_above is None or self.easy_above < self.drop_above <= 1,
            f"drop_above = {self.drop_above} must be above easy_above = {self.easy_above} and at most 1",
        )
        require(
            self.drop_below is None or 0 <= self.drop_below < self.hard_below,
            f"drop_below = {self.drop_below} must be at least 0 and below hard_below = {self.hard_below}",
        )

    def weight(self, pass_rate: float | None) -> float:
        """Return the probability of keeping a prompt.

        `pass_rate` is None for a prompt that was not seen yet.
        """
        if pass_rate is None:
            return 1.0
        if self.drop_above is not None and pass_rate >= self.drop_above:
            return 0.0
        if self.drop_below is not None and pass_rate <= self.drop_below:
            return 0.0
        return (
            self.easy_weight
            if pass_rate > self.easy_above
            else self.hard_weight
            if pass_rate < self.hard_below
            else 1.0
        )


class EnvironmentConfig(Section):
    """Environment or agent that plays the policy's episodes."""

    factory: str | None = None
    """Environment class: `module:Class`, `path/to/file.py:Class`, or the built-in `guess` or `calculator`, or the
    same with rewards by turn, `guess_by_turn` or `calculator_by_turn`. It has `reset(**row)`, and optionally
    `get_reward()`, `get_turn_reward()`, `get_state_key()` and an attribute `done`. Conversation prompts: its other
    public methods are tools. Text prompts: it has one other method, which gets the text of each turn and
    returns the text that follows."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call in addition to the methods, named in the same way. For conversation
    prompts."""
    agent: str | None = None
    """Agent, a program that owns its loop: `module:function`, or `path/to/file.py:function`. The function is
    `async def run(data, *, base_url, api_key, http_client, **extra)`. It gets the row, calls an endpoint of
    the learner in the API of OpenAI or Anthropic, and returns the reward or None."""
    command: str | None = None
    """Agent as a shell command line. It runs once per episode, with OPENAI_BASE_URL, OPENAI_API_KEY, the same
    for ANTHROPIC, and the row as JSON in SLIPSTREAM_ROW, or in the file SLIPSTREAM_ROW_FILE for rows of any size.
    The last line of its output is the reward, if that line is a number."""
    python: MayChange[str | None] = None
    """Python interpreter of the agent, such as `envs/x/.venv/bin/python`, which needs nothing of Slipstream.
    Environments and tools also run in it; they need Python 3.11 and msgspec, and transformers for
    conversation prompts. Unset: the learner's interpreter."""
    tool_call_format: MayChange[str | None] = None
    """Format of the policy's tool calls and reasoning, by its name in the package `renderers`
    (PrimeIntellect), such as `qwen3.5`, `glm-4.5`, `llama-3`, `gpt-oss`. Unset: the tokenizer's own format
    (`response_template`), otherwise that of Hermes."""
    gateway_host: MayChange[str] = "127.0.0.1"
    """Address at which agents reach the endpoint. An address other than loopback is for agents in containers.
    Their requests are not encrypted, and only their keys protect the endpoint."""
    gateway_port: MayChange[int] = 0
    """Port of the endpoint. 0: any free port."""
    override_sampling: MayChange[bool] = False
    """Whether to ignore the sampling parameters of an agent's requests (temperature, top_p, seed, a forced
    tool_choice, response_format, ...) and to sample as the run does. false: such requests are refused."""
    max_turns: AtLeastOne[int] = 8
    """Maximum number of turns of an episode. sampling.max_tokens limits each turn."""
    max_episode_tokens: AtLeastOne[int] | None = None
    """Maximum number of tokens of an episode, including its prompt. Unset: the server's max_model_len."""
    timeout_s: MayChange[Timeout] = 10.0
    """Deadline of one method call. A process that exceeds it is killed, and the episode ends without a
    reward."""
    episode_deadline_s: MayChange[Timeout] = 600.0
    """Maximum duration of an episode, including the waits for its turns. An episode above it starts no
    further turn and ends without a reward."""
    max_concurrent: MayChange[AtLeastOne[int]] = 64
    """Maximum number of concurrent episodes, each with an instance in its own process."""
    max_memory_mib: MayChange[AtLeastOne[int] | None] = None
    """Maximum memory of the process of an environment or agent and all that it has started, including what
    its module imports. A process above it is killed, and the episode ends as env_error. Linux only. Unset: no
    limit."""

    @property
    def is_used(self) -> bool:
        """True if an environment or agent is set; otherwise an episode is one completion."""
        return self.factory is not None or bool(self.tools) or self.has_agent

    @property
    def has_agent(self) -> bool:
        """True if programs that send requests to the gateway play the episodes."""
        return self.agent is not None or self.command is not None

    @property
    def named(self) -> str:
        """Keys that are set, with their values, for error messages."""
        keys = {"factory": self.factory, "tools": list(self.tools), "agent": self.agent, "command": self.command}
        return ", ".join(f"learner.environment.{key} = {value!r}" for key, value in keys.items() if value)

    def unmet_needs(self) -> dict[str, str]:
        unmet_needs = {} if self.agent or self.factory or self.tools else {"python": "factory, tools or agent"}
        if not self.has_agent:
            unmet_needs |= dict.fromkeys(("gateway_host", "gateway_port", "override_sampling"), "agent or command")
        if not self.is_used:
            limits = ("max_turns", "max_episode_tokens", "episode_deadline_s", "max_concurrent", "max_memory_mib")
            unmet_needs |= dict.fromkeys(("tool_call_format", *limits), "factory, tools, agent or command")
        if not self.is_used or self.has_agent:
            unmet_needs["timeout_s"] = "factory or tools"
        return unmet_needs

    def check(self) -> None:
        for name in ("agent", "command", "python", "tool_call_format"):
            require(getattr(self, name) != "", f"{name} is empty; remove it, or set a value")
        require(
            self.agent is None or ":" in self.agent,
            f"agent = {self.agent!r}: expected module:function, or file.py:function",
        )
        require(0 <= self.gateway_port <= 65535, f"gateway_port = {self.gateway_port} must be between 0 and 65535")
        require(
            self.gateway_host not in ("", "0.0.0.0", "::"),
            f"gateway_host = {self.gateway_host!r} is not an address that agents can connect to; set the address at "
            "which they reach this machine",
        )
        require(
            self.max_memory_mib is None or sys.platform == "linux",
            f"max_memory_mib = {self.max_memory_mib} needs Linux, but this system is {sys.platform}; unset it",
        )
        players = [key for key in ("factory", "tools", "agent", "command") if getattr(self, key)]
        require(
            not self.has_agent or len(players) == 1,
            f"{' and '.join(players)} are set, but an agent has its own loop and tools, and a command is an agent; "
            "keep one of them",
        )
