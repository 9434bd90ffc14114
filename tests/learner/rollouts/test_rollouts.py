"""Rollouts against a hand-driven server on a real socket: duplicates, reconnects, staleness, resume."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from learner.config import LearnerRun
from learner.rewards.scoring import Scorer
from learner.rewards.workers import RewardWorkers
from learner.rollouts.ledger import Ledger
from learner.rollouts.rollout_buffer import RolloutBuffer
from learner.rollouts.rollout_group import RolloutGroup
from learner.rollouts.rollouts import Rollouts
from learner.run_inputs import RunInputs
from learner.servers.fleet import Fleet
from learner.servers.loop_thread import LoopThread
from protocol.channel.sockets import ServerChannel
from protocol.codec import pack
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
    Sampling,
    Welcome,
)
from tests.learner.ledgers import receive
from tests.learner.runs import make_run

TIMEOUT_S = 60.0
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


def alike(request: Generate, version: int) -> Group:
    """The same completion every time, so that the group has no signal."""
    group = group_of(request, version)
    return msgspec.structs.replace(group, completions=[group.completions[0]] * len(group.completions))


def without_tokens(request: Generate, version: int, num_empty: int) -> Group:
    empty = Completion(
        token_ids=np.zeros(0, np.int32), behaviour_logprobs=np.zeros(0, np.float32), versions=[], finish_reason="stop"
    )
    group = group_of(request, version)
    return msgspec.structs.replace(group, completions=[empty] * num_empty + group.completions[num_empty:])


def slot_of(request: Generate) -> int:
    return int(request.group_id.partition(".")[0])


class HandServer:
    """Welcomes every learner and answers each Generate by `answer`; records what came."""

    def __init__(
        self, answer: Callable[["HandServer", Generate], list[Message]], max_concurrent_sequences: int = 8
    ) -> None:
        self.max_concurrent_sequences = max_concurrent_sequences
        self.version, self.server_id, self.is_draining = 0, "server-1", False
        self.generated: list[str] = []
        self.requests: list[Generate] = []
        self.acked: list[str] = []
        self.cancelled: list[str] = []
        self.num_running = 0
        """As it counts."""
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
                    await channel.send(peer, Pulse(server_id=self.server_id, policy_version=self.version,
                                                   groups_running=self.num_running,
                                                   groups_unacked=0, tokens_generated=0, idle_s=0.0,
                                                   is_draining=self.is_draining))  # fmt: skip

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
                            transports=["gloo"], devices=["cpu"], max_model_len=64,
                            max_concurrent_sequences=self.max_concurrent_sequences, is_untouched=False)
                ]  # fmt: skip
            case Generate():
                self.generated.append(message.group_id)
                self.requests.append(message)
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
        self.close()

    def close(self) -> None:
        """End, if it has not ended."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(TIMEOUT_S)


@contextmanager
def rollouts_of(run: LearnerRun) -> Iterator[tuple[Fleet, Rollouts]]:
    """The rollouts of a run, not started."""
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
def rollouts_on(server: HandServer, tmp_path: Path, version: int = 0, **learner: object) -> Iterator[Rollouts]:
    run = make_run(tmp_path, server.endpoint, **({"steps": 10, "max_staleness": 1} | learner))
    with rollouts_of(run) as (fleet, rollouts):
        rollouts.start(version)
        fleet.wait()
        yield rollouts


def slots(groups: list[RolloutGroup] | None) -> list[int]:
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
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 1, 2]
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [3, 4, 5]
    assert sorted(server.acked) == sorted(2 * [f"{slot}.0" for slot in range(6)])
    assert counts(tmp_path).admitted == 6


def test_groups_are_taken_in_slot_order_whatever_order_they_come_in(tmp_path: Path) -> None:
    held: list[Generate] = []

    def backwards(server: HandServer, request: Generate) -> list[Message]:
        held.append(request)
        return [group_of(request, server.version) for request in reversed(held)] if len(held) == 6 else []

    with HandServer(backwards) as server, rollouts_on(server, tmp_path) as rollouts:
        rollouts.publish(0, server.server_id)
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 1, 2]


