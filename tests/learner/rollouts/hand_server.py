"""A scripted server on a real socket, and the rollouts of a run with it."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Self

import numpy as np

from learner.config import LearnerRun
from learner.rewards.scoring import Scorer
from learner.rewards.workers import RewardWorkers
from learner.rollouts.ledger import Ledger, LedgerCounts
from learner.rollouts.rollout_buffer import RolloutBuffer
from learner.rollouts.rollouts import Rollouts
from learner.run_inputs import RunInputs
from learner.servers.fleet import Fleet
from learner.servers.loop_thread import LoopThread
from protocol.channel.sockets import ServerChannel
from protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    Cancel,
    Completion,
    Generate,
    Group,
    GroupFailed,
    Hello,
    Message,
    Pulse,
    Welcome,
)
from tests.fingerprint import MODEL
from tests.learner.runs import make_run
from tests.waiting import TIMEOUT_S, until


def group_of(request: Generate, version: int) -> Group:
    """Return a group of four completions of different lengths, so that it has signal."""
    completions = [
        Completion(
            token_ids=np.arange(1, 3 + i, dtype=np.int32),
            behavior_logprobs=np.full(2 + i, -1.0, np.float32),
            versions=[(version, 2 + i)],
            finish_reason="stop",
        )
        for i in range(request.sampling.num_completions)
    ]
    return Group(group_id=request.group_id, entered_version=version, completions=completions)


def slot_of(request: Generate) -> int:
    return int(request.group_id.partition(".")[0])


def answers(server: "HandServer", request: Generate) -> list[Message]:
    return [group_of(request, server.version)]


def is_silent(server: "HandServer", request: Generate) -> list[Message]:
    return []


def fails(request: Generate) -> list[Message]:
    return [GroupFailed(group_id=request.group_id, code="engine_error", message="scripted", retryable=True)]


class HandServer:
    """Welcomes every learner, answers each Generate with `answer`, and records all messages."""

    def __init__(
        self, answer: Callable[["HandServer", Generate], list[Message]] = answers, max_concurrent_sequences: int = 8
    ) -> None:
        self.max_concurrent_sequences = max_concurrent_sequences
        self.version, self.server_id, self.is_draining = 0, "server-1", False
        self.generated: list[str] = []
        self.requests: list[Generate] = []
        self.acked: list[str] = []
        self.cancelled: list[str] = []
        self.answer = answer
        self.late_answer = is_silent
        """Answers earlier requests when the learner greets again."""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)

    async def _run(self) -> None:
        channel = ServerChannel("tcp://127.0.0.1:*")
        self.endpoint, self._loop, self._stop = channel.endpoint, asyncio.get_running_loop(), asyncio.Event()
        self._ready.set()
        tasks = [asyncio.create_task(self._serve(channel)), asyncio.create_task(self._stop.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        channel.close()

    async def _serve(self, channel: ServerChannel) -> None:
        peer = b""

        async def pulse() -> None:
            while True:
                await asyncio.sleep(0.5)
                if peer:
                    await channel.send(
                        peer,
                        Pulse(
                            server_id=self.server_id, policy_version=self.version, groups_running=0, groups_unacked=0,
                            tokens_generated=0, idle_s=0.0, is_draining=self.is_draining,
                        ),
                    )  # fmt: skip

        beating = asyncio.create_task(pulse())
        try:
            while True:
                peer, message = await channel.receive()
                for answer in self._answers(message):
                    await self._send(channel, peer, answer)
        finally:
            beating.cancel()

    async def _send(self, channel: ServerChannel, peer: bytes, answer: Message) -> None:
        await channel.send(peer, answer)

    def _answers(self, message: object) -> list[Message]:
        match message:
            case Hello():
                welcome = Welcome(
                    server_id=self.server_id, policy_version=self.version, num_workers=1, dtype="float32",
                    transports=["tcp"], devices=["cpu"], max_model_len=64,
                    max_concurrent_sequences=self.max_concurrent_sequences, is_untouched=False,
                )  # fmt: skip
                return [welcome, *(late for request in self.requests for late in self.late_answer(self, request))]
            case Generate():
                self.generated.append(message.group_id)
                self.requests.append(message)
                return self.answer(self, message)
            case Ack(group_ids=group_ids):
                self.acked += group_ids
            case Cancel(group_ids=group_ids):
                self.cancelled += group_ids
        return []

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server if it is running."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(TIMEOUT_S)


@contextmanager
def rollouts_of(run: LearnerRun) -> Iterator[tuple[Fleet, Rollouts]]:
    """Yield the rollouts of a run, not started."""
    run_inputs, directory = RunInputs(run), Path(run.run_dir).parent
    ledger = Ledger(directory / "ledger.db")
    fleet = Fleet(run, Hello(run="r", protocol_version=PROTOCOL_VERSION, model=MODEL, learner="l"), LoopThread("test"))
    with RewardWorkers(run.learner.reward) as workers:
        buffer = RolloutBuffer(run, run_inputs.prompts, ledger)
        scorer = Scorer(run.learner, run_inputs.tokenizer, workers)
        rollouts = Rollouts(run, fleet, buffer, scorer, ledger)
        try:
            yield fleet, rollouts
        finally:
            rollouts.close()
            fleet.loop.stop()
            fleet.close()
            ledger.close()


@contextmanager
def rollouts_on(
    tmp_path: Path, *servers: HandServer, version: int = 0, **learner: object
) -> Iterator[tuple[Fleet, Rollouts]]:
    """Yield started rollouts that are connected to all servers, which have no weights yet."""
    settings: dict[str, object] = {"steps": 10, "max_staleness": 1}
    run = make_run(tmp_path, *(server.endpoint for server in servers), **settings | learner)
    with rollouts_of(run) as (fleet, rollouts):
        rollouts.start(version)
        until(lambda: len(fleet.connected()) == len(servers), "all servers are connected")
        yield fleet, rollouts


@contextmanager
def published_on(tmp_path: Path, *servers: HandServer, version: int = 0, **learner: object) -> Iterator[Rollouts]:
    """Yield started rollouts whose servers all have the weights."""
    with rollouts_on(tmp_path, *servers, version=version, **learner) as (_, rollouts):
        rollouts.publish(version, *(server.server_id for server in servers))
        yield rollouts


@contextmanager
def hand_servers(*servers: HandServer) -> Iterator[None]:
    with ExitStack() as cleanup:
        for number, server in enumerate(servers):
            server.server_id = f"server-{number}"
            cleanup.enter_context(server)
        yield


def next_slots(rollouts: Rollouts, version: int = 0) -> list[int]:
    """Return the slots of the next step."""
    groups = rollouts.next_batch(version, TIMEOUT_S)
    assert groups is not None, "the groups did not arrive in time"
    return [group.slot for group in groups]


def counts(tmp_path: Path) -> LedgerCounts:
    with closing(Ledger(tmp_path / "ledger.db", read_only=True)) as ledger:
        return ledger.counts()


def dropped(tmp_path: Path) -> list[tuple[str, str]]:
    """Return the dropped groups with their reasons."""
    with closing(Ledger(tmp_path / "ledger.db", read_only=True)) as ledger:
        return [(row.group_id, row.reason or "") for row in ledger._rows("state = 'dropped'", ())]
