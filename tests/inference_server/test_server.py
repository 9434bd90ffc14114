"""The server with a scripted engine on real sockets: handshakes, groups, pushes, faults."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

from inference_server.engine.interface import EngineFailed, Sampled
from inference_server.requests import why_invalid
from protocol.channel.sockets import ServerChannel
from protocol.messages import (
    Ack,
    Cancel,
    Generate,
    Group,
    GroupFailed,
    Message,
    ModelFingerprint,
    Pulse,
    PushAbort,
    PushBegin,
    PushDone,
    PushFailed,
    PushReady,
    Refused,
    Sampling,
    Score,
    Welcome,
)
from tests.fakes import LIMITS, ScriptedEngine, report
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.inference_server.scripted_server import Stage, begin, run_with_server, until, with_server

# --- handshake ---------------------------------------------------------------------------------------------------


@with_server()
async def test_a_learner_is_welcomed_with_the_servers_capabilities(at: Stage) -> None:
    welcome = await at.learner.join()
    assert (welcome.policy_version, welcome.num_workers, welcome.dtype) == (None, 1, "float32")
    assert (welcome.max_model_len, welcome.max_concurrent_sequences) == (64, 256)
    assert welcome.transports == ["tcp"]
    assert (await at.learner.join()).server_id == welcome.server_id


@with_server()
async def test_another_model_is_rejected_with_both_models(at: Stage) -> None:
    other = ModelFingerprint(
        architecture="Qwen2ForCausalLM", size="24 layers of width 896", vocab_size=151936, tokenizer_hash="ffff"
    )
    at.learner.model = other
    answer = await at.learner.greet()
    assert isinstance(answer, Refused) and "2 layers of width 64" in answer.reason
    assert "Qwen2ForCausalLM of 24 layers of width 896 with 151936 tokens" in answer.reason


@with_server()
async def test_a_malformed_message_is_answered_once_and_its_sender_ignored(at: Stage) -> None:
    await at.learner.join()
    stranger = at.another(run="run-b")
    await stranger.channel._messages.send([b"\xc1 not msgpack"])
    assert "malformed message" in (await stranger.receive(Refused)).reason
    await stranger.hello()
    with pytest.raises(TimeoutError):
        await stranger.receive((Welcome, Refused), timeout_s=0.3)
    assert at.status()["messages_refused"] == 2 and await at.learner.join()


@with_server()
async def test_requests_on_a_connection_without_a_hello_are_not_answered(at: Stage) -> None:
    """An answer would hide from a reconnected learner that it must say Hello again."""
    await at.learner.generate("g", [1])
    await at.learner.send(Score(request_id="s", token_ids=np.array([1, 2], dtype=np.int32), deadline_s=1))
    await at.learner.send(begin(0))
    await at.learner.join()
    assert at.learner.unread == [] and at.engine.calls == []


# --- groups ------------------------------------------------------------------------------------------------------


@with_server()
async def test_a_group_after_a_push_has_tokens_logprobs_and_their_version(at: Stage) -> None:
    await at.learner.join()
    await at.learner.generate("too soon", [1])
    failed = await at.learner.receive(GroupFailed)
    assert (failed.code, failed.retryable) == ("not_ready", True)
    await at.push(version=4)
    group = await at.learner.group("0.1", [5, 6], num_completions=3, max_tokens=2)
    assert group.group_id == "0.1"
    assert [c.token_ids.tolist() for c in group.completions] == [[7], [7, 8], [7, 8]]
    assert [c.versions for c in group.completions] == [[(4, 1)], [(4, 2)], [(4, 2)]]
    assert [c.finish_reason for c in group.completions] == ["stop", "stop", "length"]


@with_server()
async def test_a_group_names_its_salt_and_later_turns_use_it(at: Stage) -> None:
    await at.join_and_push()
    first = await at.learner.group("first turn", [1, 2])
    second = await at.learner.group("second turn", [1, 2, 3], salt=first.salt)
    assert first.salt and second.salt == first.salt
    assert at.engine.salts == ["", first.salt]


@pytest.mark.usefixtures("pulse_often")
@with_server()
async def test_a_repeated_request_is_generated_once_and_answered_once_per_connection(
    at: Stage,
) -> None:
    """On a slow link every further copy would delay the learner's messages."""
    await at.join_and_push()
    at.engine.release.clear()
    await at.learner.generate("g", [1])
    await at.learner.generate("g", [1])
    await until(lambda: len(at.engine.prompts) == 1)
    at.engine.release.set()
    group = await at.learner.receive(Group)
    assert group.server_s > 0
    for _ in range(3):
        await at.learner.generate("g", [1])
        await at.learner.join()
    for _ in range(10):
        await at.learner.receive(Pulse)
    assert not [message for message in at.learner.unread if isinstance(message, Group)] and len(at.engine.prompts) == 1
    await at.learner.send(Ack(group_ids=["g"]))
    await at.learner.group("g", [1])
    assert len(at.engine.prompts) == 2


