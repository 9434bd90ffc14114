"""Two ranks under accelerate train the same numbers as one, whatever the micro-batches."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.config import to_toml
from protocol.model_files import resolve_model
from tests.learner.checkpoints import weights_of
from tests.learner.forked_learner import end_of, start_learner
from tests.learner.model_engine import ModelEngine, tiny_server
from tests.learner.ranks import places_of
from tests.learner.runs import make_run, metrics_of, seeded

ROOT = Path(__file__).parent.parent.parent.parent
LAUNCH = ["accelerate.commands.accelerate_cli", "launch", "--num_processes", "2", "--num_machines", "1",
          "--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no"]  # fmt: skip
UNSHARDED = ["--multi_gpu", "--no_python", sys.executable, "-m", "deploy.cli"]
"""As `accelerate launch --no_python slipstream`, which need not be installed here."""
SHARDED_BY_FSDP2 = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP",
                    "-m", "tests.learner.training.sharded_learner"]  # fmt: skip
SHARDED = pytest.param(True, id="sharded", marks=pytest.mark.slow)


def run_ranks(tmp_path: Path, num_ranks: int, *, is_sharded: bool = False, launched: bool = False, **learner: object):
    """Train on so many ranks, return what they wrote and the weights that reached the server."""
    with tiny_server() as server:
        reference = {"reference": {"kind": "every", "every_steps": 2}, "kl": {"coef": 0.1}}
        run = make_run(tmp_path, server.endpoint, **seeded() | reference | learner)
        tmp_path.mkdir()
        config = tmp_path / "run.toml"
        config.write_text(to_toml(run))
        start = launch if launched else partial(fork, num_ranks=num_ranks)
        logs = start(config, is_sharded=is_sharded)
        assert ("rank 1 of 2" in logs) == (num_ranks > 1)
        return metrics_of(run), server.engine.weights


def launch(config: Path, *, is_sharded: bool) -> str:
    """By the command that the README gives, told that there are GPUs, without which it would start a single process."""
    learner = SHARDED_BY_FSDP2 if is_sharded else UNSHARDED
    command = [sys.executable, "-m", *LAUNCH, *learner, "train", str(config)]
    on_cpu = os.environ | {"ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=on_cpu)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def fork(config: Path, *, num_ranks: int, is_sharded: bool, switches: tuple[str, ...] = ()) -> str:
    log = config.with_suffix(".log")
    places = places_of(num_ranks, is_sharded=is_sharded)
    ranks = [start_learner(("train", str(config), *switches), log, log, place.enter) for place in places]
    assert [end_of(rank, log) for rank in ranks] == [0] * num_ranks, log.read_text()
    return log.read_text()


@pytest.mark.parametrize("is_sharded", [False, SHARDED])
def test_two_ranks_and_small_micro_batches_give_the_losses_and_weights_of_one(tmp_path: Path, is_sharded: bool) -> None:
    one, weights_of_one = run_ranks(tmp_path / "one", 1)
    two, weights_of_two = run_ranks(
        tmp_path / "two", 2, is_sharded=is_sharded, launched=True, micro_batch_tokens=20,
        parity={"every_steps": 1},
    )  # fmt: skip
    for name in ("loss/policy", "loss/clipped_frac", "policy/entropy", "reference/kl", "optim/grad_norm", "optim/lr"):
        # a step without tokens to train on measures no KL
        of_one, of_two = ([line[name] for line in lines if name in line] for lines in (one, two))
        assert of_two == pytest.approx(of_one, abs=1e-5) and len(of_one) >= 2, name
    assert len(two) == 4
    for name in ("transformer.wpe.weight", "transformer.h.0.mlp.c_fc.weight"):
        torch.testing.assert_close(weights_of_two[name], weights_of_one[name], atol=1e-3, rtol=0)


LORA: dict[str, Any] = {"lora": {"rank": 4}, "optimizer": {"learning_rate": 5e-3}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_sharded", "settings"),
    [
        pytest.param(False, {}, id="whole on each", marks=pytest.mark.slow),
        pytest.param(True, {}, id="sharded"),
        pytest.param(True, LORA, id="sharded adapter", marks=pytest.mark.slow),
    ],
)
def test_a_run_of_two_ranks_then_one_then_two_ends_as_a_run_of_one(
    tmp_path: Path, is_sharded: bool, settings: dict[str, Any]
) -> None:
    reference = {"reference": {"kind": "every", "every_steps": 3}, "kl": {"coef": 0.1}}
    lines, weights = {}, {}
    for name, parts in (("one", [(1, 6)]), ("changing", [(2, 2), (1, 4), (2, 6)])):
        config = tmp_path / f"{name}.toml"
        with tiny_server() as server:
            for num_ranks, steps in parts:
                run = make_run(tmp_path / name, server.endpoint, **seeded() | reference | settings, steps=steps)
                config.write_text(to_toml(run))
                switches = ("--resume",) if steps > parts[0][1] else ()
                fork(config, num_ranks=num_ranks, is_sharded=is_sharded, switches=switches)
            lines[name], weights[name] = metrics_of(run), server.engine.weights
    assert [line["step"] for line in lines["changing"]] == [1, 2, 3, 4, 5, 6]
    for key in ("loss/policy", "reference/kl", "optim/grad_norm"):
        of_one, of_changing = ([line[key] for line in lines[name] if key in line] for name in ("one", "changing"))
        assert of_changing == pytest.approx(of_one, abs=1e-5) and any(abs(value) > 1e-3 for value in of_one), key
    name = "transformer.h.0.mlp.c_fc.weight"
    torch.testing.assert_close(weights["changing"][name], weights["one"][name], atol=1e-3, rtol=0)


@pytest.mark.slow
def test_a_sharded_policy_is_pushed_beside_the_next_step_as_it_was_saved(tmp_path: Path) -> None:
    push = {"overlap_with_training": True, "timeout_s": 20}
    checkpoint = {"every_steps": 4}
    _, pushed = run_ranks(
        tmp_path / "two", 2, is_sharded=True, max_staleness=2, weight_sync=push, checkpoint=checkpoint
    )
    (checkpoint,) = (tmp_path / "two").rglob("step-000004")
    for name, tensor in weights_of(checkpoint).items():
        assert torch.equal(pushed[name], tensor), name


class Held(ModelEngine):
    """Scores and takes pushes, but completes nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__(resolve_model("tiny:digits"))
        self.may_complete, self.is_asked = asyncio.Event(), threading.Event()

    async def sample(self, *args: Any) -> Any:
        self.is_asked.set()
        await self.may_complete.wait()
        return await super().sample(*args)