def test_nothing_is_sent_before_the_server_has_weights_and_then_only_what_the_rule_allows(tmp_path: Path) -> None:
    def answer(server: HandServer, request: Generate) -> list[Message]:
        return [group_of(request, server.version)]

    with HandServer(answer) as server, rollouts_on(server, tmp_path) as rollouts:
        assert rollouts.next_batch(0, 0.3) is None and server.generated == []
        rollouts.publish(0, server.server_id)
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 1, 2]
        assert rollouts.batch_metrics["bottleneck/weight_sync"] >= 0.3
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [3, 4, 5]
        assert rollouts.next_batch(0, 0.3) is None and len(server.generated) == 6
        rollouts.publish(1, server.server_id)
        assert slots(rollouts.next_batch(1, TIMEOUT_S)) == [6, 7, 8]


def test_a_group_older_than_allowed_is_dropped_counted_and_asked_for_again(tmp_path: Path) -> None:
    def old_at_first(server: HandServer, request: Generate) -> list[Message]:
        return [group_of(request, 0 if request.group_id == "1.0" else 5)]

    with HandServer(old_at_first) as server, rollouts_on(server, tmp_path, version=5) as rollouts:
        rollouts.publish(5, server.server_id)
        groups = rollouts.next_batch(5, TIMEOUT_S)
        assert slots(groups) == [0, 1, 2] and groups is not None and groups[1].group_id == "1.1"
    assert counts(tmp_path).dropped == 1


def test_a_new_server_is_asked_again_for_everything_that_has_not_come(tmp_path: Path) -> None:
    def nothing_at_first(server: HandServer, request: Generate) -> list[Message]:
        return [group_of(request, 0)] if server.server_id == "server-2" else []

    with HandServer(nothing_at_first) as server, rollouts_on(server, tmp_path) as rollouts:
        rollouts.publish(0, server.server_id)
        assert rollouts.next_batch(0, 0.5) is None
        before = list(server.generated)
        server.server_id = "server-2"
        (member,) = rollouts._fleet.members
        rollouts._loop.call(member.link._channel.send(rollouts._fleet.hello, TIMEOUT_S), TIMEOUT_S)
        while member.welcome is None or member.welcome.server_id != "server-2":
            rollouts.next_batch(0, 0.1)
        rollouts.publish(0, server.server_id)
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 1, 2]
    assert sorted(server.generated) == sorted(before * 2)


def test_groups_that_come_together_are_committed_together_beside_the_loop_and_only_then_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, score, disk_writes = Ledger.receive, Ledger.score, threading.Event()
    statements: list[str] = []

    def slow(ledger: Ledger, *args: Any) -> bool:
        assert threading.current_thread().name != "test", "in the loop's thread"
        assert disk_writes.wait(TIMEOUT_S)
        return receive(ledger, *args)

    def beside(ledger: Ledger, *args: Any) -> None:
        assert threading.current_thread().name != "test", "in the loop's thread"
        score(ledger, *args)

    monkeypatch.setattr(Ledger, "receive", slow)
    monkeypatch.setattr(Ledger, "score", beside)
    with (
        HandServer(lambda server, request: [group_of(request, server.version)]) as server,
        rollouts_on(server, tmp_path) as rollouts,
    ):
        rollouts._ledger._db.set_trace_callback(lambda statement: statements.append(statement[:40]))
        rollouts.publish(0, server.server_id)
        deadline = time.monotonic() + TIMEOUT_S
        while not 6 > rollouts._buffer.num("admitted", "requested") <= len(rollouts._arrived):
            assert time.monotonic() < deadline, "the groups did not come"
            rollouts._loop.call(asyncio.sleep(0.01), TIMEOUT_S)
        rollouts._loop.call(rollouts._fleet.members[0].link.cancel(["a later message"]), TIMEOUT_S)
        while not server.cancelled:
            assert time.monotonic() < deadline, "the server does not hear the learner"
            time.sleep(0.01)
        assert server.acked == []
        disk_writes.set()
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 1, 2]
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [3, 4, 5]
    received = [statement for statement in statements if "'received'" in statement or statement == "COMMIT"]
    batches = [batch for batch in "".join("r" if "re" in s else "C" for s in received).split("C") if batch]
    assert sum(map(len, batches)) == 6 and len(batches) <= 2, batches
    assert sorted(server.acked) == [f"{slot}.0" for slot in range(6)]


