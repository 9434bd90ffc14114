"""Whole runs of the learner against the real server with a transformers model in place of vLLM."""

import asyncio
import gc
import json
import re
import sqlite3
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from datasets import Dataset
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from inference_server.engine.interface import EngineDead, PushOrder, WorkerReport
from learner.config import LearnerRun
from learner.controller import check_fits
from learner.policy.model import load_tokenizer
from learner.prompts.prompts import Prompts
from learner.run_inputs import RunInputs
from learner.servers.weight_sync import WeightSync
from learner.storage.checkpoint import find_checkpoint
from learner.train import train
from protocol.errors import (
    ConfigError,
    DataError,
    DeadlineExceeded,
    HandshakeRefused,
    ParityError,
    PushError,
    PushIncomplete,
    RewardError,
)
from protocol.model_files import resolve_model
from tests.fakes import ScriptedEngine, ServerThread, report
from tests.learner.model_engine import ModelEngine, sample, tiny_server
from tests.learner.runs import (
    GROUPS_PER_STEP,
    MAX_TOKENS,
    NUM_COMPLETIONS,
    batches_of,
    make_run,
    metrics_of,
    rows_of,
    seeded,
)


def plain_loop(run: LearnerRun, num_steps: int) -> tuple[list[float], Any]:
    """Synchronous GRPO on one page: sample, score, subtract the mean, clip, step. Returns losses and the model."""
    path = resolve_model("tiny:digits")
    tokenizer = load_tokenizer(path)
    prompts = Prompts(run.learner.data, tokenizer, run.seed)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(num_steps):
        terms, num_tokens = [], 0
        for slot in range(step * GROUPS_PER_STEP, (step + 1) * GROUPS_PER_STEP):
            prompt = prompts.prompt_at(slot)
            gold = prompt.columns["answer"]
            samples = [
                sample(model, prompt.token_ids, run.seed * 1_000_003 + slot * NUM_COMPLETIONS + i, MAX_TOKENS)
                for i in range(NUM_COMPLETIONS)
            ]
            texts = [tokenizer.decode(tokens, skip_special_tokens=True) for tokens, _ in samples]
            rewards = torch.tensor(
                [(sum(a == b for a, b in zip(t, gold, strict=False)) + (len(t) == len(gold))) / 5 for t in texts]
            )
            advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
            for (tokens, behaviour), advantage in zip(samples, advantages, strict=True):
                ids = torch.tensor([prompt.token_ids + tokens])
                logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
                ratio = (logprobs[len(prompt.token_ids) - 1 :] - torch.tensor(behaviour)).exp()
                terms.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum())
                num_tokens += len(tokens)
        loss = torch.stack(terms).sum() / num_tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


@pytest.mark.parametrize("compression", ["none", "delta"])
def test_staleness_zero_gives_the_losses_of_a_plain_loop_step_for_step(tmp_path: Path, compression: str) -> None:
    with tiny_server() as server:
        run = make_run(tmp_path, server.endpoint, **seeded(), weight_sync={"compression": compression})
        train(run, resume=False)
    losses, model = plain_loop(run, num_steps=4)
    metrics = metrics_of(run)
    assert [line["loss/policy"] for line in metrics] == pytest.approx(losses, abs=1e-5)
    assert any(abs(loss) > 1e-3 for loss in losses)
    assert all(line["staleness/max"] == 0 for line in metrics)
    # Not tensor by tensor: Adam makes whole steps of the rounding noise in gradients that are zero in theory.
    ids = torch.arange(3, 15)[None]
    torch.testing.assert_close(server.engine.model(ids).logits, model(ids).logits, atol=1e-3, rtol=1e-3)


def test_a_run_in_two_parts_ends_with_the_weights_of_one_run(tmp_path: Path) -> None:
    reference = {
        "reference": {"kind": "every", "every_steps": 2},
        "kl": {"coef": 0.1},
        "checkpoint": {"every_steps": 2},
    }
    weights = []
    for name, parts in (("whole", [6]), ("parts", [3, 6])):
        with tiny_server() as server:
            for i, steps in enumerate(parts):
                run = make_run(tmp_path / name, server.endpoint, **seeded(), **reference, steps=steps)
                train(run, resume=i > 0)
            weights.append(server.engine.weights)
            assert [line["step"] for line in metrics_of(run)] == [1, 2, 3, 4, 5, 6]
            assert [line["reference/version"] for line in metrics_of(run)] == [0, 2, 2, 4, 4, 6]
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


