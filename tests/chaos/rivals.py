"""Learners that want the server of a run for themselves: what a user starts by mistake, on a server that is in use.

    supervisor.py ─▶ ask: Hello, again and again ─▶ the server ─▶ how often it answered what

One is of another run; the other is a second process of the same run. Invariant: whoever is welcomed gives the server back
at once, so that a campaign goes on after it has found one that was taken away.
"""

import asyncio
import time
from collections import Counter
from functools import cache

from protocol.channel.sockets import LearnerChannel
from protocol.errors import DeadlineExceeded, ProtocolError
from protocol.messages import PROTOCOL_VERSION, Farewell, Hello, ModelFingerprint, Welcome
from protocol.model_files import fingerprint, resolve_model

ASK_EVERY_S = 0.05
RIVAL = "a rival"
"""The learner's id of both, and the run of the first."""


def ask(endpoint: str, run: str, seconds: float) -> Counter[str]:
    """Ask for the server for so long; return how often each kind of message came."""
    return asyncio.run(_ask(endpoint, run, time.monotonic() + seconds))


async def _ask(endpoint: str, run: str, until_s: float) -> Counter[str]:
    channel, answers = LearnerChannel(endpoint), Counter[str]()
    hello = Hello(run=run, learner=RIVAL, protocol_version=PROTOCOL_VERSION, model=_model())
    try:
        while (left_s := until_s - time.monotonic()) > 0:
            await channel.send(hello, left_s)
            async with asyncio.timeout(left_s):
                answer = await channel.receive()
            answers[type(answer).__name__] += 1
            if isinstance(answer, Welcome):
                await channel.send(Farewell(is_over=True), left_s)
            await asyncio.sleep(ASK_EVERY_S)
    except (DeadlineExceeded, TimeoutError, ProtocolError):
        pass  # the server is busy, or was struck itself
    finally:
        channel.close()
    return answers


@cache
def _model() -> ModelFingerprint:
    return fingerprint(resolve_model("tiny:digits"))
