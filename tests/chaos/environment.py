"""The built-in guessing game as an environment and as an agent, whose process dies, stops or hangs in the midst of it when its trap is sprung.

Dozens of processes share a trap: each counts its own visits, and one takes it away, and tells of it before it does what the trap says.
"""

import asyncio
import functools
import os
import signal
import time
from pathlib import Path
from typing import Any

from learner.environments.builtin import Guess
from tests.chaos.traps import Traps

CHAOS_DIR = "SLIPSTREAM_TEST_CHAOS_DIR"
"""The environment variable of the learner's process that says where the trap is."""
FOREVER_S = 3600.0
MAX_TURNS = 4


@functools.cache
def _traps() -> Traps:
    """Of this process."""
    return Traps(Path(os.environ[CHAOS_DIR]), "environment")


def _must_hang() -> bool:
    """Die or stop, if the trap says so."""
    if _is_told("kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    if _is_told("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    return _is_told("hang")


def _is_told(kind: str) -> bool:
    is_sprung = _traps().is_sprung(kind)
    if is_sprung:
        _traps().tell(kind)
    return is_sprung


class DoomedGuess(Guess):
    def guess(self, text: str) -> str:
        if _must_hang():
            time.sleep(FOREVER_S)
        return super().guess(text)


async def doomed_agent(data: dict[str, Any], *, base_url: str, api_key: str, http_client: Any, **extra: Any) -> float:
    """The same game, in which the agent asks for the turns."""
    game, text = Guess(), data["prompt"]
    game.reset(**data)
    for _ in range(MAX_TURNS):
        answer = await http_client.post(
            f"{base_url}/completions", headers={"Authorization": f"Bearer {api_key}"}, json={"prompt": text}
        )
        (choice,) = answer.raise_for_status().json()["choices"]
        if _must_hang():
            await asyncio.sleep(FOREVER_S)
        if choice["finish_reason"] == "length":
            break
        text += choice["text"] + game.guess(choice["text"])
        if game.done:
            break
    return game.get_reward()
