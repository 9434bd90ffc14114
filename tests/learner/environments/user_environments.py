"""Environments as users write them, good and bad; named `tests.learner.environments.user_environments:Class`."""

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np


class ShowsPrompt:
    """Shows the prompt that it gets, and ends after a turn."""

    done = False

    def reset(self, prompt: str, **row: Any) -> str:
        return prompt

    def tell(self, text: str) -> str:
        self.done = True
        return ""

    def get_reward(self) -> float:
        return 0.0


class NeverSetsDone(ShowsPrompt):
    """Leaves `done` as the last episode set it."""

    done = True


class DoneAsMethod(ShowsPrompt):
    """Has a method, which is always true, where `done` is expected."""

    def done(self) -> bool:  # type: ignore[override]
        return False


class Echo:
    """Repeats each text, until the text is "stop"."""

    def __init__(self) -> None:
        self.done = False
        self._told: list[str] = []

    def reset(self, greeting: str = "", **row: Any) -> str | None:
        self.done, self._told = False, []
        return greeting or None

    def tell(self, text: str) -> str:
        self._told.append(text)
        self.done = "stop" in text
        return f"<{text}>"

    def get_reward(self) -> float:
        return float(len(self._told))


class Slow(Echo):
    """Takes long for each turn."""

    def tell(self, text: str) -> str:
        time.sleep(0.2)
        return super().tell(text)


class Asynchronous:
    """Depends on a single event loop."""

    async def reset(self, **row: Any) -> str:
        self._loop = asyncio.get_running_loop()
        return "begun"

    async def tell(self, text: str) -> str:
        if text == "cancel":
            task = asyncio.create_task(asyncio.sleep(60))
            task.cancel()
            await task
        return f"{text} in {'the same' if asyncio.get_running_loop() is self._loop else 'another'} loop"

    async def get_reward(self) -> Any:
        return np.float32(0.5)


class Treacherous(Echo):
    """Misbehaves as the text says."""

    def reset(self, **row: Any) -> None:
        super().reset()
        if row.get("prompt") == "raise":
            raise ValueError("no such row")

    def tell(self, text: str) -> str:
        match text:
            case "sleep":
                time.sleep(600)
            case "hoard":
                held = bytearray(300 << 20)
                time.sleep(600)
                return str(len(held))
            case "leave":
                return str(subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
            case "exit":
                os._exit(3)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise":
                raise KeyError("no such word")
            case "number":
                return 7  # type: ignore[return-value]
        return super().tell(text)


class Fickle:
    """Every fourth episode does not start. Of eight turns one hangs, one ends its process, and one raises.

    The processes of a run count together, in files next to this one: a test uses a copy of it.
    """

    def reset(self, **row: Any) -> None:
        if _count("resets") % 4 == 0:
            raise ValueError("not now")

    def answer(self, text: str) -> str:
        match _count("turns") % 8:
            case 2:
                time.sleep(600)
            case 4:
                os._exit(3)
            case 6:
                raise ValueError("=")
        return ">"

    def get_reward(self) -> float:
        return float(os.urandom(1)[0] % 2)  # not of the pid: those of forks may all be even


def _count(what: str) -> int:
    """Return how often this was called in all processes."""
    with Path(__file__).with_name(what).open("ab", buffering=0) as file:
        file.write(b".")
        return file.tell()


class TwoMethods(Echo):
    def whisper(self, text: str) -> str:
        return text.lower()


class WithoutReset:
    def tell(self, text: str) -> str:
        return text


class Unrated:
    def reset(self, **row: Any) -> None:
        """Start without a message."""

    def tell(self, text: str) -> None:
        """Return no text."""


class Overrated(Unrated):
    def get_reward(self) -> str:
        return "much"


class Counting(Echo):
    """Rewards each turn by its length, and names its state by the number of turns."""

    def tell(self, text: str) -> str:
        self._length: int | None = None
        if text == "raise":
            raise ValueError("no")
        self._length = len(text)
        return super().tell(text)

    async def get_turn_reward(self) -> Any:
        return None if self._length is None else np.float32(self._length)

    def get_state_key(self) -> tuple[str, Any]:
        return "a", np.int64(len(self._told))

    def get_reward(self) -> float:
        return 0.5


class OnlyTurns:
    def reset(self, **row: Any) -> None:
        """Start without a message."""

    def tell(self, text: str) -> None:
        """Return no text."""

    def get_turn_reward(self) -> float:
        return 0.5


class Withdrawn(OnlyTurns):
    def get_reward(self) -> None:
        """Return no reward."""


class Incomparable(OnlyTurns):
    def get_turn_reward(self) -> float:
        return float("nan")

    def get_state_key(self) -> object:
        return object()


def not_a_class() -> None:
    """Do nothing."""


class Verbose(Unrated):
    """Returns texts so long that four turns exceed a block of the server's KV cache."""

    def tell(self, text: str) -> str:  # type: ignore[override]
        return "=" * 12

    def get_reward(self) -> float:
        return float(os.urandom(1)[0] % 2)  # not of the pid: those of forks may all be even


class Calculator:
    """Every public method is a tool, as in TRL's documentation."""

    def __init__(self) -> None:
        self.total = 0

    def reset(self, start: int = 0, hint: str = "", **row: Any) -> str | None:
        self.total = start
        return hint or None

    def add(self, number: int) -> str:
        """
        Add to the total.

        Args:
            number: What is added.

        Returns:
            The new total.
        """
        self.total += number
        return str(self.total)

    async def show(self) -> int:
        """Return the total."""
        return self.total

    def refuse(self, why: str) -> str:
        """
        Fail.

        Args:
            why: The error message.
        """
        raise ValueError(why)

    async def get_reward(self) -> float:
        return float(self.total)


class RewardedCalculator(Calculator):
    """Rewards a turn by what it adds, and names its state by the total."""

    def reset(self, start: int = 0, hint: str = "", **row: Any) -> str | None:
        self._before = start
        return super().reset(start, hint, **row)

    def get_turn_reward(self) -> float:
        before, self._before = self._before, self.total
        return self.total - before

    def get_state_key(self) -> int:
        return self.total

    async def get_reward(self) -> float:
        return 0.0


class WithoutDocstring(Unrated):
    def untold(self, number: int) -> str:
        return str(number)


def add(number: int) -> int:
    """
    The name of a method of Calculator.

    Args:
        number: The return value.
    """
    return number


class Listener:
    """Answers every text briefly."""

    def reset(self, **row: Any) -> None:
        """Start without a message."""

    def tell(self, text: str) -> str:
        """
        Listen.

        Args:
            text: Anything.
        """
        return f"{len(text)} heard"

    def get_reward(self) -> float:
        return float(os.urandom(1)[0] % 2)  # not of the pid: those of forks may all be even