def test_every_prompt_is_consumed_once_in_every_epoch_of_the_data(tmp_path: Path) -> None:
    with tiny_server() as server:
        run = make_run(tmp_path, server.endpoint, steps=8)  # 8 steps of 3 groups: 3 epochs of 8 prompts
        train(run, resume=False)
    consumed = rows_of(run, "epoch, prompt_id", "state = 'consumed'")
    assert sorted(consumed) == [(epoch, prompt_id) for epoch in range(3) for prompt_id in range(8)]
    assert rows_of(run, "count(*)") == [(24,)]
    assert max(line["staleness/max"] for line in metrics_of(run)) <= 2


def test_a_group_that_failed_is_asked_for_again_and_one_that_always_fails_is_recorded(tmp_path: Path) -> None:
    class Stubborn(ModelEngine):
        """Fails the prompt of slot 1 always and that of slot 4 once."""

        bad: dict[str, int]

        def _completion(self, prompt, index, sampling):
            from inference_server.engine.interface import EngineFailed

            if self.bad.get(str(prompt), 0) > 0:
                self.bad[str(prompt)] -= 1
                raise EngineFailed("scripted failure")
            return super()._completion(prompt, index, sampling)

    engine = Stubborn(resolve_model("tiny:digits"))
    with tiny_server(engine) as server:
        run = make_run(tmp_path, server.endpoint, steps=2)
        prompts = Prompts(run.learner.data, load_tokenizer(resolve_model("tiny:digits")), run.seed)
        engine.bad = {str(prompts.prompt_at(1).token_ids): 10**6, str(prompts.prompt_at(4).token_ids): 1}
        train(run, resume=False)
    assert rows_of(run, "slot, attempt, reason", "state = 'dropped'") == [
        (1, 0, "engine_error"), (1, 1, "engine_error"), (1, 2, "failed"), (4, 0, "engine_error"),
    ]  # fmt: skip
    assert rows_of(run, "slot, attempt", "state = 'consumed'") == [(0, 0), (2, 0), (3, 0), (4, 1), (5, 0), (6, 0)]


def test_a_run_with_active_sampling_and_a_curriculum_that_crashes_asks_and_consumes_the_same_after_a_resume(
    tmp_path: Path,
) -> None:
    runs = []
    for name in ("whole", "crashed"):
        with tiny_server() as server:
            data = tmp_path / f"{name}.jsonl"
            calls = tmp_path / f"{name}.calls"
            rows = [{"prompt": f"{i}{i + 1}>", "answer": f"{i + 1}{i}", "count_in": str(calls)} for i in range(6)]
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
            run = make_run(
                tmp_path / name, server.endpoint, steps=6, max_staleness=0, checkpoint={"every_steps": 2}, dynamic_sampling=True,
                sampling={"group_size": 3, "max_tokens": 3, "seeded": True}, data={"path": str(data)},
                reward={"functions": ["share_right", "tests/learner/rewards/broken_rewards.py:raises_once"], "weights": [1, 0],
                        "max_failed_share": 0},
                curriculum={"kind": "pass_rate", "easy_above": 0.3, "hard_below": 0.15, "easy_weight": 0.1},
            )  # fmt: skip
            if name == "whole":
                calls.write_text("100")
                train(run, resume=False)
            else:
                with pytest.raises(RewardError, match="scripted crash"):
                    train(run, resume=False)
                assert 2 <= len(metrics_of(run)) < 6, "it crashed in the middle of the run"
                assert rows_of(run, "count(*)", "reason = 'no_signal'") > [(0,)]
                train(run, resume=True)
            runs.append(run)
    whole, crashed = map(batches_of, runs)
    assert whole == crashed
    skipped = [position - slot for slot, _, position, *_ in whole]
    assert skipped[-1] > 0 and skipped == sorted(skipped), "the curriculum skipped prompts"
    last_of_step = {line["step"]: line for line in metrics_of(runs[1])}
    for line in metrics_of(runs[0]):
        again = last_of_step[line["step"]]
        assert line["loss/policy"] == pytest.approx(again["loss/policy"], abs=1e-6)
        for key in ("batch/replaced_groups", "curriculum/skipped", "curriculum/easy", "curriculum/hard"):
            assert line[key] == again[key]
    replaced = sum(line["batch/replaced_groups"] for line in metrics_of(runs[0]))
    assert replaced == sum(reason == "no_signal" for *_, reason, _, _ in whole) > 0


