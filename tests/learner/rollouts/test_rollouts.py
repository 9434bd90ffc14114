"""Rollouts with a scripted server on a real socket: duplicates, reconnects, failures, staleness, resume."""

import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from learner.rollouts.ledger import Ledger
from learner.training.batch import trained_rows
from learner.training.metrics import group_metrics
from learner.training.step import advantages
from protocol.codec import pack
from protocol.errors import RewardError
from protocol.messages import Completion, Generate, Group, Message
from tests.learner.ledgers import receive
from tests.learner.rollouts.hand_server import (
    HandServer,
    answers,
    counts,
    dropped,
    fails,
    group_of,
    is_silent,
    next_slots,
    published_on,
    rollouts_on,
    slot_of,
)
from tests.learner.runs import make_run
from tests.waiting import TIMEOUT_S, until

BROKEN = "tests/learner/rewards/broken_rewards.py"
EMPTY = Completion(
    token_ids=np.zeros(0, np.int32), behavior_logprobs=np.zeros(0, np.float32), versions=[], finish_reason="stop"
)


def alike(server: HandServer, request: Generate) -> list[Message]:
    """Answer with equal completions, so that the group has no signal."""
    group = group_of(request, server.version)
    return [msgspec.structs.replace(group, completions=[group.completions[0]] * len(group.completions))]


def with_empty(group: Group, num_empty: int) -> Group:
    return msgspec.structs.replace(group, completions=[EMPTY] * num_empty + group.completions[num_empty:])


def without_the_shortest(group: Group) -> Group:
    return msgspec.structs.replace(group, completions=group.completions[1:])


def test_duplicate_groups_in_any_order_are_consumed_once_in_slot_order(tmp_path: Path) -> None:
    held: list[Generate] = []

    def backwards_and_twice(server: HandServer, request: Generate) -> list[Message]:
        held.append(request)
        return [group_of(request, 0) for request in reversed(held)] * 2 if len(held) == 6 else []

    with HandServer(backwards_and_twice) as server, published_on(tmp_path, server) as rollouts:
        assert [next_slots(rollouts), next_slots(rollouts)] == [[0, 1, 2], [3, 4, 5]]
        until(lambda: len(server.acked) == 12, "each arrival is acknowledged")
    assert counts(tmp_path).admitted == 6


def test_requests_wait_for_weights_and_follow_the_admission_rule(tmp_path: Path) -> None:
    with HandServer() as server, rollouts_on(tmp_path, server) as (_, rollouts):
        assert rollouts.next_batch(0, 0.3) is None and server.generated == []
        rollouts.publish(0, server.server_id)
        assert next_slots(rollouts) == [0, 1, 2]
        assert rollouts.pop_metrics()["bottleneck/weight_sync"] > 0.1
        assert next_slots(rollouts) == [3, 4, 5]
        assert rollouts.next_batch(0, 0.3) is None and len(server.generated) == 6
        rollouts.publish(1, server.server_id)
        assert next_slots(rollouts, 1) == [6, 7, 8]


