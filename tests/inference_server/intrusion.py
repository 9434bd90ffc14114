"""Intruders (tests/protocol/intruder.py) at a server, and a learner that works on beside them."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

import psutil

from protocol.messages import Ack, Group
from tests.fakes import Serving
from tests.inference_server.scripted_learner import ScriptedLearner

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 60.0
INTRUSION_S = 2.0
MAX_GROWTH_BYTES = 64 << 20
"""The intruders try to place many times as much in the server's memory."""
MAX_MORE_FILES = 10
"""The intruders try to open 50 at once; asyncio opens a few of its own to start them."""


async def intrude(kind: str, endpoint: str, *more: str, limit_s: float = INTRUSION_S) -> dict[str, int]:
    """Run intruders for `limit_s`, or until they are done if that is sooner."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.protocol.intruder", kind, endpoint, str(limit_s), *more,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S + limit_s)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0
    return json.loads(output)


async def work_until(done: Callable[[], bool], learner: ScriptedLearner, pause_s: float = 0.0) -> int:
    """Ask for groups one after the other, each of which must come in time; return how many came."""
    num_groups = 0
    while not done():
        await learner.generate(f"g{num_groups}", [1, 2])
        assert (await learner.receive(Group)).group_id == f"g{num_groups}"
        await learner.send(Ack(group_ids=[f"g{num_groups}"]))
        num_groups += 1
        await asyncio.sleep(pause_s)
    return num_groups


async def assert_shut_out(running: Serving, learner: ScriptedLearner, *intruders: tuple[str, ...]) -> None:
    """All of them get nothing and cost nothing, and the learner's groups keep coming meanwhile."""
    server = psutil.Process()
    files_before, memory_before = server.num_fds(), server.memory_info().rss
    intrusion = asyncio.gather(*(intrude(kind, running.endpoint, *more) for kind, *more in intruders))
    num_groups = await work_until(intrusion.done, learner)
    for counts in intrusion.result():
        assert counts["answers"] == 0 and counts["ended"] > 0, "or they have not even tried"
    assert num_groups > 3
    assert running.server.status()["run"] == learner.run
    async with asyncio.timeout(TIMEOUT_S):
        while server.num_fds() > files_before + MAX_MORE_FILES:
            await asyncio.sleep(0.1)
    assert server.memory_info().rss - memory_before < MAX_GROWTH_BYTES