def test_the_four_reward_functions_of_the_hugging_face_course_train_on_a_dataset_from_disk(tmp_path: Path) -> None:
    rows = [{"question": f"{i} + {i}>", "answers": str(2 * i)} for i in range(6)]
    Dataset.from_list(rows).save_to_disk(tmp_path / "data")
    names = ["reward_func", "reward_len", "format_reward", "problem_reward"]
    with tiny_server() as server:
        run = make_run(
            tmp_path,
            server.endpoint,
            steps=2,
            data={"dataset": str(tmp_path / "data"), "prompt_column": "question"},
            reward={"functions": [f"tests/learner/rewards/user_rewards.py:{name}" for name in names]},
            advantage={"combine": "normalize_then_sum", "baseline": "leave_one_out"},
            loss={"objective": "cispo", "normalization": "sequence"},
            kl={"coef": 0.01, "estimator": "k2"},
            reference={"kind": "ema", "every_steps": 1, "alpha": 0.1},
        )
        train(run, resume=False)
    for line in metrics_of(run):
        assert line["reward/reward_func"] >= 0 >= line["reward/reward_len"] and line["reward/format_reward"] == 0
        assert line["reward/mean"] == pytest.approx(sum(line[f"reward/{name}"] for name in names))


def test_a_conversation_goes_through_the_chat_template_and_its_rewards_see_messages(tmp_path: Path) -> None:
    data = tmp_path / "chat.jsonl"
    message = {"role": "user", "content": "12>"}
    data.write_text(json.dumps({"prompt": [message], "answer": "21"}) + "\n")
    with tiny_server() as server:
        reward = {"functions": ["share_right", "tests/learner/rewards/user_rewards.py:number_of_messages"]}
        run = make_run(tmp_path, server.endpoint, steps=1, data={"path": str(data)}, reward=reward)
        train(run, resume=False)
    assert metrics_of(run)[0]["reward/number_of_messages"] == 1


def test_metrics_have_the_names_of_the_design(tmp_path: Path) -> None:
    with tiny_server() as server:
        run = make_run(tmp_path, server.endpoint, steps=2, parity={"every_steps": 1}, report={"dashboard_port": 0})
        train(run, resume=False)
    expected = {
        "reward/mean", "reward/std", "reward/share_right", "reward/exact_match", "loss/policy", "loss/clipped_frac",
        "policy/entropy", "policy/behaviour_kl", "staleness/mean", "staleness/max", "rollout/completion_length_mean",
        "rollout/truncated_frac", "weight_sync/seconds", "weight_sync/stall_seconds", "time/wait_for_batch", "time/step",
        "perf/completion_tokens_per_s", "perf/learner_idle_frac", "optim/lr", "optim/grad_norm", "parity/abs_logprob",
    }  # fmt: skip
    metrics = metrics_of(run)
    assert expected <= metrics[0].keys()
    events = EventAccumulator(str(Path(run.run_dir) / "tensorboard")).Reload()
    logged = [(event.step, event.value) for event in events.Scalars("loss/policy")]
    assert logged == [(line["step"], pytest.approx(line["loss/policy"])) for line in metrics]


def test_a_push_that_fails_is_tried_again_in_a_new_session(tmp_path: Path) -> None:
    engine = ModelEngine(resolve_model("tiny:digits"))
    engine.scripted_reports = [[report(ok=False, state="joining", error="scripted failure")]]
    with tiny_server(engine) as server:
        run = make_run(tmp_path, server.endpoint, steps=2, weight_sync={"timeout_s": 20})
        train(run, resume=False)
    first, second = (order.session for order in engine.orders[:2])
    assert first != second and engine.orders[1].rendezvous is not None
    assert [order.version for order in engine.orders] == [0, 0, 1, 2]
    assert len(metrics_of(run)) == 2


