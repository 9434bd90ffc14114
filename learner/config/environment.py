"""The environment section of the learner's config: what the policy plays with, turn by turn, instead of answering once."""

import math
import sys

from learner.config.section import Section, require
from protocol.config import MayChange


class EnvironmentConfig(Section):
    """What answers the policy's turns."""

    factory: str | None = None
    """A class: `module:Class`, `path/to/file.py:Class`, or the built-in `guess` or `calculator`. It has `reset(**row)`, and
    `get_reward()` and an attribute `done` if it likes. Prompts that are conversations: its other public methods are tools. Prompts
    that are texts: it has one, which gets the text of each turn and returns the text that follows it."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call beside the methods, likewise named; for prompts that are conversations."""
    agent: str | None = None
    """A program that owns its loop: `module:function`, or `path/to/file.py:function`. It is called with the row and asks an OpenAI
    endpoint of the learner, `async def run(data, *, base_url, api_key, http_client, **extra)`; it returns the reward, or None."""
    command: str | None = None
    """The same as a command line of the shell, run once for each episode with OPENAI_BASE_URL and OPENAI_API_KEY, and the row as JSON in
    SLIPSTREAM_ROW. The last line that it prints is the reward, if it is a number."""
    python: MayChange[str | None] = None
    """The interpreter that the agent runs in, such as `envs/x/.venv/bin/python`; it needs nothing of Slipstream. Environments and tools
    run there too; they need Python 3.11 and msgspec in it, and transformers where the prompts are conversations. Unset: the learner's."""
    renderer: MayChange[str | None] = None
    """The format that the policy's calls and reasoning are read in, by its name in the package `renderers` (PrimeIntellect), such as
    `qwen3.5`, `glm-4.5`, `llama-3`, `gpt-oss`. Unset: what the tokenizer says of itself (`response_template`), else that of Hermes."""
    gateway_host: MayChange[str] = "127.0.0.1"
    """The address that agents find the endpoint at. Others than this machine's own are for agents in containers: their requests travel
    unencrypted, and only their keys keep others out."""
    gateway_port: MayChange[int] = 0
    """0: any that is free."""
    override_sampling: MayChange[bool] = False
    """Leave out what an agent's requests say about sampling (temperature, top_p, seed, a forced tool_choice, response_format, ...) and
    sample as the run does; else they are refused."""
    max_turns: int = 8
    """Of an episode; sampling.max_tokens is a turn's."""
    max_episode_tokens: int | None = None
    """An episode ends when its prompt and all that followed have so many tokens. Unset: the server's max_model_len."""
    timeout_s: MayChange[float] = 10.0
    """Deadline of one call of a method; the process that exceeds it is killed, and the episode ends without a reward."""
    episode_deadline_s: MayChange[float] = 600.0
    """An episode that has gone on for so long, waits for its turns included, begins no further turn and ends without a reward."""
    max_concurrent: MayChange[int] = 64
    """Episodes that are played at once, each with an instance in a process of its own."""
    max_memory_mib: MayChange[int | None] = None
    """Of the process of an environment or agent and all that it has started, together; whoever holds more is killed, and the episode ends
    as env_error. What its module imports counts."""

    @property
    def is_used(self) -> bool:
        """Unless it is, a completion is all there is."""
        return self.factory is not None or bool(self.tools) or self.has_agent

    @property
    def has_agent(self) -> bool:
        """The episodes are played by programs that ask the gateway."""
        return self.agent is not None or self.command is not None

    @property
    def named(self) -> str:
        """What the config names, for messages."""
        keys = {"factory": self.factory, "tools": list(self.tools), "agent": self.agent, "command": self.command}
        return ", ".join(f"learner.environment.{key} = {value!r}" for key, value in keys.items() if value)

    def lacking(self) -> dict[str, str]:
        lacking = {} if self.agent or self.factory or self.tools else {"python": "factory, tools or agent"}
        if not self.has_agent:
            lacking |= dict.fromkeys(("gateway_host", "gateway_port", "override_sampling"), "agent or command")
        if not self.is_used:
            limits = ("max_turns", "max_episode_tokens", "episode_deadline_s", "max_concurrent", "max_memory_mib")
            lacking |= dict.fromkeys(("renderer", *limits), "factory, tools, agent or command")
        if not self.is_used or self.has_agent:
            lacking["timeout_s"] = "factory or tools"
        return lacking

    def check(self) -> None:
        for name in ("max_turns", "max_episode_tokens", "max_concurrent", "max_memory_mib"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} = {value} must be at least 1")
        for name in ("timeout_s", "episode_deadline_s"):
            require(0 < getattr(self, name) < math.inf, f"{name} = {getattr(self, name)} must be above 0 and finite")
        for name in ("agent", "command", "python", "renderer"):
            require(getattr(self, name) != "", f"{name} is empty; leave it out, or name one")
        require(
            self.agent is None or ":" in self.agent,
            f"agent = {self.agent!r}: expected module:function, or file.py:function",
        )
        require(0 <= self.gateway_port <= 65535, f"gateway_port = {self.gateway_port} must lie between 0 and 65535")
        require(
            self.gateway_host not in ("", "0.0.0.0", "::"),
            f"gateway_host = {self.gateway_host!r} is no address that an agent can ask; name the one it finds this machine at",
        )
        require(
            self.max_memory_mib is None or sys.platform == "linux",
            f"max_memory_mib = {self.max_memory_mib} needs Linux, this is {sys.platform}; unset it",
        )
        players = [key for key in ("factory", "tools", "agent", "command") if getattr(self, key)]
        require(
            not self.has_agent or len(players) == 1,
            f"{' and '.join(players)} are set: an agent owns its loop and brings its own tools, and a command is an agent; keep one",
        )