def test_a_resume_takes_every_group_up_where_the_ledger_has_it(tmp_path: Path) -> None:
    def answer(server: HandServer, request: Generate) -> list[Message]:
        return [group_of(request, server.version)] if request.group_id in ("0.0", "1.0", "2.0", "4.0") else []

    with HandServer(answer) as server, rollouts_on(server, tmp_path) as rollouts:
        rollouts.publish(0, server.server_id)
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 1, 2]
        rollouts._ledger.consume([(f"{slot}.0", 0) for slot in range(3)], step=1)
        while len(server.acked) < 4:
            rollouts.next_batch(0, 0.1)
        rollouts.publish(1, server.server_id)  # the rule now allows slots 0 to 8
        while len(server.generated) < 9:
            rollouts.next_batch(1, 0.1)
    assert sorted(server.cancelled) == ["3.0", "5.0", "6.0", "7.0", "8.0"]

    everything = HandServer(lambda server, request: [group_of(request, server.version)])
    ledger = Ledger(tmp_path / "ledger.db")
    ledger.rewind(0)
    ledger.close()
    with everything as server, rollouts_on(server, tmp_path, version=0) as rollouts:
        rollouts.publish(0, server.server_id)
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 1, 2]
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [3, 4, 5]
        # Slots 6 to 8 were sent before the restart; at version 0 they would be too old when their turn comes.
        assert sorted(server.generated) == ["3.0", "5.0"]
        rollouts.publish(1, server.server_id)
        assert slots(rollouts.next_batch(1, TIMEOUT_S)) == [6, 7, 8]
    assert sorted(server.generated) == ["3.0", "5.0", "6.0", "7.0", "8.0"]
    assert counts(tmp_path).lost == 0


def test_a_server_that_never_answers_ends_the_wait_with_the_remedy(tmp_path: Path) -> None:
    from protocol.errors import DeadlineExceeded

    with HandServer(lambda server, request: []) as server:
        endpoint = server.endpoint
    server.endpoint = endpoint
    run = make_run(tmp_path, endpoint, connect_timeout_s=1.0)
    with (
        pytest.raises(DeadlineExceeded, match=f"no inference server answers at {endpoint} after 1 s"),
        rollouts_of(run) as (fleet, rollouts),
    ):
        rollouts.start(0)
        fleet.wait()


def dropped(tmp_path: Path) -> list[tuple[str, str]]:
    with sqlite3.connect(tmp_path / "ledger.db") as db:
        return db.execute(
            "SELECT group_id, reason FROM groups WHERE state = 'dropped' ORDER BY slot, attempt"
        ).fetchall()


def test_a_group_goes_on_with_two_survivors_and_is_asked_again_with_one(tmp_path: Path) -> None:
    def lossy(server: HandServer, request: Generate) -> list[Message]:
        group = group_of(request, server.version)
        match request.group_id:
            case "0.0":
                return [without_tokens(request, server.version, 2)]
            case "1.0":
                return [without_tokens(request, server.version, 3)]
            case "1.1":
                return [msgspec.structs.replace(group, completions=group.completions[:1])]
            case "2.0":
                return [msgspec.structs.replace(group, completions=group.completions[:3])]
        return [group]

    with HandServer(lossy) as server, rollouts_on(server, tmp_path) as rollouts:
        rollouts.publish(0, server.server_id)
        groups = rollouts.next_batch(0, TIMEOUT_S)
        assert groups is not None
        assert [(group.group_id, len(group.completions), len(group.rewards_G)) for group in groups] == [
            ("0.0", 2, 2), ("1.2", 4, 4), ("2.0", 3, 3),
        ]  # fmt: skip
        assert all(len(completion.token_ids) for group in groups for completion in group.completions)
        assert rollouts.batch_metrics["rollout/lost_completions"] == 3
    assert dropped(tmp_path) == [("1.0", "too_few_survivors"), ("1.1", "too_few_survivors")]
    assert {"1.0", "1.1"} <= set(server.acked)


def test_a_prompt_whose_groups_never_survive_is_given_up(tmp_path: Path) -> None:
    def lossy(server: HandServer, request: Generate) -> list[Message]:
        return [without_tokens(request, 0, 3) if slot_of(request) == 1 else group_of(request, 0)]

    with HandServer(lossy) as server, rollouts_on(server, tmp_path) as rollouts:
        rollouts.publish(0, server.server_id)
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 2, 3]
    assert [reason for _, reason in dropped(tmp_path)] == ["too_few_survivors", "too_few_survivors", "failed"]