@with_server()
async def test_unacknowledged_and_newly_finished_groups_are_sent_after_a_reconnect(at: Stage) -> None:
    await at.join_and_push()
    for group_id in ("a", "b"):
        await at.learner.group(group_id, [1])
    await at.learner.send(Ack(group_ids=["a"]))
    await at.hold_group("c")
    at.learner.channel.close()
    at.engine.release.set()
    await until(lambda: at.status()["groups_unacked"] == 2)
    again = at.another()
    assert (await again.join()).policy_version == 0
    assert [(await again.receive(Group)).group_id for _ in range(2)] == ["b", "c"]


@pytest.mark.usefixtures("pulse_often")
@with_server()
async def test_a_group_that_met_a_full_queue_is_sent_with_a_later_pulse(
    at: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, refused = ServerChannel.send, []

    async def full_at_first(channel: ServerChannel, peer: bytes, message: Message) -> bool:
        if isinstance(message, Group) and len(refused) < 2:
            refused.append(message.group_id)
            return False
        return await send(channel, peer, message)

    monkeypatch.setattr(ServerChannel, "send", full_at_first)
    await at.join_and_push()
    assert (await at.learner.group("g", [1])).group_id == "g" and refused == ["g", "g"]


class OneByOne(ScriptedEngine):
    """Runs one group at a time. Its completions end one by one, `num_done` of them before it holds the rest back."""

    def __init__(self, num_done: int, completion_s: float = 0.02) -> None:
        super().__init__()
        self.num_done, self._completion_s, self._place = num_done, completion_s, asyncio.Semaphore()
        self.release.clear()

    async def generate(
        self, prompt_token_ids: np.ndarray, sampling: Sampling, salt: str, experts_from: int | None
    ) -> AsyncIterator[Sampled]:
        async with self._place:
            self.prompts.append(prompt_token_ids.tolist())
            assert self.version is not None
            yield Sampled(entered_version=self.version, salt=salt, completions={})
            for index in reversed(range(sampling.num_completions)):
                try:
                    await asyncio.sleep(self._completion_s)
                    if index < sampling.num_completions - self.num_done:
                        await self.release.wait()
                        self._maybe_fail()
                except asyncio.CancelledError:
                    self.cancelled += 1
                    raise
                completion = self._completion(prompt_token_ids.tolist(), index, sampling)
                yield Sampled(entered_version=self.version, salt=salt, completions={index: completion})


@pytest.mark.usefixtures("look_often")
@pytest.mark.parametrize("num_done", [0, 1, 2, 3])
def test_a_group_without_tokens_until_its_deadline_is_aborted_and_two_finished_completions_are_a_group(
    num_done: int,
) -> None:
    async def test(at: Stage) -> None:
        await at.join_and_push()
        await at.learner.generate("g", [1], deadline_s=1.0, num_completions=4)
        answer = await at.learner.receive((Group, GroupFailed))
        assert at.engine.cancelled == 1
        if num_done < 2:
            assert isinstance(answer, GroupFailed) and (answer.code, answer.retryable) == ("deadline", True)
            assert "no token for 1 s (learner.group_idle_timeout_s)" in answer.message
        else:
            assert isinstance(answer, Group) and answer.entered_version == 0
            lengths = [len(completion.token_ids) for completion in answer.completions]
            assert lengths == [1, 2, 3, 4][-num_done:], "completions are ordered by index"

    run_with_server(test, make_engine=lambda: OneByOne(num_done))


@pytest.mark.usefixtures("look_often")
@with_server(make_engine=lambda: OneByOne(8, completion_s=0.1))
async def test_the_deadline_of_a_group_excludes_waiting_generation_and_pushes(
    at: Stage,
) -> None:
    num_in_line = 5
    await at.join_and_push()
    for index in range(num_in_line):  # 0.8 s each, one at a time
        await at.learner.generate(f"g{index}", [1], deadline_s=2.0, num_completions=8)
    await until(lambda: at.status()["groups_unacked"] == 1)
    await at.fail_push(1, "e2", state="loading", weights_intact=False, error="x")
    at.engine.num_done = 0  # type: ignore[attr-defined]
    await asyncio.sleep(2.5)
    at.engine.num_done = 8  # type: ignore[attr-defined]
    at.engine.release.set()
    await at.push(1, "e3")
    groups = [await at.learner.receive((Group, GroupFailed)) for _ in range(num_in_line)]
    assert all(isinstance(group, Group) and len(group.completions) == 8 for group in groups), groups


@with_server(make_engine=lambda: OneByOne(1))
async def test_an_engine_error_costs_a_group_only_unfinished_completions(
    at: Stage,
) -> None:
    await at.join_and_push()
    at.engine.release.set()
    at.engine.fail_with = EngineFailed("out of luck")
    await at.learner.generate("of two", [1], num_completions=2)
    failed = await at.learner.receive(GroupFailed)
    assert (failed.code, failed.message, failed.retryable) == ("engine_error", "out of luck", True)
    at.engine.num_done = 2  # type: ignore[attr-defined]
    await at.learner.generate("of three", [1], num_completions=3)
    assert [len(one.token_ids) for one in (await at.learner.receive(Group)).completions] == [2, 3]
    at.engine.fail_with = None
    assert (await at.learner.group("next", [1])).group_id == "next"


@with_server()
async def test_a_cancelled_group_is_aborted_and_can_be_requested_again(at: Stage) -> None:
    await at.join_and_push()
    await at.hold_group("g")
    await at.learner.send(Cancel(group_ids=["g", "unknown"]))
    await at.learner.generate("g", [2])
    await until(lambda: at.engine.cancelled == 1 and len(at.engine.prompts) == 2)
    at.engine.release.set()
    assert (await at.learner.receive(Group)).completions[0].token_ids.tolist() == [3]


@pytest.mark.parametrize(
    ("prompt", "sampling", "expected"),
    [
        ([], {}, "no tokens"),
        ([1, 32], {}, "token id 32; expected 0 to 31"),
        ([1, -1], {}, "token id -1"),
        ([1] * 60, {"max_tokens": 5}, "65 in total; the server allows 64 (server.max_model_len)"),
        ([1] * 60, {"max_tokens": 4}, None),
        ([1], {"max_tokens": 0}, "max_tokens is 0, expected at least 1"),
        ([1], {"num_completions": 0}, "num_completions is 0, expected 1 to 16384"),
        ([1], {"num_completions": 16385}, "num_completions is 16385"),
        ([1], {"temperature": 2.5}, "temperature is 2.5, expected 0, or 0.01 to 2"),
        ([1], {"temperature": 0.001}, "temperature is 0.001"),
        ([1], {"temperature": 0.0}, "all completions are equal"),
        ([1], {"temperature": 0.0, "num_completions": 1}, None),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"top_p": 0.0}, "top_p is 0.0"),
        ([1], {"top_k": -2}, "top_k is -2"),
        ([1], {"seed": -5}, "seed is -5"),
        ([1], {"seed": 1 << 62}, f"seed is {1 << 62}"),
        ([1], {"stop_token_ids": (32,)}, "ids below the vocabulary size of 32"),
        ([31], {"stop_token_ids": (31,), "seed": 0, "top_p": 1.0, "temperature": 2.0}, None),
    ],
)
def test_invalid_requests_are_rejected(prompt: list[int], sampling: dict, expected: str | None) -> None:
    options = Sampling(**{"num_completions": 2, "max_tokens": 3, **sampling})
    request = Generate(group_id="g", prompt_token_ids=np.array(prompt, np.int32), sampling=options, deadline_s=1)
    problem = why_invalid(request, LIMITS)
    assert (problem is None) == (expected is None) and (expected or "") in (problem or "")


