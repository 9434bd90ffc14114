"""Rollouts against a hand-driven server on a real socket: duplicates, reconnects, staleness, resume."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from learner.batch import ScoredGroup
from learner.data import Prompts
from learner.ledger import Ledger
from learner.policy import load_tokenizer
from learner.rewards import RewardWorkers
from learner.rollouts import Rollouts
from learner.scoring import Scorer
from protocol.channel import ServerChannel
from protocol.messages import (
    PROTOCOL_VERSION,
    Ack,
    Cancel,
    Completion,
    Generate,
    Group,
    Hello,
    Message,
    ModelFingerprint,
    Pulse,
    Welcome,
)
from protocol.model_files import resolve_model
from tests.learner.test_train import make_run

TIMEOUT_S = 20.0
MODEL = ModelFingerprint(architecture="x", size="", vocab_size=16, tokenizer_hash="0")


def group_of(request: Generate, version: int) -> Group:
    """Four completions of different length, so that the group has signal."""
    completions = [
        Completion(
            token_ids=np.arange(1, 3 + i, dtype=np.int32),
            behaviour_logprobs=np.full(2 + i, -1.0, np.float32),
            versions=[(version, 2 + i)],
            finish_reason="stop",
        )
        for i in range(request.sampling.num_completions)
    ]
    return Group(group_id=request.group_id, entered_version=version, completions=completions)


class HandServer:
    """Welcomes every learner and answers each Generate by `answer`; records what came."""

    def __init__(self, answer: Callable[["HandServer", Generate], list[Message]]) -> None:
        self.version, self.server_id = 0, "server-1"
        self.generated: list[str] = []
        self.acked: list[str] = []
        self.cancelled: list[str] = []
        self._answer = answer
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
                    await channel.send(peer, Pulse(server_id=self.server_id, policy_version=self.version, groups_running=0,
                                                   groups_unacked=0, tokens_generated=0, idle_s=0.0))  # fmt: skip

        beating = asyncio.create_task(pulse())
        try:
            while True:
                peer, message = await channel.receive()
                for answer in self._answers(message):
                    await channel.send(peer, answer)
        finally:
            beating.cancel()

    def _answers(self, message: object) -> list[Message]:
        match message:
            case Hello():
                return [
                    Welcome(server_id=self.server_id, policy_version=self.version, num_workers=1, dtype="float32",
                            transports=["gloo"], max_model_len=64, max_concurrent_sequences=8)
                ]  # fmt: skip
            case Generate():
                self.generated.append(message.group_id)
                return self._answer(self, message)
            case Ack(group_ids=group_ids):
                self.acked += group_ids
            case Cancel(group_ids=group_ids):
                self.cancelled += group_ids
        return []

    def __enter__(self) -> "HandServer":
        self._thread.start()
        assert self._ready.wait(TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(TIMEOUT_S)


@contextmanager
def rollouts_on(server: HandServer, tmp_path: Path, version: int = 0, **learner: object) -> Iterator[Rollouts]:
    run = make_run(tmp_path, server.endpoint, **({"steps": 10, "max_staleness": 1} | learner))
    tokenizer = load_tokenizer(resolve_model("tiny:digits"))
    prompts = Prompts(run.learner.data, tokenizer, run.seed)
    ledger = Ledger(tmp_path / "ledger.db")
    with RewardWorkers(run.learner.reward) as workers:
        scorer = Scorer(prompts, tokenizer, workers, ledger)
        rollouts = Rollouts(
            run, Hello(run="r", protocol_version=PROTOCOL_VERSION, model=MODEL), prompts, ledger, scorer, version
        )
        try:
            rollouts.wait_for_server(TIMEOUT_S)
            yield rollouts
        finally:
            rollouts.close()
            ledger.close()


def slots(groups: list[ScoredGroup] | None) -> list[int]:
    assert groups is not None, "the groups did not come in time"
    return [group.slot for group in groups]


def counts(tmp_path: Path):
    ledger = Ledger(tmp_path / "ledger.db")
    try:
        return ledger.counts()
    finally:
        ledger.close()


def test_a_group_that_comes_twice_is_taken_once_and_acknowledged_twice(tmp_path: Path) -> None:
    def twice(server: HandServer, request: Generate) -> list[Message]:
        return [group_of(request, server.version)] * 2

    with HandServer(twice) as server, rollouts_on(server, tmp_path) as rollouts:
        rollouts.publish(0, server.server_id)
        assert slots(rollouts.take(3, TIMEOUT_S)) == [0, 1, 2]
        assert slots(rollouts.take(3, TIMEOUT_S)) == [3, 4, 5]
    assert sorted(server.acked) == sorted(2 * [f"{slot}.0" for slot in range(6)])
    assert counts(tmp_path).admitted == 6


def test_groups_are_taken_in_slot_order_whatever_order_they_come_in(tmp_path: Path) -> None:
    held: list[Generate] = []

    def backwards(server: HandServer, request: Generate) -> list[Message]:
        held.append(request)
        return [group_of(request, server.version) for request in reversed(held)] if len(held) == 6 else []

    with HandServer(backwards) as server, rollouts_on(server, tmp_path) as rollouts:
        rollouts.publish(0, server.server_id)
        assert slots(rollouts.take(3, TIMEOUT_S)) == [0, 1, 2]


def test_nothing_is_sent_before_the_server_has_weights_and_then_only_what_the_rule_allows(tmp_path: Path) -> None:
    def answer(server: HandServer, request: Generate) -> list[Message]:
        return [group_of(request, server.version)]

    with HandServer(answer) as server, rollouts_on(server, tmp_path) as rollouts:
        assert rollouts.take(1, 0.3) is None and server.generated == []
        rollouts.publish(0, server.server_id)
        assert slots(rollouts.take(3, TIMEOUT_S)) == [0, 1, 2]
        assert slots(rollouts.take(3, TIMEOUT_S)) == [3, 4, 5]
        assert rollouts.take(1, 0.3) is None and len(server.generated) == 6
        rollouts.publish(1, server.server_id)
        assert slots(rollouts.take(3, TIMEOUT_S)) == [6, 7, 8]


def test_a_group_older_than_allowed_is_dropped_counted_and_asked_for_again(tmp_path: Path) -> None:
    def old_at_first(server: HandServer, request: Generate) -> list[Message]:
        return [group_of(request, 0 if request.group_id == "1.0" else 5)]

    with HandServer(old_at_first) as server, rollouts_on(server, tmp_path, version=5) as rollouts:
        rollouts.publish(5, server.server_id)
        groups = rollouts.take(3, TIMEOUT_S)
        assert slots(groups) == [0, 1, 2] and groups is not None and groups[1].group_id == "1.1"
    assert counts(tmp_path).dropped == 1


def test_a_new_server_is_asked_again_for_everything_that_has_not_come(tmp_path: Path) -> None:
    def nothing_at_first(server: HandServer, request: Generate) -> list[Message]:
        return [group_of(request, 0)] if server.server_id == "server-2" else []

    with HandServer(nothing_at_first) as server, rollouts_on(server, tmp_path) as rollouts:
        rollouts.publish(0, server.server_id)
        assert rollouts.take(3, 0.5) is None
        before = list(server.generated)
        server.server_id = "server-2"
        rollouts.thread.call(rollouts.link._channel.send(rollouts.link._hello, TIMEOUT_S), TIMEOUT_S)
        while rollouts.wait_for_server(TIMEOUT_S).server_id != "server-2":
            rollouts.take(3, 0.1)
        rollouts.publish(0, server.server_id)
        assert slots(rollouts.take(3, TIMEOUT_S)) == [0, 1, 2]
    assert sorted(server.generated) == sorted(before * 2)


def test_a_resume_takes_every_group_up_where_the_ledger_has_it(tmp_path: Path) -> None:
    def answer(server: HandServer, request: Generate) -> list[Message]:
        return [group_of(request, server.version)] if request.group_id in ("0.0", "1.0", "2.0", "4.0") else []

    with HandServer(answer) as server, rollouts_on(server, tmp_path) as rollouts:
        rollouts.publish(0, server.server_id)
        assert slots(rollouts.take(3, TIMEOUT_S)) == [0, 1, 2]
        rollouts._ledger.consume([(f"{slot}.0", 0) for slot in range(3)], step=1)
        while len(server.acked) < 4:
            rollouts.take(3, 0.1)
        rollouts.publish(1, server.server_id)  # the rule now allows slots 0 to 8
        while len(server.generated) < 9:
            rollouts.take(3, 0.1)
    assert sorted(server.cancelled) == ["3.0", "5.0", "6.0", "7.0", "8.0"]

    everything = HandServer(lambda server, request: [group_of(request, server.version)])
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.rewind(0)
    ledger.close()
    with everything as server, rollouts_on(server, tmp_path, version=0) as rollouts:
        rollouts.publish(0, server.server_id)
        assert slots(rollouts.take(3, TIMEOUT_S)) == [0, 1, 2]
        assert slots(rollouts.take(3, TIMEOUT_S)) == [3, 4, 5]
        # Slots 6 to 8 were sent before the restart; at version 0 they would be too old when their turn comes.
        assert sorted(server.generated) == ["3.0", "5.0"]
        rollouts.publish(1, server.server_id)
        assert slots(rollouts.take(3, TIMEOUT_S)) == [6, 7, 8]
    assert sorted(server.generated) == ["3.0", "5.0", "6.0", "7.0", "8.0"]
    assert counts(tmp_path).lost == 0


def test_a_server_that_never_answers_ends_the_wait_with_the_remedy(tmp_path: Path) -> None:
    from protocol.errors import DeadlineExceeded

    with HandServer(lambda server, request: []) as server:
        endpoint = server.endpoint
    server.endpoint = endpoint
    with pytest.raises(DeadlineExceeded, match=f"no inference server answers at {endpoint} after 1 s"):
        run = make_run(tmp_path, endpoint)
        tokenizer = load_tokenizer(resolve_model("tiny:digits"))
        prompts, ledger = Prompts(run.learner.data, tokenizer, 0), Ledger(tmp_path / "ledger.db")
        with RewardWorkers(run.learner.reward) as workers:
            scorer = Scorer(prompts, tokenizer, workers, ledger)
            rollouts = Rollouts(run, Hello(run="r", protocol_version=1, model=MODEL), prompts, ledger, scorer, 0)
            try:
                rollouts.wait_for_server(1.0)
            finally:
                rollouts.close()
                ledger.close()
