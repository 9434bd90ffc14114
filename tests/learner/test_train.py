"""Whole runs of the learner with the real server, with a transformers model instead of vLLM."""

import gc
import signal
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from datasets import Dataset
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

from inference_server.engine.interface import EngineDead
from learner.config import LearnerRun
from learner.policy.model import load_tokenizer
from learner.prompts.prompts import Prompts
from learner.storage.checkpoint import find_checkpoint
from learner.train import train, train_on
from protocol.errors import DataError, DeadlineExceeded, ParityError
from protocol.messages import Completion, Sampling
from protocol.model_files import resolve_model
from tests.learner.model_engine import TINY_LIMITS, ModelEngine, VersionedEngine, sample, tiny_server
from tests.learner.runs import (
    GROUPS_PER_STEP,
    MAX_TOKENS,
    NUM_COMPLETIONS,
    assert_each_prompt_once,
    make_run,
    metrics_of,
    rows_of,
    seeded,
)
from tests.waiting import TIMEOUT_S

NUM_STEPS = 8
"""Three epochs of the 8 prompts."""
Scored = tuple[np.ndarray, int | None]


def plain_loop(run: LearnerRun, num_steps: int) -> tuple[list[float], Any]:
    """Run plain synchronous GRPO: sample, score, subtract the mean, clip, step. Return losses and the model."""
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
            for (tokens, behavior), advantage in zip(samples, advantages, strict=True):
                ids = torch.tensor([prompt.token_ids + tokens])
                logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
                ratio = (logprobs[len(prompt.token_ids) - 1 :] - torch.tensor(behavior)).exp()
                terms.append(-torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage).sum())
                num_tokens += len(tokens)
        loss = torch.stack(terms).sum() / num_tokens
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


class Observed(ModelEngine):
    """An engine with two replicas that records its requests, in order, with its version."""

    def __init__(self) -> None:
        limits = msgspec.structs.replace(TINY_LIMITS, num_replicas=2)
        super().__init__(resolve_model("tiny:digits"), limits)
        self.requests: list[tuple[int | None, str]] = []
        self.num_frozen = 0

    async def set_version(self, version: int) -> None:
        self.num_frozen = gc.get_freeze_count()
        await super().set_version(version)

    async def score(self, token_ids: np.ndarray, replica: int) -> Scored:
        self.requests.append((self.version, f"score of {replica}"))
        return await super().score(token_ids, replica)

    async def sample(self, prompt_token_ids: np.ndarray, sampling: Sampling) -> tuple[list[Completion], int]:
        self.requests.append((self.version, "group"))
        return await super().sample(prompt_token_ids, sampling)


