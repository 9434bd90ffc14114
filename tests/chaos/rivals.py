"""Rival learners: a learner that a user starts by mistake on a server that a run already uses.

    supervisor.py ─▶ ask: repeated Hello ─▶ the server ─▶ number of answers by type

One rival belongs to another run; the other is a second process of the same run. Invariant: a rival that is welcomed
returns the server immediately, so that the campaign can continue after this finding.
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
"""Learner id of both rivals, and the run of the first."""


def ask(endpoint: str, run: str, seconds: float) -> Counter[str]:
    """Ask for the server for `seconds`. Return the number of answers by message type."""
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
        pass  # the server is busy, or was hit by a fault
    finally:
        channel.close()
    return answers


@cache
def _model() -> ModelFingerprint:
    return fingerprint(resolve_model("tiny:digits"))
