"""The built-in guessing game, as an environment and as an agent that kills, stops or hangs its own process.

Dozens of processes share a trap. Each counts its own visits; one removes the trap, records the event and commits the
fault.
"""

import asyncio
import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

from learner.environments.builtin import Guess
from tests.chaos.agent_dialects import ask, dialect_of
from tests.chaos.traps import Traps

CHAOS_DIR = "SLIPSTREAM_TEST_CHAOS_DIR"
"""Environment variable with the directory of the traps, set in the learner's process."""
FOREVER_S = 3600.0
MAX_TURNS = 4


@functools.cache
def _traps() -> Traps:
    """Return the traps of this process."""
    return Traps(Path(os.environ[CHAOS_DIR]), "environment")


def _commit_fault() -> bool:
    """Kill or stop this process if its trap says so. Return whether the caller must hang."""
    if _is_sprung("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if _is_sprung("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    return _is_sprung("hang")


def _is_sprung(kind: str) -> bool:
    is_sprung = _traps().is_sprung(kind)
    if is_sprung:
        _traps().record(kind)
    return is_sprung


class DoomedGuess(Guess):
    def guess(self, text: str) -> str:
        if _commit_fault():
            time.sleep(FOREVER_S)
        return super().guess(text)


async def doomed_agent(data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any, **extra: Any) -> float:
    """Play the same game as an agent that requests every turn itself, in the dialect of its key."""
    game, texts, dialect = Guess(), [data["prompt"]], dialect_of(api_key)
    game.reset(**data)
    for _ in range(MAX_TURNS):
        text = await ask(dialect, base_url, api_key, http_client, texts)
        if _commit_fault():
            await asyncio.sleep(FOREVER_S)
        if text is None:
            break
        texts += [text, game.guess(text)]
        if game.done:
            break
    return game.get_reward()