@pytest.mark.parametrize("overlap", [False, True])
def test_a_push_that_would_fail_again_ends_the_run_at_once(tmp_path: Path, overlap: bool) -> None:
    engine = ModelEngine(resolve_model("tiny:digits"))
    error = str(PushIncomplete.missing(["model.norm.weight"]))
    engine.reports_from_version[1] = [
        report(ok=False, state="loading", weights_intact=False, retryable=False, error=error)
    ]
    with tiny_server(engine) as server:
        run = make_run(
            tmp_path, server.endpoint, steps=3, weight_sync={"timeout_s": 30, "overlap_with_training": overlap}
        )
        with pytest.raises(PushIncomplete, match=r"is missing weights .*model\.norm\.weight.*the same `model`"):
            train(run, resume=False)
    assert [order.version for order in engine.orders] == [0, 1]


@pytest.mark.parametrize("compression", ["none", "delta"])
def test_a_large_push_shows_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], compression: str
) -> None:
    monkeypatch.setattr("learner.servers.weight_transfer.PROGRESS_BYTES", 1)
    with tiny_server() as server:
        train(make_run(tmp_path, server.endpoint, steps=1, weight_sync={"compression": compression}), resume=False)
    drawn = capsys.readouterr().err
    for version in (0, 1):
        first, *_, last = re.findall(rf"weight sync {version}: +(.*)", drawn.replace("\r", "\n"))
        assert first.startswith("0%") and last.startswith("100%") and "421k/421k" in last, (first, last)


def test_a_small_push_shows_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tiny_server() as server:
        train(make_run(tmp_path, server.endpoint, steps=1), resume=False)
    assert "weight sync 0:" not in capsys.readouterr().err


def test_a_push_beside_the_next_step_sends_the_weights_as_they_were_and_keeps_staleness_within_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = {}
    begin = WeightSync.begin

    def remember_and_begin(self: WeightSync, version: int, when_done: Callable[[], object]) -> None:
        trained[version] = dict(self._weights.tensors())["transformer.wte.weight"].detach().clone()
        begin(self, version, when_done)

    monkeypatch.setattr(WeightSync, "begin", remember_and_begin)

    class Slow(ModelEngine):
        """Begins late to receive a push, and keeps what came."""

        def __init__(self) -> None:
            super().__init__(resolve_model("tiny:digits"))
            self.pushed: dict[int, torch.Tensor] = {}

        def _load(self, order: PushOrder) -> WorkerReport:
            time.sleep(0.3)
            return super()._load(order)

        async def set_version(self, version: int) -> None:
            await super().set_version(version)
            self.pushed[version] = self.weights["transformer.wte.weight"].clone()

    with tiny_server(Slow()) as server:
        quick = {
            "weight_sync": {"overlap_with_training": True},
            "parity": {"every_steps": 0},
        }  # this engine does not score before it generates
        run = make_run(tmp_path, server.endpoint, steps=6, max_staleness=2, **quick)
        train(run, resume=False)
    assert server.running.server.status()["policy_version"] == 6
    metrics = metrics_of(run)
    assert all(line["staleness/max"] <= 2 for line in metrics)
    assert (
        "weight_sync/seconds" not in metrics[0]
        and metrics[0]["time/weight_sync"] < 0.5 * metrics[1]["weight_sync/seconds"]
    )
    for version, weights in trained.items():
        assert torch.equal(weights, server.engine.pushed[version]), version
    assert len(trained) == 6


def test_a_push_beside_the_next_step_that_never_succeeds_stops_the_run(tmp_path: Path) -> None:
    engine = ModelEngine(resolve_model("tiny:digits"))
    with tiny_server(engine) as server:
        run = make_run(
            tmp_path, server.endpoint, weight_sync={"timeout_s": 20, "overlap_with_training": True, "max_attempts": 2}
        )
        bad = report(ok=False, state="receiving", error="scripted failure")
        engine.reports_from_version = {1: [bad]}
        with pytest.raises(PushError, match=r"weight sync of version 1 failed in 2 attempts .*scripted failure"):
            train(run, resume=False)


def test_a_server_with_another_model_refuses_and_both_sides_are_named(tmp_path: Path) -> None:
    with ServerThread(ScriptedEngine()) as server, pytest.raises(HandshakeRefused) as caught:
        train(make_run(tmp_path, server.endpoint), resume=False)
    assert "2 layers of width 64 with 16 tokens" in str(caught.value) and "with 32 tokens" in str(caught.value)


