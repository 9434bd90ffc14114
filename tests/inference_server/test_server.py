"""The server over real sockets, in front of a scripted engine: handshakes, groups, pushes, faults."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import numpy as np
import pytest

from inference_server.config import ServerConfig
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
from tests.fakes import LIMITS, ScriptedEngine, Serving, report
from tests.inference_server.scripted_learner import ScriptedLearner
from tests.inference_server.scripted_server import begin, join_and_push, push, run_with_server, until

# --- handshake ---------------------------------------------------------------------------------------------------


def test_a_learner_is_welcomed_with_what_the_server_can_do() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        welcome = await learner.join()
        assert (welcome.policy_version, welcome.num_workers, welcome.dtype) == (None, 1, "float32")
        assert (welcome.max_model_len, welcome.max_concurrent_sequences) == (64, 256)
        assert welcome.transports == ["gloo", "tcp"]
        assert (await learner.join()).server_id == welcome.server_id

    run_with_server(test)


def test_another_model_is_refused_with_both_models() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        other = ModelFingerprint(
            architecture="Qwen2ForCausalLM", size="24 layers of width 896", vocab_size=151936, tokenizer_hash="ffff"
        )
        learner.model = other
        answer = await learner.greet()
        assert isinstance(answer, Refused) and "2 layers of width 64" in answer.reason
        assert "Qwen2ForCausalLM of 24 layers of width 896 with 151936 tokens" in answer.reason

    run_with_server(test)


def test_a_malformed_message_is_answered_once_and_its_sender_ignored() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await learner.join()
        stranger = ScriptedLearner(running.endpoint, run="run-b")
        await stranger.channel._messages.send([b"\xc1 not msgpack"])
        assert "malformed message" in (await stranger.receive(Refused)).reason
        await stranger.hello()
        with pytest.raises(TimeoutError):
            await stranger.receive((Welcome, Refused), timeout_s=0.3)
        assert await learner.join()
        stranger.close()

    run_with_server(test)


def test_requests_on_a_connection_that_has_not_said_hello_are_not_answered() -> None:
    """An answer would keep a learner whose connection was made again from noticing that it must say Hello."""

    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await learner.generate("g", [1])
        await learner.send(Score(request_id="s", token_ids=np.array([1, 2], dtype=np.int32), deadline_s=1))
        await learner.send(begin(0))
        await learner.join()
        assert learner.unread == [] and engine.calls == []

    run_with_server(test)


# --- groups ------------------------------------------------------------------------------------------------------


def test_a_group_comes_with_tokens_logprobs_and_the_version_that_sampled_them() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner, version=4)
        await learner.generate("0.1", [5, 6], num_completions=3, max_tokens=2)
        group = await learner.receive(Group)
        assert group.group_id == "0.1"
        assert [c.token_ids.tolist() for c in group.completions] == [[7], [7, 8], [7, 8]]
        assert [c.versions for c in group.completions] == [[(4, 1)], [(4, 2)], [(4, 2)]]
        assert [c.finish_reason for c in group.completions] == ["stop", "stop", "length"]

    run_with_server(test)


def test_generating_before_the_first_push_fails_retryably() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await learner.join()
        await learner.generate("g", [1])
        failed = await learner.receive(GroupFailed)
        assert (failed.code, failed.retryable) == ("not_ready", True)

    run_with_server(test)


def test_a_group_says_its_salt_and_a_later_turn_is_generated_under_it() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner)
        await learner.generate("first turn", [1, 2])
        first = await learner.receive(Group)
        await learner.generate("second turn", [1, 2, 3], salt=first.salt)
        second = await learner.receive(Group)
        assert first.salt and second.salt == first.salt
        assert engine.salts == ["", first.salt]

    run_with_server(test)


@pytest.mark.usefixtures("pulse_often")
def test_a_group_is_generated_once_and_answered_once_on_a_connection_however_often_it_is_asked_for() -> None:
    """On a slow link every further copy would lengthen the queue that the learner is already behind."""

    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner)
        engine.release.clear()
        await learner.generate("g", [1])
        await learner.generate("g", [1])
        await until(lambda: len(engine.prompts) == 1)
        engine.release.set()
        group = await learner.receive(Group)
        assert group.server_s > 0
        for _ in range(3):
            await learner.generate("g", [1])
            await learner.join()
        for _ in range(10):
            await learner.receive(Pulse)
        assert not [message for message in learner.unread if isinstance(message, Group)] and len(engine.prompts) == 1
        await learner.send(Ack(group_ids=["g"]))
        await learner.generate("g", [1])
        await learner.receive(Group)
        assert len(engine.prompts) == 2

    run_with_server(test)


def test_what_was_not_acknowledged_or_ended_meanwhile_is_sent_after_a_reconnect() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner)
        for group_id in ("a", "b"):
            await learner.generate(group_id, [1])
            await learner.receive(Group)
        await learner.send(Ack(group_ids=["a"]))
        engine.release.clear()
        await learner.generate("c", [1])
        await until(lambda: len(engine.prompts) == 3)
        learner.channel.close()
        engine.release.set()
        await until(lambda: running.server.status()["groups_unacked"] == 2)
        again = ScriptedLearner(running.endpoint)
        assert (await again.join()).policy_version == 0
        assert [(await again.receive(Group)).group_id for _ in range(2)] == ["b", "c"]
        again.close()

    run_with_server(test)


@pytest.mark.usefixtures("pulse_often")
def test_a_group_for_which_the_queue_was_full_is_sent_with_a_later_pulse(monkeypatch: pytest.MonkeyPatch) -> None:
    send, refused = ServerChannel.send, []

    async def full_at_first(channel: ServerChannel, peer: bytes, message: Message) -> bool:
        if isinstance(message, Group) and len(refused) < 2:
            refused.append(message.group_id)
            return False
        return await send(channel, peer, message)

    monkeypatch.setattr(ServerChannel, "send", full_at_first)

    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner)
        await learner.generate("g", [1])
        assert (await learner.receive(Group)).group_id == "g" and refused == ["g", "g"]

    run_with_server(test)


@pytest.mark.usefixtures("pulse_often")
def test_a_learner_that_stays_away_loses_its_groups() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner)
        engine.release.clear()
        await learner.generate("g", [1])
        await until(lambda: bool(engine.prompts))
        learner.channel.close()
        await until(lambda: engine.cancelled == 1)
        assert running.server.status()["run"] is None and running.server.status()["groups_running"] == 0

    run_with_server(test, ServerConfig(orphan_timeout_s=0.2))


class OneByOne(ScriptedEngine):
    """Has a place for one group; its completions end one by one, `num_done` of them before it holds the rest back."""

    def __init__(self, num_done: int, completion_s: float = 0.02) -> None:
        super().__init__()
        self.num_done, self._completion_s, self._place = num_done, completion_s, asyncio.Semaphore()
        self.release.clear()

    async def generate(self, prompt_token_ids: np.ndarray, sampling: Sampling, salt: str) -> AsyncIterator[Sampled]:
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
def test_a_group_that_gets_no_token_for_its_deadline_is_aborted_and_two_that_had_ended_are_a_group(
    num_done: int,
) -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner)
        await learner.generate("g", [1], deadline_s=1.0, num_completions=4)
        answer = await learner.receive((Group, GroupFailed))
        assert engine.cancelled == 1
        if num_done < 2:
            assert isinstance(answer, GroupFailed) and (answer.code, answer.retryable) == ("deadline", True)
            assert "no token for 1 s (learner.group_idle_timeout_s)" in answer.message
        else:
            assert isinstance(answer, Group) and answer.entered_version == 0
            lengths = [len(completion.token_ids) for completion in answer.completions]
            assert lengths == [1, 2, 3, 4][-num_done:], "in the order of their indices"

    run_with_server(test, make_engine=lambda: OneByOne(num_done))


@pytest.mark.usefixtures("look_often")
def test_neither_the_place_that_a_group_waits_for_nor_all_of_its_tokens_nor_a_push_count_against_its_deadline() -> None:
    num_in_line = 5

    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner)
        for index in range(num_in_line):  # 0.8 s each behind one place
            await learner.generate(f"g{index}", [1], deadline_s=2.0, num_completions=8)
        await until(lambda: running.server.status()["groups_unacked"] == 1)
        engine.scripted_reports.append([report(ok=False, state="loading", weights_intact=False, error="x")])
        await learner.send(begin(1, "e2"))
        await learner.receive(PushFailed)
        engine.num_done = 0  # type: ignore[attr-defined]
        await asyncio.sleep(2.5)
        engine.num_done = 8  # type: ignore[attr-defined]
        engine.release.set()
        await push(engine, learner, 1, "e3")
        groups = [await learner.receive((Group, GroupFailed)) for _ in range(num_in_line)]
        assert all(isinstance(group, Group) and len(group.completions) == 8 for group in groups), groups

    run_with_server(test, make_engine=lambda: OneByOne(8, completion_s=0.1))


def test_an_error_of_the_engine_costs_a_group_only_what_had_not_ended_and_the_next_group_nothing() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner)
        engine.release.set()
        engine.fail_with = EngineFailed("out of luck")
        await learner.generate("of two", [1], num_completions=2)
        failed = await learner.receive(GroupFailed)
        assert (failed.code, failed.message, failed.retryable) == ("engine_error", "out of luck", True)
        engine.num_done = 2  # type: ignore[attr-defined]
        await learner.generate("of three", [1], num_completions=3)
        assert [len(one.token_ids) for one in (await learner.receive(Group)).completions] == [2, 3]
        engine.fail_with = None
        await learner.generate("next", [1])
        assert (await learner.receive(Group)).group_id == "next"

    run_with_server(test, make_engine=lambda: OneByOne(1))


def test_a_cancelled_group_is_aborted_and_may_be_asked_for_again() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner)
        engine.release.clear()
        await learner.generate("g", [1])
        await until(lambda: bool(engine.prompts))
        await learner.send(Cancel(group_ids=["g", "unknown"]))
        await learner.generate("g", [2])
        await until(lambda: engine.cancelled == 1 and len(engine.prompts) == 2)
        engine.release.set()
        assert (await learner.receive(Group)).completions[0].token_ids.tolist() == [3]

    run_with_server(test)


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
def test_what_the_engine_could_not_stand_is_refused(prompt: list[int], sampling: dict, expected: str | None) -> None:
    asked = Sampling(**{"num_completions": 2, "max_tokens": 3, **sampling})
    problem = why_invalid(np.array(prompt, dtype=np.int32), asked, LIMITS)
    assert (problem is None) == (expected is None) and (expected or "") in (problem or "")


def test_what_is_refused_never_reaches_the_engine() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner)
        await learner.generate("g", [1, 32])
        failed = await learner.receive(GroupFailed)
        assert (failed.code, failed.retryable) == ("invalid_prompt", False) and not engine.prompts

    run_with_server(test)


def test_token_ids_are_an_array_of_int32() -> None:
    with pytest.raises(ValueError, match="int32"):
        Generate(group_id="g", prompt_token_ids=np.zeros(2), sampling=None, deadline_s=1)  # type: ignore[arg-type]


def test_scores_come_with_their_version_and_errors_with_the_reason() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner, version=3)
        scores = await learner.score([1, 2, 3])
        assert (scores.logprobs.tolist(), scores.policy_version, scores.error) == ([-0.5, -0.5], 3, None)
        assert (await learner.score([1] * 63)).error is None
        for tokens in ([1], [1] * 64):
            assert "expected 2 to 63" in ((await learner.score(tokens)).error or "")
        assert "token id 99" in ((await learner.score([1, 99])).error or "")
        engine.fail_with = EngineFailed("out of luck")
        assert (await learner.score([1, 2])).error == "out of luck"
        engine.release.clear()
        assert "deadline of 0.01 s" in ((await learner.score([1, 2], deadline_s=0.01)).error or "")

    run_with_server(test)


def test_the_replica_that_a_score_names_is_asked_and_must_be_one_there_is() -> None:
    class TwoReplicas(ScriptedEngine):
        def __init__(self) -> None:
            super().__init__(limits=msgspec.structs.replace(LIMITS, num_replicas=2))

        async def score(self, token_ids: np.ndarray, replica: int) -> tuple[np.ndarray, int | None]:
            logprobs, version = await super().score(token_ids, replica)
            return logprobs - np.float32(replica), version

    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        assert (await learner.join()).num_replicas == 2
        await join_and_push(engine, learner)
        answers = [await learner.score([1, 2], replica=replica) for replica in range(3)]
        assert [answer.logprobs.tolist() for answer in answers] == [[-0.5], [-1.5], []]
        assert "replica 2 does not exist; the server has 2 (server.data_parallel_size), counted from 0" in (
            answers[2].error or ""
        )

    run_with_server(test, make_engine=TwoReplicas)


def test_an_untouched_engine_scores_under_no_version_and_one_that_a_push_has_torn_does_not() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        assert (await learner.join()).is_untouched
        scores = await learner.score([1, 2, 3])
        assert (len(scores.logprobs), scores.policy_version, scores.error) == (2, None, None)
        error = report(ok=False, state="loading", weights_intact=False, retryable=False)
        engine.scripted_reports.append([error])
        await learner.send(begin(0))
        assert not (await learner.receive(PushFailed)).retryable
        assert "sync weights before scoring" in ((await learner.score([1, 2])).error or "")

    run_with_server(test)


# --- pushes ------------------------------------------------------------------------------------------------------


def test_a_push_pauses_receives_labels_and_resumes_in_this_order() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await learner.join()
        engine.scripted_reports.append([report(rank=0, receive_s=1.0), report(rank=1, receive_s=2.0, load_s=0.5)])
        await learner.send(begin(5))
        ready = await learner.receive(PushReady)
        done = await learner.receive(PushDone)
        assert (ready.session, ready.version) == (done.session, done.version) == ("e1", 5)
        assert (done.checksum, done.receive_s, done.load_s) == ("c0ffee", 2.0, 0.5)
        assert engine.calls == ["pause", "load_push", "set_version 5", "resume"]
        status = running.server.status()
        assert (status["policy_version"], status["push_state"], status["pushes_done"]) == (5, "idle", 1)

    run_with_server(test)


def test_a_real_push_over_gloo_arrives_in_the_scripted_engine() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        import torch

        await learner.join()
        for version in (1, 2):
            tensors = [("a", torch.full((3, 4), float(version))), ("b", torch.arange(5.0))]
            outcome, checksum = await (learner.push if version == 1 else learner.push_again)(version, tensors)
            assert isinstance(outcome, PushDone) and outcome.checksum == checksum
            assert engine.weights["a"].tolist() == tensors[0][1].tolist()

    run_with_server(test)


def test_generation_goes_on_with_the_old_weights_when_a_push_fails_before_loading() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner, version=1)
        engine.scripted_reports.append([report(ok=False, state="receiving", error="the sender is gone")])
        await learner.send(begin(2, session="e2"))
        failed = await learner.receive(PushFailed)
        assert (failed.version, failed.state, failed.weights_intact) == (2, "receiving", True)
        assert "worker 0 failed while receiving: the sender is gone" in failed.message
        await learner.generate("g", [1])
        assert (await learner.receive(Group)).completions[0].versions == [(1, 1)]

    run_with_server(test)


@pytest.mark.parametrize(
    "reports",
    [
        [report(ok=False, state="loading", weights_intact=False, error="boom")],
        [report(rank=0), report(rank=1, ok=False, state="receiving", error="late")],
        [report(rank=0, checksum="aa"), report(rank=1, checksum="bb")],
    ],
    ids=["failed while loading", "one of two workers failed", "different bytes"],
)
def test_torn_weights_stay_paused_until_a_whole_push_succeeds(reports: list) -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner, version=1)
        engine.scripted_reports.append(reports)
        await learner.send(begin(2, session="e2"))
        assert not (await learner.receive(PushFailed)).weights_intact
        assert running.server.status()["push_state"] == "torn"
        await learner.generate("g", [1])
        # A push that fails before loading anything does not heal.
        engine.scripted_reports.append([report(ok=False, state="joining", weights_intact=True, error="no way")])
        await learner.send(begin(2, session="e3"))
        assert not (await learner.receive(PushFailed)).weights_intact
        await push(engine, learner, 3, "e4")
        assert (await learner.receive(Group)).completions[0].versions == [(3, 1)]
        assert running.server.status()["push_state"] == "idle"

    run_with_server(test)


def test_a_session_that_is_unknown_has_failed_or_was_left_needs_a_new_one_before_anything_pauses() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        async def refusal(session: str) -> str:
            await learner.send(PushBegin(session=session, version=2))
            failed = await learner.receive(PushFailed)
            assert failed.weights_intact
            return failed.message

        await learner.join()
        said = await refusal("e9")
        assert "e9" in said and "start a new session" in said and engine.calls == []
        await push(engine, learner)
        engine.scripted_reports.append([report(ok=False, state="receiving", error="x")])
        assert "worker 0 failed" in await refusal("e1")
        assert "start a new session" in await refusal("e1")
        await push(engine, learner, 1, "e2")
        await learner.send(PushAbort(session="another"))
        await learner.send(PushAbort(session="e2"))
        await until(lambda: engine.calls[-1] == "leave_session e2")
        assert "the learner abandoned session e2" in await refusal("e2")

    run_with_server(test)


# --- life --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("pulse_often")
def test_pulses_say_what_the_server_does() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await join_and_push(engine, learner, version=2)
        await learner.generate("g", [1], num_completions=2)
        await learner.receive(Group)
        pulse = await learner.receive(Pulse)
        while pulse.tokens_generated == 0:
            pulse = await learner.receive(Pulse)
        assert (pulse.policy_version, pulse.groups_unacked, pulse.tokens_generated) == (2, 1, 3)
        assert pulse.server_id == running.server.status()["server_id"]

    run_with_server(test)


def test_a_push_of_a_session_that_was_given_up_meanwhile_is_not_started() -> None:
    async def test(engine: ScriptedEngine, running: Serving, learner: ScriptedLearner) -> None:
        await learner.join()
        engine.release_pause.clear()
        await learner.send(begin(0, session="a"))
        await until(lambda: engine.calls == ["pause"])
        await learner.send(begin(0, session="b"))
        await learner.send(PushAbort(session="b"))
        await asyncio.sleep(0.2)
        engine.scripted_reports = [[report()], [report()]]
        engine.release_pause.set()
        assert (await learner.receive(PushDone)).session == "a"
        assert "abandoned" in (await learner.receive(PushFailed)).message
        assert engine.calls.count("load_push") == 1

    run_with_server(test)