def test_a_group_that_could_not_be_scored_is_asked_again_and_its_prompt_then_recorded_as_failed(tmp_path: Path) -> None:
    reward = {"functions": ["tests/learner/rewards/broken_rewards.py:raises_for_two_tokens"], "max_failed_share": 0.9}

    def unlucky(server: HandServer, request: Generate) -> list[Message]:
        """Slot 1 fails once, slot 2 always."""
        group = group_of(request, server.version)
        is_broken = request.group_id == "1.0" or slot_of(request) == 2
        return [group if is_broken else msgspec.structs.replace(group, completions=group.completions[1:])]

    with HandServer(unlucky) as server, rollouts_on(server, tmp_path, reward=reward) as rollouts:
        rollouts.publish(0, server.server_id)
        groups = rollouts.next_batch(0, TIMEOUT_S)
        assert groups is not None and [group.group_id for group in groups] == ["0.0", "1.1", "3.0"]
        assert (
            rollouts.batch_metrics["rollout/rewards_failed"],
            rollouts.batch_metrics["rollout/rewards_timed_out"],
        ) == (4, 0)
    assert dropped(tmp_path) == [
        ("1.0", "unscorable"), ("2.0", "unscorable"), ("2.1", "unscorable"), ("2.2", "failed"),
    ]  # fmt: skip
    assert counts(tmp_path).lost == 0


def test_a_resume_remembers_how_often_a_prompt_has_failed(tmp_path: Path) -> None:
    asked_again = threading.Event()

    def lossy(server: HandServer, request: Generate) -> list[Message]:
        if request.group_id == "1.1" and not asked_again.is_set():
            asked_again.set()
            return []
        return [without_tokens(request, 0, 3) if slot_of(request) == 1 else group_of(request, 0)]

    with HandServer(lossy) as server:
        with rollouts_on(server, tmp_path) as rollouts:
            rollouts.publish(0, server.server_id)
            assert asked_again.wait(TIMEOUT_S)
        with rollouts_on(server, tmp_path) as rollouts:
            rollouts.publish(0, server.server_id)
            assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 2, 3]
    assert dropped(tmp_path) == [("1.0", "too_few_survivors"), ("1.1", "too_few_survivors"), ("1.2", "failed")]


def changed(group: Group, **fields: object) -> Group:
    """The first completion of a group made into one that nobody asked for."""
    first = msgspec.structs.replace(group.completions[0], **fields)
    return msgspec.structs.replace(group, completions=[first, *group.completions[1:]])


NINE = {"behaviour_logprobs": np.zeros(9, np.float32), "versions": [(0, 9)]}


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda group: msgspec.structs.replace(group, completions=group.completions * 2), id="too many"),
        pytest.param(lambda group: changed(group, token_ids=np.ones(9, np.int32), **NINE), id="too long"),
        pytest.param(lambda group: changed(group, token_ids=np.array([1, 16], np.int32)), id="beyond the vocabulary"),
        pytest.param(lambda group: changed(group, token_ids=np.array([1, -1], np.int32)), id="negative"),
    ],
)
def test_a_group_that_is_not_what_was_asked_for_is_refused_counted_and_asked_for_again(
    tmp_path: Path, spoil: Callable[[Group], Group]
) -> None:
    def spoils_first_attempts(server: HandServer, request: Generate) -> list[Message]:
        group = group_of(request, 0)
        return [spoil(group) if request.group_id.endswith(".0") else group]

    with HandServer(spoils_first_attempts) as server, rollouts_on(server, tmp_path) as rollouts:
        rollouts.publish(0, server.server_id)
        taken = rollouts.next_batch(0, TIMEOUT_S)
        assert [group.group_id for group in taken or []] == ["0.1", "1.1", "2.1"]
        assert rollouts._fleet.members[0].link.num_refused >= 3
    assert {reason for _, reason in dropped(tmp_path)} == {"malformed"}
    assert {"0.0", "1.0", "2.0"} <= set(server.acked)