def test_a_server_that_scores_otherwise_stops_the_run_before_the_first_step(tmp_path: Path) -> None:
    class Wrong(ModelEngine):
        async def score(self, token_ids, replica):
            logprobs, version = await super().score(token_ids, replica)
            return logprobs - 0.01, version

    with (
        tiny_server(Wrong(resolve_model("tiny:digits"))) as server,
        pytest.raises(ParityError, match=r"0\.01.*bound is 0\.001"),
    ):
        train(make_run(tmp_path, server.endpoint), resume=False)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_server_that_answers_with_other_weights_after_a_push_stops_the_run_before_it_trains_on_them(
    tmp_path: Path, overlap: bool
) -> None:
    class LosesATensor(ModelEngine):
        """From version 3 on: every byte arrives and is acknowledged, one tensor is not loaded."""

        async def set_version(self, version: int) -> None:
            before = self.model.transformer.wpe.weight.detach().clone()
            await super().set_version(version)
            if version >= 3:
                with torch.no_grad():
                    self.model.transformer.wpe.weight.copy_(before)

    with tiny_server(LosesATensor(resolve_model("tiny:digits"))) as server:
        run = make_run(
            tmp_path,
            server.endpoint,
            steps=6,
            max_staleness=int(overlap),
            weight_sync={"overlap_with_training": overlap},
        )
        with pytest.raises(
            ParityError, match=r"of texts of the step is 0\.\d+, the bound is 0\.001.*loaded every tensor"
        ):
            train(run, resume=False)
    parity = [line["parity/abs_logprob"] for line in metrics_of(run) if "parity/abs_logprob" in line]
    assert parity and max(parity) < 1e-5
    with closing(sqlite3.connect(Path(run.run_dir) / "ledger.db")) as ledger:
        (last_trained,) = ledger.execute("select max(step) from groups where state = 'consumed'").fetchone()
    assert last_trained <= 3 + overlap  # step 4 is the first on tokens of version 3


def test_a_server_is_asked_whether_it_has_a_version_right_before_it_is_asked_for_groups_of_it(tmp_path: Path) -> None:
    class Told(ModelEngine):
        """Keeps in which order it is asked, with the version it has then."""

        def __init__(self) -> None:
            super().__init__(resolve_model("tiny:digits"))
            self.asked: list[tuple[int | None, str]] = []

        async def score(self, token_ids, replica):
            self.asked.append((self.version, "score"))
            return await super().score(token_ids, replica)

        async def sample(self, prompt_token_ids, sampling):
            self.asked.append((self.version, "group"))
            return await super().sample(prompt_token_ids, sampling)

    with tiny_server(engine := Told()) as server:
        train(make_run(tmp_path, server.endpoint, steps=4, max_staleness=0), resume=False)
    of_versions = [[what for at, what in engine.asked if at == version] for version in (1, 2, 3)]
    assert all(asked[0] == "score" and "group" in asked for asked in of_versions), of_versions


def test_the_garbage_collector_leaves_alone_what_stays_until_the_run_is_over(tmp_path: Path) -> None:
    class Counts(ModelEngine):
        frozen = 0

        async def set_version(self, version: int) -> None:
            self.frozen = gc.get_freeze_count()
            await super().set_version(version)

    before = gc.get_freeze_count()
    with tiny_server(engine := Counts(resolve_model("tiny:digits"))) as server:
        train(make_run(tmp_path, server.endpoint, steps=2), resume=False)
    assert engine.frozen > 100_000 and gc.get_freeze_count() <= before


class TooBusy(ModelEngine):
    """Answers no question for scores from a version on."""

    def __init__(self, from_version: int) -> None:
        super().__init__(resolve_model("tiny:digits"))
        self._from_version = from_version

    async def score(self, token_ids, replica):
        if self.version is not None and self.version >= self._from_version:
            await asyncio.sleep(60)
        return await super().score(token_ids, replica)


def test_a_server_that_does_not_score_at_the_start_ends_the_run_with_the_knob(tmp_path: Path) -> None:
    with (
        tiny_server(TooBusy(0)) as server,
        pytest.raises(
            DeadlineExceeded, match=r"did not score \d+ tokens within 1 s \(learner\.weight_sync\.timeout_s\)"
        ),
    ):
        train(make_run(tmp_path, server.endpoint, weight_sync={"timeout_s": 1}), resume=False)


