"""The environment section of the learner's config: what the policy plays with, turn by turn, instead of answering once."""

import math

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

    @property
    def is_used(self) -> bool:
        """Unless it is, a completion is all there is."""
        return self.factory is not None or bool(self.tools)

    @property
    def named(self) -> str:
        """What the config names, for messages."""
        keys = {"factory": self.factory, "tools": list(self.tools)}
        return ", ".join(f"learner.environment.{key} = {value!r}" for key, value in keys.items() if value)

    def lacking(self) -> dict[str, str]:
        if self.is_used:
            return {}
        return dict.fromkeys(
            ("max_turns", "max_episode_tokens", "timeout_s", "episode_deadline_s", "max_concurrent"), "factory"
        )

    def check(self) -> None:
        for name in ("max_turns", "max_episode_tokens", "max_concurrent"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} = {value} must be at least 1")
        for name in ("timeout_s", "episode_deadline_s"):
            require(0 < getattr(self, name) < math.inf, f"{name} = {getattr(self, name)} must be above 0 and finite")