def test_every_defect_of_a_group_is_recorded_and_its_prompt_is_retried(tmp_path: Path) -> None:
    def spoils_first_attempts(server: HandServer, request: Generate) -> list[Message]:
        # The reward function fails on completions of two tokens.
        group = without_the_shortest(group_of(request, 5))
        match request.group_id:
            case "0.0":
                return fails(request)
            case "1.0":
                return [with_empty(group, 2)]
            case "2.0":
                return [msgspec.structs.replace(group, completions=group.completions * 2)]
            case "3.0":
                return [without_the_shortest(group_of(request, 0))]
            case "4.0":
                return [group_of(request, 5)]
            case "5.0":
                return [with_empty(group, 1)]
        return [group]

    reward = {"functions": [f"{BROKEN}:raises_for_two_tokens"], "max_failed_share": 0.9}
    settings: dict[str, Any] = {"reward": reward, "groups_per_step": 6, "sampling": {"group_size": 4, "max_tokens": 5}}
    with (
        HandServer(spoils_first_attempts) as server,
        published_on(tmp_path, server, version=5, **settings) as rollouts,
    ):
        groups = rollouts.next_batch(5, TIMEOUT_S) or []
        metrics = rollouts.pop_metrics()
        num_refused = rollouts._fleet.members[0].link.num_refused
    assert [group.group_id for group in groups] == ["0.1", "1.1", "2.1", "3.1", "4.1", "5.0"]
    assert [len(group.rewards_G) for group in groups] == [len(group.completions) for group in groups] == [3] * 5 + [2]
    assert dropped(tmp_path) == [
        ("0.0", "engine_error"), ("1.0", "too_few_survivors"), ("2.0", "malformed"), ("3.0", "stale"),
        ("4.0", "unscorable"),
    ]  # fmt: skip
    assert (metrics["rollout/lost_completions"], metrics["rollout/rewards_failed"], num_refused) == (5 + 2, 1, 1)
    assert {"1.0", "2.0", "3.0", "4.0"} <= set(server.acked) and counts(tmp_path).lost == 0


def test_a_group_whose_rewards_are_only_logged_is_trained_without_them(tmp_path: Path) -> None:
    reward = {"functions": [f"{BROKEN}:raises_for_two_tokens"], "max_failed_share": 0.99, "only_logged": True}
    distilled: dict[str, Any] = {"kl": {"coef": 1.0, "place": "advantage"}, "reference": {"kind": "fixed"}}
    with HandServer() as server, published_on(tmp_path, server, reward=reward, **distilled) as rollouts:
        groups = rollouts.next_batch(0, TIMEOUT_S) or []
        metrics = rollouts.pop_metrics()
    assert [group.group_id for group in groups] == ["0.0", "1.0", "2.0"] and dropped(tmp_path) == []
    assert all(group.rewards_G == [None] * 4 for group in groups) and metrics["rollout/rewards_failed"] >= 3
    assert "batch/no_signal_groups" not in metrics, "there is no reward to learn from"
    config = make_run(tmp_path, "tcp://127.0.0.1:1", reward=reward, **distilled).learner
    assert len(trained_rows(groups, advantages(groups, config), config)) == 12
    step = group_metrics(groups, 0)
    assert step["batch/unscorable_completions"] == 12 and not any(name.startswith("reward/") for name in step)


def test_a_prompt_that_fails_too_often_is_skipped_also_across_a_resume(tmp_path: Path) -> None:
    asked_again = threading.Event()

    def lossy(server: HandServer, request: Generate) -> list[Message]:
        if request.group_id == "1.1" and not asked_again.is_set():
            asked_again.set()
            return []
        return [with_empty(group_of(request, 0), 3 if slot_of(request) == 1 else 0)]

    with HandServer(lossy) as server:
        with published_on(tmp_path, server):
            assert asked_again.wait(TIMEOUT_S)
        with published_on(tmp_path, server) as rollouts:
            assert next_slots(rollouts) == [0, 2, 3]
    assert dropped(tmp_path) == [("1.0", "too_few_survivors"), ("1.1", "too_few_survivors"), ("1.2", "failed")]


def test_a_reward_function_that_keeps_failing_ends_the_wait_for_a_batch(tmp_path: Path) -> None:
    reward = {"functions": [f"{BROKEN}:raises"], "max_failed_share": 0}
    with (
        HandServer() as server,
        published_on(tmp_path, server, reward=reward) as rollouts,
        pytest.raises(RewardError, match=r"raises.*ValueError.*no such answer"),
    ):
        rollouts.next_batch(0, TIMEOUT_S)