def test_a_server_too_busy_to_score_later_holds_nothing_up_for_long(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with tiny_server(TooBusy(1)) as server:
        run = make_run(tmp_path, server.endpoint, steps=2, weight_sync={"timeout_s": 20, "straggler_timeout_s": 0.3})
        train(run, resume=False)
    assert len(metrics_of(run)) == 2
    assert "parity of version 1 could not be checked" in caplog.text


@pytest.mark.parametrize("versions_late", [0, 1])
def test_only_groups_that_entered_under_the_current_version_are_compared(tmp_path: Path, versions_late: int) -> None:
    """One that waited inside vLLM over a push may have its prompt's keys and values from the old weights."""

    class Off(ModelEngine):
        async def sample(self, prompt_token_ids, sampling):
            completions, version = await super().sample(prompt_token_ids, sampling)
            off = [msgspec.structs.replace(c, behaviour_logprobs=c.behaviour_logprobs - 0.05) for c in completions]
            return off, version - versions_late

    with tiny_server(Off(resolve_model("tiny:digits"))) as server:
        run = make_run(tmp_path, server.endpoint, steps=2)
        if versions_late:
            train(run, resume=False)
            assert not any("policy/mismatch_abs_logprob" in line for line in metrics_of(run))
        else:
            with pytest.raises(ParityError, match=r"fresh tokens is 0\.05"):
                train(run, resume=False)


def test_a_prompt_longer_than_the_server_allows_is_refused_with_the_numbers(tmp_path: Path) -> None:
    run_of = {"sampling": {"group_size": 2, "max_tokens": 60}}
    with (
        tiny_server() as server,
        pytest.raises(DataError, match=r"5 tokens.*max_tokens = 60.*64.*server\.max_model_len"),
    ):
        train(make_run(tmp_path, server.endpoint, **run_of), resume=False)


def test_episodes_longer_than_the_server_allows_are_refused_with_the_numbers(tmp_path: Path) -> None:
    welcome = SimpleNamespace(max_model_len=64, dtype="float32")
    server: Any = SimpleNamespace(endpoint="tcp://a:1", welcome=welcome)
    for max_episode_tokens, refused in (
        (64, nullcontext()),
        (65, pytest.raises(ConfigError, match=r"= 65 .* max_model_len = 64 of")),
    ):
        environment = {"factory": "guess", "max_turns": 4, "max_episode_tokens": max_episode_tokens}
        run = make_run(tmp_path, server.endpoint, environment=environment)
        with refused:
            check_fits(RunInputs(run), server)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("raises", r"raises.*ValueError.*no such answer"),
        ("wrong_length", r"wrong_length.*4 completions"),
        ("never_returns", r"never_returns timed out 3 times(.|\n)*within 1 s.*learner\.reward\.timeout_s"),
    ],
)
def test_a_broken_reward_function_stops_the_run_with_its_name(tmp_path: Path, function: str, expected: str) -> None:
    reward = {"functions": [f"tests/learner/rewards/broken_rewards.py:{function}"], "timeout_s": 1.0}
    with tiny_server() as server, pytest.raises(RewardError, match=expected):
        train(make_run(tmp_path, server.endpoint, reward=reward), resume=False)


def test_one_slow_group_costs_only_its_reward_and_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_CURRENT_TEST_DIR", str(tmp_path))
    reward = {
        "functions": ["share_right", "tests/learner/rewards/broken_rewards.py:slow_once"],
        "weights": [1.0, 0.0],
        "timeout_s": 1.0,
    }
    with tiny_server() as server:
        run = make_run(tmp_path, server.endpoint, reward=reward, steps=2)
        train(run, resume=False)
    metrics = metrics_of(run)
    assert sum(line["rollout/rewards_timed_out"] for line in metrics) == 1
    assert sum(line["rollout/rewards_failed"] for line in metrics) == 0
    assert len(rows_of(run, "slot", "state = 'consumed'")) == 6