@with_server()
async def test_a_rejected_request_never_reaches_the_engine(at: Stage) -> None:
    await at.join_and_push()
    await at.learner.generate("g", [1, 32])
    failed = await at.learner.receive(GroupFailed)
    assert (failed.code, failed.retryable) == ("invalid_prompt", False) and not at.engine.prompts


def test_token_ids_are_an_array_of_int32() -> None:
    with pytest.raises(ValueError, match="int32"):
        Generate(group_id="g", prompt_token_ids=np.zeros(2), sampling=None, deadline_s=1)  # type: ignore[arg-type]


@with_server()
async def test_scores_have_their_version_and_errors_a_reason(at: Stage) -> None:
    await at.join_and_push(version=3)
    scores = await at.learner.score([1, 2, 3])
    assert (scores.logprobs.tolist(), scores.policy_version, scores.error) == ([-0.5, -0.5], 3, None)
    assert (await at.learner.score([1] * 63)).error is None
    for tokens in ([1], [1] * 64):
        assert "expected 2 to 63" in ((await at.learner.score(tokens)).error or "")
    assert "token id 99" in ((await at.learner.score([1, 99])).error or "")
    at.engine.fail_with = EngineFailed("out of luck")
    assert (await at.learner.score([1, 2])).error == "out of luck"
    at.engine.release.clear()
    assert "deadline of 0.01 s" in ((await at.learner.score([1, 2], deadline_s=0.01)).error or "")