def test_a_new_server_gets_requests_for_all_pending_groups(tmp_path: Path) -> None:
    with HandServer(is_silent) as server, rollouts_on(tmp_path, server) as (fleet, rollouts):
        rollouts.publish(0, server.server_id)
        until(lambda: len(server.generated) == 6)
        server.server_id, server.answer = "server-2", answers
        (member,) = fleet.members
        rollouts._loop.call(member.link._channel.send(fleet.hello, TIMEOUT_S), TIMEOUT_S)
        until(lambda: member.welcome is not None and member.welcome.server_id == "server-2")
        rollouts.publish(0, server.server_id)
        assert next_slots(rollouts) == [0, 1, 2]
    assert sorted(server.generated) == sorted(2 * [f"{slot}.0" for slot in range(6)])


def test_groups_are_committed_in_batches_outside_the_event_loop_before_the_acknowledgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive, score, disk_writes = Ledger.receive, Ledger.score, threading.Event()
    statements: list[str] = []

    def slow(ledger: Ledger, *args: Any) -> list[str]:
        assert threading.current_thread().name != "test", "the event loop's thread must not block"
        assert disk_writes.wait(TIMEOUT_S)
        return receive(ledger, *args)

    def beside(ledger: Ledger, *args: Any) -> None:
        assert threading.current_thread().name != "test", "the event loop's thread must not block"
        score(ledger, *args)

    monkeypatch.setattr(Ledger, "receive", slow)
    monkeypatch.setattr(Ledger, "score", beside)
    with HandServer() as server, rollouts_on(tmp_path, server) as (fleet, rollouts):
        rollouts._ledger._db.set_trace_callback(lambda statement: statements.append(statement[:40]))
        rollouts.publish(0, server.server_id)
        until(
            lambda: 6 > rollouts._buffer.num("admitted", "requested") <= len(rollouts._arrived), "groups have arrived"
        )
        rollouts._loop.call(fleet.members[0].link.cancel(["a later message"]), TIMEOUT_S)
        until(lambda: server.cancelled, "the server still receives messages")
        assert server.acked == []
        disk_writes.set()
        assert [next_slots(rollouts), next_slots(rollouts)] == [[0, 1, 2], [3, 4, 5]]
    received = [statement for statement in statements if "'received'" in statement or statement == "COMMIT"]
    batches = [batch for batch in "".join("r" if "re" in s else "C" for s in received).split("C") if batch]
    assert sum(map(len, batches)) == 6 and len(batches) <= 2, batches
    assert sorted(server.acked) == [f"{slot}.0" for slot in range(6)]


def test_a_group_that_the_server_kept_or_continued_over_a_restart_has_an_unknown_version(tmp_path: Path) -> None:
    def kept(server: HandServer, request: Generate) -> list[Message]:
        return [group_of(request, 7)] if request.group_id == "0.0" else []

    def continued(server: HandServer, request: Generate) -> list[Message]:
        return [group_of(request, 7 if request.group_id == "1.0" else 5)]

    with HandServer(is_silent) as server:
        with published_on(tmp_path, server):
            until(lambda: len(server.requests) == 6)
        server.late_answer, server.answer = kept, continued
        with rollouts_on(tmp_path, server, version=5) as (_, rollouts):
            until(lambda: "0.0" in server.acked)
            rollouts.publish(5, server.server_id)
            groups = rollouts.next_batch(5, TIMEOUT_S) or []
    assert {group.group_id: group.entered_version for group in groups} == {"0.0": -1, "1.0": -1, "2.0": 5}