def test_how_to_sample_reaches_the_server(tmp_path: Path) -> None:
    sampling = {"group_size": 3, "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 5,
                "stop": ["</a>", "\n\n"], "allow_partial_support": True}  # fmt: skip
    with (
        HandServer(lambda server, request: [group_of(request, 0)]) as server,
        rollouts_on(server, tmp_path, sampling=sampling) as rollouts,
    ):
        rollouts.publish(0, server.server_id)
        rollouts.next_batch(0, TIMEOUT_S)
    assert {request.sampling for request in server.requests} == {
        Sampling(num_completions=3, max_tokens=7, temperature=0.5, top_p=0.9, top_k=5, stop=("</a>", "\n\n"))
    }


def test_groups_without_signal_are_replaced_also_over_a_resume(tmp_path: Path) -> None:
    def some_alike(server: HandServer, request: Generate) -> list[Message]:
        if slot_of(request) in server.silent:
            return []
        return [alike(request, server.version) if slot_of(request) in (1, 3, 4) else group_of(request, server.version)]

    active = {"dynamic_sampling": True, "max_staleness": 0}
    with HandServer(some_alike) as server, rollouts_on(server, tmp_path, **active) as rollouts:
        server.silent = {4}  # type: ignore[attr-defined]
        rollouts.publish(0, server.server_id)
        assert rollouts.next_batch(0, 1.0) is None
        while len(server.acked) < 4:
            rollouts.next_batch(0, 0.1)
    # Slot 1 made room for slot 3, and that for slot 4; no more than three places were ever taken.
    assert sorted(server.generated) == ["0.0", "1.0", "2.0", "3.0", "4.0"] and server.cancelled == ["4.0"]
    assert dropped(tmp_path) == [("1.0", "no_signal"), ("3.0", "no_signal")]

    with HandServer(some_alike) as server, rollouts_on(server, tmp_path, **active) as rollouts:
        server.silent = set()  # type: ignore[attr-defined]
        rollouts.publish(0, server.server_id)
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [0, 2, 5]
        assert rollouts.batch_metrics["batch/replaced_groups"] == 3
        assert rollouts.next_batch(0, 0.3) is None, "nothing of the next step before its version"
        server.version = 1
        rollouts.publish(1, server.server_id)
        assert slots(rollouts.next_batch(1, TIMEOUT_S)) == [6, 7, 8]
        assert rollouts.batch_metrics["batch/replaced_groups"] == 0
    assert sorted(server.generated) == ["4.0", "5.0", "6.0", "7.0", "8.0"], "what was dropped is not asked again"
    assert counts(tmp_path).lost == 0


def test_a_step_that_has_replaced_too_many_takes_what_comes_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        HandServer(lambda server, request: [alike(request, server.version)]) as server,
        rollouts_on(server, tmp_path, dynamic_sampling=True, max_resamples=2, max_staleness=0) as rollouts,
    ):
        for version in range(2):
            server.version = version
            rollouts.publish(version, server.server_id)
            groups = rollouts.next_batch(0, TIMEOUT_S)
            assert groups is not None and rollouts.batch_metrics["batch/replaced_groups"] == 6
    assert len(server.generated) == 2 * (6 + 3)
    assert "training on 3 of 3 groups without signal: this step has already replaced 6 groups" in caplog.text
    assert "too hard nor solved" in caplog.text


def test_what_was_received_and_not_scored_before_a_resume_waits_for_the_server_before_it_is_replaced(
    tmp_path: Path,
) -> None:
    active = {"dynamic_sampling": True, "max_staleness": 0}
    with HandServer(lambda server, request: []) as server, rollouts_on(server, tmp_path, **active) as rollouts:
        rollouts.publish(0, server.server_id)
        while len(server.requests) < 3:
            rollouts.next_batch(0, 0.1)
    ledger = Ledger(tmp_path / "ledger.db")
    group = alike(server.requests[0], 0)
    receive(ledger, group.group_id, pack(group), 0, 8)
    ledger.close()
    answer_all = HandServer(lambda server, request: [group_of(request, server.version)])
    with answer_all as server, rollouts_on(server, tmp_path, **active) as rollouts:
        assert rollouts.next_batch(0, 1.0) is None and server.generated == []
        assert dropped(tmp_path) == [("0.0", "no_signal")]
        rollouts.publish(0, server.server_id)
        assert slots(rollouts.next_batch(0, TIMEOUT_S)) == [1, 2, 3]