def test_a_score_goes_to_its_replica_which_must_exist() -> None:
    class TwoReplicas(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__(limits=msgspec.structs.replace(LIMITS, num_replicas=2))

        async def score(self, token_ids: np.ndarray, replica: int) -> tuple[np.ndarray, int | None]:
            logprobs, version = await super().score(token_ids, replica)
            return logprobs - np.float32(replica), version

    async def test(at: Stage) -> None:
        assert (await at.learner.join()).num_replicas == 2
        await at.join_and_push()
        answers = [await at.learner.score([1, 2], replica=replica) for replica in range(3)]
        assert [answer.logprobs.tolist() for answer in answers] == [[-0.5], [-1.5], []]
        assert "replica 2 does not exist; the server has 2 (server.data_parallel_size), counted from 0" in (
            answers[2].error or ""
        )

    run_with_server(test, make_engine=TwoReplicas)


@with_server()
async def test_an_untouched_engine_scores_without_a_version_and_a_torn_engine_does_not_score(at: Stage) -> None:
    assert (await at.learner.join()).is_untouched
    scores = await at.learner.score([1, 2, 3])
    assert (len(scores.logprobs), scores.policy_version, scores.error) == (2, None, None)
    failed = await at.fail_push(0, "e1", state="loading", weights_intact=False, retryable=False)
    assert not failed.retryable
    assert "sync weights before scoring" in ((await at.learner.score([1, 2])).error or "")


# --- delivery to the learner -----------------------------------------------------------------------------------------

NUM_GROUPS = 12
GROUP_BYTES = 8 * (1 + 2)
"""Size of a group with two completions, of one and two tokens."""


async def come_until_pulse(learner: ScriptedLearner, num_unacked: int) -> set[str]:
    """Return the groups received until two pulses of a server with `num_unacked` groups.

    A pulse follows all groups that could be sent when the one before it was sent. Older pulses may be in the queue.
    """
    num_pulses = 0
    while num_pulses < 2:
        num_pulses += (await learner.receive(Pulse)).groups_unacked == num_unacked
    groups, learner.unread = learner.unread, []
    return {group.group_id for group in groups if isinstance(group, Group)}


@pytest.mark.usefixtures("pulse_often")
@pytest.mark.parametrize(("window_bytes", "num_at_once"), [(4 * GROUP_BYTES, 4), (1, 1)])
@with_server()
async def test_groups_after_a_lost_connection_are_sent_in_a_window_that_acks_advance(
    at: Stage, monkeypatch: pytest.MonkeyPatch, window_bytes: int, num_at_once: int
) -> None:
    monkeypatch.setattr("inference_server.requests.MAX_UNACKED_BYTES", window_bytes)
    await at.join_and_push()
    for number in range(NUM_GROUPS):
        await at.learner.generate(f"g{number}", [1])
    await until(lambda: at.status()["groups_unacked"] == NUM_GROUPS)
    at.learner.channel.close()
    again = at.another()
    await again.join()
    came: set[str] = set()
    while len(came) < NUM_GROUPS:
        num_unacked = NUM_GROUPS - len(came)
        more = await come_until_pulse(again, num_unacked)
        assert len(more) == num_at_once and not came & more
        assert await come_until_pulse(again, num_unacked) == set(), "no group is acknowledged"
        came |= more
        await again.send(Cancel(group_ids=[more.pop()]))
        await again.send(Ack(group_ids=sorted(more)))
    assert await come_until_pulse(again, 0) == set()
    assert at.status()["groups_unacked"] == 0


# --- pushes ------------------------------------------------------------------------------------------------------


@with_server()
async def test_a_push_pauses_receives_labels_and_resumes_in_this_order(at: Stage) -> None:
    await at.learner.join()
    at.engine.scripted_reports.append([report(rank=0, receive_s=1.0), report(rank=1, receive_s=2.0, load_s=0.5)])
    await at.learner.send(begin(5))
    ready = await at.learner.receive(PushReady)
    done = await at.learner.receive(PushDone)
    assert (ready.session, ready.version) == (done.session, done.version) == ("e1", 5)
    assert (done.checksum, done.receive_s, done.load_s) == ("c0ffee", 2.0, 0.5)
    assert at.engine.calls == ["pause", "load_push", "set_version 5", "resume"]
    status = at.status()
    assert (status["policy_version"], status["push_state"], status["pushes_done"]) == (5, "idle", 1)


@with_server()
async def test_generation_continues_with_the_old_weights_when_a_push_fails_before_loading(at: Stage) -> None:
    await at.join_and_push(version=1)
    failed = await at.fail_push(2, "e2", state="receiving", error="the sender is gone")
    assert (failed.version, failed.state, failed.weights_intact) == (2, "receiving", True)
    assert "worker 0 failed while receiving: the sender is gone" in failed.message
    assert (await at.learner.group("g", [1])).completions[0].versions == [(1, 1)]


@pytest.mark.parametrize(
    "reports",
    [
        [report(ok=False, state="loading", weights_intact=False, error="boom")],
        [report(rank=0), report(rank=1, ok=False, state="receiving", error="late")],
        [report(rank=0, checksum="aa"), report(rank=1, checksum="bb")],
    ],
    ids=["failed while loading", "one of two workers failed", "different bytes"],
)
@with_server()
async def test_torn_weights_stay_paused_until_a_complete_push(at: Stage, reports: list) -> None:
    await at.join_and_push(version=1)
    at.engine.scripted_reports.append(reports)
    await at.learner.send(begin(2, session="e2"))
    assert not (await at.learner.receive(PushFailed)).weights_intact
    assert at.status()["push_state"] == "torn"
    await at.learner.generate("g", [1])
    # A push that fails before loading does not repair the weights.
    assert not (await at.fail_push(2, "e3", state="joining", weights_intact=True, error="no way")).weights_intact
    await at.push(3, "e4")
    assert (await at.learner.receive(Group)).completions[0].versions == [(3, 1)]
    assert at.status()["push_state"] == "idle"


@with_server()
async def test_an_unknown_failed_or_abandoned_session_is_rejected_before_a_pause(
    at: Stage,
) -> None:
    async def refusal(session: str) -> str:
        await at.learner.send(PushBegin(session=session, version=2))
        failed = await at.learner.receive(PushFailed)
        assert failed.weights_intact
        return failed.message

    await at.learner.join()
    refused_reason = await refusal("e9")
    assert "e9" in refused_reason and "start a new session" in refused_reason and at.engine.calls == []
    await at.push()
    at.engine.scripted_reports.append([report(ok=False, state="receiving", error="x")])
    assert "worker 0 failed" in await refusal("e1")
    assert "start a new session" in await refusal("e1")
    await at.push(1, "e2")
    await at.learner.send(PushAbort(session="another"))
    await at.learner.send(PushAbort(session="e2"))
    await until(lambda: at.engine.calls[-1] == "leave_session e2")
    assert "the learner abandoned session e2" in await refusal("e2")


# --- pulses and sessions ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("pulse_often")
@with_server()
async def test_pulses_report_the_servers_state(at: Stage) -> None:
    await at.join_and_push(version=2)
    await at.learner.group("g", [1], num_completions=2)
    pulse = await at.learner.receive(Pulse)
    while pulse.tokens_generated == 0:
        pulse = await at.learner.receive(Pulse)
    assert (pulse.policy_version, pulse.groups_unacked, pulse.tokens_generated) == (2, 1, 3)
    assert pulse.server_id == at.status()["server_id"]


@with_server()
async def test_a_push_of_an_abandoned_session_is_not_started(at: Stage) -> None:
    await at.learner.join()
    at.engine.release_pause.clear()
    await at.learner.send(begin(0, session="a"))
    await until(lambda: at.engine.calls == ["pause"])
    await at.learner.send(begin(0, session="b"))
    await at.learner.send(PushAbort(session="b"))
    await asyncio.sleep(0.2)
    at.engine.scripted_reports = [[report()], [report()]]
    at.engine.release_pause.set()
    assert (await at.learner.receive(PushDone)).session == "a"
    assert "abandoned" in (await at.learner.receive(PushFailed)).message
    assert at.engine.calls.count("load_push") == 1


@pytest.mark.usefixtures("pulse_often")
@with_server()
async def test_an_answer_lost_with_its_connection_is_not_sent_over_the_next(at: Stage) -> None:
    """The learner requests again on the new connection."""
    await at.learner.join()
    at.engine.release_pause.clear()
    await at.learner.send(begin(0))
    await until(lambda: at.engine.calls == ["pause"])
    at.learner.channel.close()
    await until(lambda: at.status()["tenancy"]["state"] == "away")
    at.engine.release_pause.set()
    await until(lambda: at.status()["pushes_failed"] == 1)
    again = at.another()
    await again.join()
    for _ in range(3):
        await again.receive(Pulse)
    assert again.unread == []
