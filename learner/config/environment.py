"""Config of the environment in which the policy acts over several turns, instead of answering once."""

import sys

from learner.config.section import AtLeastOne, PositiveFinite, Section, require
from protocol.config_keys import MayChange


class EnvironmentConfig(Section):
    """Environment or agent that plays the policy's episodes."""

    factory: str | None = None
    """Environment class: `module:Class`, `path/to/file.py:Class`, or the built-in `guess` or `calculator`. It
    has `reset(**row)`, and optionally `get_reward()` and an attribute `done`. Conversation prompts: its other
    public methods are tools. Text prompts: it has one other method, which gets the text of each turn and
    returns the text that follows."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call in addition to the methods, named in the same way. For conversation
    prompts."""
    agent: str | None = None
    """Agent, a program that owns its loop: `module:function`, or `path/to/file.py:function`. The function is
    `async def run(data, *, base_url, api_key, http_client, **extra)`. It gets the row, calls an OpenAI
    endpoint of the learner, and returns the reward or None."""
    command: str | None = None
    """Agent as a shell command line. It runs once per episode, with OPENAI_BASE_URL, OPENAI_API_KEY, and the
    row as JSON in SLIPSTREAM_ROW. The last line of its output is the reward, if that line is a number."""
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
    timeout_s: MayChange[PositiveFinite[float]] = 10.0
    """Deadline of one method call. A process that exceeds it is killed, and the episode ends without a
    reward."""
    episode_deadline_s: MayChange[PositiveFinite[float]] = 600.0
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