def test_a_start_that_failed_leaves_no_run_behind(tmp_path: Path) -> None:
    with tiny_server() as server:
        wrong = make_run(tmp_path, server.endpoint, data={"task": "reverse", "num_digits": 4, "prompt_column": "promt"})
        with pytest.raises(DataError, match="promt"):
            train(wrong, resume=False)
        longer = make_run(tmp_path, server.endpoint, sampling={"group_size": 2, "max_tokens": 60})
        with pytest.raises(DataError, match="max_model_len"):
            train(longer, resume=False)
        train(make_run(tmp_path, server.endpoint, steps=1), resume=False)
    assert len(metrics_of(longer)) == 1


def test_a_finished_run_that_is_resumed_leaves_its_checkpoint_alone(tmp_path: Path) -> None:
    with tiny_server() as server:
        run = make_run(tmp_path, server.endpoint, steps=2)
        train(run, resume=False)
        state = Path(run.run_dir) / "checkpoints" / "step-000002" / "state.json"
        written = state.stat().st_mtime_ns
        assert train(run, resume=True) == Path(run.run_dir)
    assert state.stat().st_mtime_ns == written


def test_a_half_written_or_half_deleted_checkpoint_is_not_taken_for_one(tmp_path: Path) -> None:
    for name in ("step-000001", "step-000002", "step-000003.tmp", "step-000004.old.tmp"):
        (tmp_path / name).mkdir()
        if name != "step-000002":
            (tmp_path / name / "state.json").write_text("{}")
    assert find_checkpoint(tmp_path) == tmp_path / "step-000001"


def test_prompts_that_almost_fill_the_context_can_still_be_probed(tmp_path: Path) -> None:
    data = tmp_path / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i:058d}", "answer": "1"}) + "\n" for i in range(4)))
    with tiny_server() as server:
        run = make_run(tmp_path, server.endpoint, steps=1, data={"path": str(data)})
        train(run, resume=False)
    assert len(metrics_of(run)) == 1


def test_a_server_that_has_forgotten_the_run_is_given_the_weights_again(tmp_path: Path) -> None:
    class Forgetful(ModelEngine):
        """Makes the server take the learner for gone once, in the middle of the run."""

        async def set_version(self, version: int) -> None:
            await super().set_version(version)
            if version == 2 and not self.forgot:
                self.forgot = True
                self.server.server._free()

        forgot = False
        server: Any

    engine = Forgetful(resolve_model("tiny:digits"))
    with tiny_server(engine) as server:
        engine.server = server.running
        run = make_run(tmp_path, server.endpoint, steps=5)
        train(run, resume=False)
    assert len(metrics_of(run)) == 5 and rows_of(run, "count(*)", "state = 'consumed'") == [(15,)]


def test_a_run_outlives_the_servers_engine_and_consumes_every_prompt_once(tmp_path: Path) -> None:
    class Mortal(ModelEngine):
        """Dies with groups in it, once."""

        async def set_version(self, version: int) -> None:
            await super().set_version(version)
            if version == 2 and "restart" not in self.calls:
                self.fail_with = EngineDead("scripted death")

    engine = Mortal(resolve_model("tiny:digits"))
    with tiny_server(engine) as server:
        run = make_run(tmp_path, server.endpoint, steps=5)
        train(run, resume=False)
        status = server.running.server.status()
    assert (status["engine_restarts"], status["policy_version"]) == (1, 5)
    assert len(metrics_of(run)) == 5 and rows_of(run, "count(*), count(distinct slot)", "state = 'consumed'") == [
        (15, 15)
    ]
    assert rows_of(run, "max(attempt)") == [(0,)], (
        "a death costs no attempt: the groups are asked for under the same id"
    )


def test_a_run_directory_is_refused_or_resumed_but_never_overwritten(tmp_path: Path) -> None:
    with tiny_server() as server:
        run = make_run(tmp_path, server.endpoint, steps=1)
        train(run, resume=False)
        with pytest.raises(ConfigError, match=r"already contains a run.*--resume"):
            train(run, resume=False)
        other = make_run(tmp_path, server.endpoint, steps=1, updates_per_batch=5)
        with pytest.raises(ConfigError, match=r"another config: learner\.updates_per_batch was 1, is 5"):
            train(other, resume=True)
        with pytest.raises(ConfigError, match="contains no run to resume"):
            train(make_run(tmp_path / "new", server.endpoint), resume=True)
    assert len(metrics_of(run)) == 1