RANK_TIMEOUT_S = 20.0


def test_a_rank_waits_while_rank_0_says_that_it_waits_and_notices_when_that_hangs(tmp_path: Path) -> None:
    config, log = tmp_path / "run.toml", tmp_path / "run.log"
    with tiny_server(Held()) as server:
        run = make_run(tmp_path, server.endpoint, steps=3, collective_timeout_s=RANK_TIMEOUT_S)
        config.write_text(to_toml(run))
        first, second = ranks = [start_learner(("train", str(config)), log, log, place.enter) for place in places_of(2)]
        try:
            assert server.engine.is_asked.wait(120), log.read_text()
            long_enough = time.monotonic() + 1.5 * RANK_TIMEOUT_S
            while time.monotonic() < long_enough:
                assert [rank.exitcode for rank in ranks] == [None, None], log.read_text()
                time.sleep(0.2)
            os.kill(first.pid, signal.SIGSTOP)
            second.join(6 * RANK_TIMEOUT_S)
            assert second.exitcode == 2, log.read_text()
        finally:
            for rank in ranks:
                rank.kill()
                rank.join(30)
    assert "error: rank 0 of this learner has stopped or hangs" in log.read_text()
    assert "learner.collective_timeout_s" in log.read_text()


def test_ranks_that_waited_go_on_with_what_comes_and_stop_when_rank_0_says_why(tmp_path: Path) -> None:
    config, log = tmp_path / "run.toml", tmp_path / "run.log"
    with tiny_server(Held()) as server:
        reward = {"functions": ["tests/learner/rewards/broken_rewards.py:raises"], "max_failed_share": 0}
        run = make_run(tmp_path, server.endpoint, steps=3, collective_timeout_s=60, reward=reward)
        config.write_text(to_toml(run))
        ranks = [start_learner(("train", str(config)), log, log, place.enter) for place in places_of(2)]
        try:
            assert server.engine.is_asked.wait(120), log.read_text()
            server._loop.call_soon_threadsafe(server.engine.may_complete.set)
            assert [end_of(rank, log) for rank in ranks] == [2, 2]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join(30)
    assert "no such answer" in log.read_text() and "rank 0 of this learner has stopped with an error" in log.read_text()