class Plain(NamedTuple):
    run: LearnerRun
    engine: Observed


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Return a finished synchronous run."""
    engine, before = Observed(), gc.get_freeze_count()
    with tiny_server(engine) as server:
        run = make_run(
            tmp_path_factory.mktemp("plain"), server.endpoint, steps=NUM_STEPS, weight_sync={"compression": "delta"},
            report={"dashboard_port": 0}, **seeded(),
        )  # fmt: skip
        train(run, resume=False)
    assert gc.get_freeze_count() <= before
    return Plain(run, engine)


def test_staleness_zero_has_the_losses_of_a_plain_loop_at_every_step(plain: Plain) -> None:
    losses, model = plain_loop(plain.run, NUM_STEPS)
    metrics = metrics_of(plain.run)
    assert [line["loss/policy"] for line in metrics] == pytest.approx(losses, abs=1e-5)
    assert any(abs(loss) > 1e-3 for loss in losses)
    assert all(line["staleness/max"] == 0 for line in metrics)
    # Not compared per tensor: Adam turns rounding noise of zero gradients into whole steps.
    ids = torch.arange(3, 15)[None]
    torch.testing.assert_close(plain.engine.model(ids).logits, model(ids).logits, atol=1e-3, rtol=1e-3)


def test_every_prompt_is_consumed_once_in_every_epoch_of_the_data(plain: Plain) -> None:
    assert_each_prompt_once(plain.run, NUM_STEPS)


def test_metrics_have_the_names_of_the_design(plain: Plain) -> None:
    expected = {
        "reward/mean", "reward/std", "reward/share_right", "reward/exact_match", "loss/policy", "loss/clipped_frac",
        "policy/entropy", "policy/behavior_kl", "staleness/mean", "staleness/max", "rollout/completion_length_mean",
        "rollout/truncated_frac", "weight_sync/seconds", "weight_sync/stall_seconds", "time/wait_for_batch",
        "time/step",
        "perf/completion_tokens_per_s", "perf/learner_idle_frac", "optim/lr", "optim/grad_norm", "parity/abs_logprob",
    }  # fmt: skip
    metrics = metrics_of(plain.run)
    assert expected <= metrics[0].keys()
    assert not any(name.startswith("servers/") for name in metrics[-1]), "a single server has no such metrics"
    assert all("time/checkpoint" in line for line in metrics[1:]), "a step begins with the checkpoint of the one before"
    for line in metrics:
        assert line["bottleneck/server"] > 0, "the server reports its time"
        assert sum(line[name] for name in line if name.startswith("bottleneck/")) <= line["time/step"]
    events = EventAccumulator(str(Path(plain.run.run_dir) / "tensorboard")).Reload()
    logged = [(event.step, event.value) for event in events.Scalars("loss/policy")]
    assert logged == [(line["step"], pytest.approx(line["loss/policy"])) for line in metrics]


def test_every_replica_is_scored_at_the_start_and_after_every_sync_before_it_gets_groups(plain: Plain) -> None:
    for version in (None, *range(NUM_STEPS)):
        requests = [what for at, what in plain.engine.requests if at == version]
        assert requests[0] == "score of 0" and ("group" in requests) == (version is not None)
        assert requests.count("score of 0") == requests.count("score of 1")
    checked = [line for line in metrics_of(plain.run) if "parity/unchanged_frac" in line]
    assert len(checked) >= 4
    for line in checked:
        assert line["parity/checked"] == 1
        assert line["parity/unchanged_frac"] < 0.1 and line["parity/abs_logprob"] < 1e-4
        assert line["parity/server_change"] == pytest.approx(line["parity/learner_change"], rel=0.1)


def test_objects_that_live_until_the_end_of_the_run_are_frozen_for_the_garbage_collector(plain: Plain) -> None:
    assert plain.engine.num_frozen > 100_000


def test_a_dataset_of_conversations_is_rendered_by_the_chat_template_and_scored_by_user_rewards(tmp_path: Path) -> None:
    rows = [{"question": [{"role": "user", "content": f"{i}{i + 1}>"}], "answer": f"{i + 1}{i}"} for i in range(6)]
    Dataset.from_list(rows).save_to_disk(tmp_path / "data")
    with tiny_server() as server:
        run = make_run(
            tmp_path,
            server.endpoint,
            steps=2,
            data={"dataset": str(tmp_path / "data"), "prompt_column": "question"},
            reward={"functions": ["share_right", "tests/learner/rewards/user_rewards.py:number_of_messages"]},
            advantage={"combine": "normalize_then_sum", "baseline": "leave_one_out"},
            loss={"objective": "cispo", "normalization": "sequence"},
            kl={"coef": 0.01, "estimator": "k2"},
            reference={"kind": "ema", "every_steps": 1, "alpha": 0.1},
        )
        train(run, resume=False)
    for line in metrics_of(run):
        assert line["reward/number_of_messages"] == 1
        assert line["reward/mean"] == pytest.approx(line["reward/share_right"] + 1)
    assert [line["reference/version"] for line in metrics_of(run)] == [1, 2]


class ScoresOtherwise(ModelEngine):
    async def score(self, token_ids: np.ndarray, replica: int) -> Scored:
        logprobs, version = await super().score(token_ids, replica)
        return logprobs - np.float32(0.01), version


class LoadsOtherwise(ModelEngine):
    """Loads wrong weights, by less than the bound between server and learner."""

    async def set_version(self, version: int) -> None:
        self.weights = {name: tensor * (1 + 3e-4) for name, tensor in self.weights.items()}
        await super().set_version(version)


def test_a_failed_start_leaves_no_run_and_a_finished_run_is_not_changed(tmp_path: Path) -> None:
    path = resolve_model("tiny:digits")
    wrong_column = {"task": "reverse", "num_digits": 4, "prompt_column": "promt"}
    busy = ModelEngine(path)
    busy.release.clear()

    async def never(token_ids: np.ndarray, replica: int) -> Scored:
        await busy.release.wait()
        raise AssertionError("unreachable: the engine is busy")

    busy.score = never  # type: ignore[method-assign]
    for engine, learner, error, expected in (
        (ModelEngine(path), {"data": wrong_column}, DataError, "promt"),
        (ScoresOtherwise(path), {}, ParityError, r"0\.01.*bound is 0\.001"),
        (LoadsOtherwise(path), {}, ParityError, "the first weight sync changed its logprobs"),
        (busy, {"weight_sync": {"timeout_s": 1}}, DeadlineExceeded, r"within 1 s \(learner\.weight_sync\.timeout_s\)"),
    ):
        with tiny_server(engine) as server, pytest.raises(error, match=expected):
            train(make_run(tmp_path, server.endpoint, **learner), resume=False)
    with tiny_server() as server:
        run = make_run(tmp_path, server.endpoint, steps=1)
        train(run, resume=False)
        state = Path(run.run_dir) / "checkpoints" / "step-000001" / "state.json"
        written = state.stat().st_mtime_ns
        assert train(run, resume=True) == Path(run.run_dir)
    assert state.stat().st_mtime_ns == written and len(metrics_of(run)) == 1


def test_partially_written_or_deleted_checkpoints_are_ignored(tmp_path: Path) -> None:
    for name in ("step-000001", "step-000002", "step-000003.tmp", "step-000004.old.tmp"):
        (tmp_path / name).mkdir()
        if name != "step-000002":
            (tmp_path / name / "state.json").write_text("{}")
    assert find_checkpoint(tmp_path) == tmp_path / "step-000001"


def test_a_run_survives_a_dead_engine_and_a_server_without_its_state(tmp_path: Path) -> None:
    engine = VersionedEngine()
    with tiny_server(engine) as server:

        def die() -> None:
            engine.fail_with = EngineDead("scripted death")  # while it has groups

        engine.on_version = {2: die, 4: lambda: server.running.server._free()}
        run = make_run(tmp_path, server.endpoint, steps=6)
        train(run, resume=False)
        status = server.running.server.status()
    assert (status["engine_restarts"], status["policy_version"]) == (1, 6)
    assert len(metrics_of(run)) == 6
    # Neither costs an attempt: the groups are requested again under the same ids.
    assert rows_of(run, "count(*), count(distinct slot), max(attempt)") == [(18, 18, 0)]


def test_an_interrupted_run_whose_only_server_has_left_saves_its_step_without_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiny_server() as server:

        def and_lose_the_server(trainer: Any, groups: Any, version: int, timer: Any) -> dict[str, float]:
            if version == 1:
                server.drain().result(TIMEOUT_S)
                signal.raise_signal(signal.SIGTERM)
            return train_on(trainer, groups, version, timer)

        monkeypatch.setattr("learner.train.train_on", and_lose_the_server)
        run = make_run(tmp_path, server.endpoint, connect_timeout_s=600)
        train(run, resume=False)
    assert find_checkpoint(run.checkpoint_dir) == run.checkpoint_dir / "step-000002"
    assert rows_of(run, "count(*)", "state = 'consumed'") == [(2 * GROUPS_PER_STEP,)]
    with tiny_server() as server:
        train(msgspec.structs.replace(run, endpoint=server.endpoint), resume=True)
        assert server.running.server.status()["policy_version"] == 4
    assert [metrics["step"] for metrics in metrics_of(run)] == [1, 2, 3, 4]