def test_a_resume_continues_every_group_from_its_state_in_the_ledger(tmp_path: Path) -> None:
    def some(server: HandServer, request: Generate) -> list[Message]:
        return answers(server, request) if request.group_id in ("0.0", "1.0", "2.0", "4.0") else []

    with HandServer(some) as server, published_on(tmp_path, server) as rollouts:
        assert next_slots(rollouts) == [0, 1, 2]
        rollouts._ledger.consume([(f"{slot}.0", 0) for slot in range(3)], step=1)
        until(lambda: len(server.acked) == 4)
        rollouts.publish(1, server.server_id)  # the rule now allows slots 0 to 8
        until(lambda: len(server.generated) == 9)
    assert sorted(server.cancelled) == ["3.0", "5.0", "6.0", "7.0", "8.0"]

    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        ledger.rewind(0)
    with HandServer() as server, published_on(tmp_path, server) as rollouts:
        assert [next_slots(rollouts), next_slots(rollouts)] == [[0, 1, 2], [3, 4, 5]]
        # Slots 6 to 8 were sent before the restart; with version 0 they would be too old for their step.
        assert sorted(server.generated) == ["3.0", "5.0"]
        rollouts.publish(1, server.server_id)
        assert next_slots(rollouts, 1) == [6, 7, 8]
    assert sorted(server.generated) == ["3.0", "5.0", "6.0", "7.0", "8.0"]
    assert counts(tmp_path).lost == 0


ACTIVE: dict[str, Any] = {"dynamic_sampling": True, "max_staleness": 0}


def test_groups_without_signal_are_replaced_also_across_a_resume(tmp_path: Path) -> None:
    def some_alike(server: HandServer, request: Generate) -> list[Message]:
        return alike(server, request) if slot_of(request) in (1, 3, 4) else answers(server, request)

    def but_for_the_last(server: HandServer, request: Generate) -> list[Message]:
        return some_alike(server, request) if slot_of(request) < 4 else []

    with HandServer(but_for_the_last) as server, published_on(tmp_path, server, **ACTIVE):
        until(lambda: len(server.generated) == 5 and len(dropped(tmp_path)) == 2)
    # Slot 3 replaced slot 1, and slot 4 replaced slot 3; never more than three slots were open.
    assert sorted(server.generated) == ["0.0", "1.0", "2.0", "3.0", "4.0"] and server.cancelled == ["4.0"]
    assert dropped(tmp_path) == [("1.0", "no_signal"), ("3.0", "no_signal")]

    with HandServer(some_alike) as server, published_on(tmp_path, server, **ACTIVE) as rollouts:
        assert next_slots(rollouts) == [0, 2, 5]
        assert rollouts.pop_metrics()["batch/replaced_groups"] == 3
        assert rollouts.next_batch(0, 0.3) is None, "the next step must wait for its version"
        server.version = 1
        rollouts.publish(1, server.server_id)
        assert next_slots(rollouts, 1) == [6, 7, 8]
        assert rollouts.pop_metrics()["batch/replaced_groups"] == 0
    assert sorted(server.generated) == ["4.0", "5.0", "6.0", "7.0", "8.0"], "dropped groups must not be requested again"
    assert counts(tmp_path).lost == 0


def test_a_step_that_replaced_too_many_groups_trains_without_signal_and_logs_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with HandServer(alike) as server, rollouts_on(tmp_path, server, max_resamples=2, **ACTIVE) as (_, rollouts):
        for version in range(2):
            server.version = version
            rollouts.publish(version, server.server_id)
            assert len(next_slots(rollouts)) == 3 and rollouts.pop_metrics()["batch/replaced_groups"] == 6
    assert len(server.generated) == 2 * (6 + 3)
    assert "training on 3 of 3 groups without signal: this step has already replaced 6 groups" in caplog.text


def test_groups_received_before_a_resume_are_replaced_only_after_the_server_connects(
    tmp_path: Path,
) -> None:
    with HandServer(is_silent) as server, published_on(tmp_path, server, **ACTIVE):
        until(lambda: len(server.requests) == 3)
    (group,) = alike(server, server.requests[0])
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        assert receive(ledger, "0.0", pack(group), 0, 8)
    with HandServer() as server, rollouts_on(tmp_path, server, **ACTIVE) as (_, rollouts):
        until(lambda: dropped(tmp_path) == [("0.0", "no_signal")])
        assert rollouts.next_batch(0, 0.3) is None and server.generated == []
        rollouts.publish(0, server.server_id)
        assert next_slots(rollouts) == [1, 2, 3]
