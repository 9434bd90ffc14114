"""Whole runs of two ranks: launched as the README says, sharded, and waiting for each other. Their numbers:
test_two_ranks.py."""

import asyncio
import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from learner.run_inputs import RunInputs
from learner.training.distributed import ranks_of
from learner.training.policy_trainer import make_trainer
from protocol.config import to_toml
from protocol.errors import RankFailed
from protocol.model_files import resolve_model
from tests.learner.checkpoints import weights_of
from tests.learner.forked_learner import end_of, start_learner
from tests.learner.model_engine import ModelEngine, tiny_server
from tests.learner.ranks import ACCELERATE, TORCHRUN, Place, launch, places_of, run_ranks
from tests.learner.runs import make_run
from tests.learner.training import fixed_groups
from tests.peer import PROCESSES

pytestmark = pytest.mark.system


def test_two_launched_ranks_and_small_micro_batches_give_the_losses_and_weights_of_one(tmp_path: Path) -> None:
    one, weights_of_one = run_ranks(tmp_path / "one", 1)
    two, weights_of_two = run_ranks(
        tmp_path / "two", 2, start=partial(launch, ACCELERATE), micro_batch_tokens=20, parity={"every_steps": 1}
    )
    for name in ("loss/policy", "loss/clipped_frac", "policy/entropy", "reference/kl", "optim/grad_norm", "optim/lr"):
        # a step without tokens to train on measures no KL
        of_one, of_two = ([line[name] for line in lines if name in line] for lines in (one, two))
        assert of_two == pytest.approx(of_one, abs=1e-5) and len(of_one) >= 2, name
    assert len(two) == 4
    for name in ("transformer.wpe.weight", "transformer.h.0.mlp.c_fc.weight"):
        torch.testing.assert_close(weights_of_two[name], weights_of_one[name], atol=1e-3, rtol=0)


def test_sharded_ranks_learn_the_same_with_their_reference_on_a_server(tmp_path: Path) -> None:
    """Rank 0 requests the logprobs, and all ranks gather the copy of the policy for a refresh."""
    one, _ = run_ranks(tmp_path / "one", 1)
    with tiny_server() as on_server:
        reference = {"kind": "every", "every_steps": 2, "endpoint": on_server.endpoint}
        two, _ = run_ranks(
            tmp_path / "two", 2, start=partial(launch, TORCHRUN), sharding="full", micro_batch_tokens=20,
            reference=reference,
        )  # fmt: skip
    for name in ("loss/policy", "reference/kl", "reference/version", "optim/grad_norm"):
        of_one, of_two = ([line[name] for line in lines if name in line] for lines in (one, two))
        assert of_two == pytest.approx(of_one, abs=1e-5) and len(of_one) >= 2, name


def test_a_sharded_policy_is_pushed_beside_the_next_step_as_it_was_saved(tmp_path: Path) -> None:
    push = {"overlap_with_training": True, "timeout_s": 20}
    checkpoint = {"every_steps": 4}
    _, pushed = run_ranks(
        tmp_path / "two", 2, start=partial(launch, TORCHRUN), sharding="full", max_staleness=2, weight_sync=push,
        checkpoint=checkpoint,
    )  # fmt: skip
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


RANK_TIMEOUT_S = 15.0


def test_a_rank_waits_as_long_as_rank_0_and_stops_when_that_says_why(tmp_path: Path) -> None:
    config, log = tmp_path / "run.toml", tmp_path / "run.log"
    with tiny_server(Held()) as server:
        reward = {"functions": ["tests/learner/rewards/broken_rewards.py:raises"], "max_failed_share": 0}
        run = make_run(tmp_path, server.endpoint, steps=3, collective_timeout_s=RANK_TIMEOUT_S, reward=reward)
        config.write_text(to_toml(run))
        ranks = [start_learner(("train", str(config)), log, log, place.enter) for place in places_of(2)]
        try:
            assert server.engine.is_asked.wait(120), log.read_text()
            ranks[1].join(1.4 * RANK_TIMEOUT_S)
            assert [rank.exitcode for rank in ranks] == [None, None], log.read_text()
            server._loop.call_soon_threadsafe(server.engine.may_complete.set)
            assert [end_of(rank, log) for rank in ranks] == [2, 2]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join(30)
    assert "no such answer" in log.read_text() and "rank 0 of this learner has stopped with an error" in log.read_text()


def hang(place: Place) -> None:
    """Rank 0 does, while it leads; exit code 7 is that of a rank that has noticed."""
    place.enter()
    run = fixed_groups.make_run(collective_timeout_s=10.0)
    try:
        with ranks_of(run) as accelerator:
            published = make_trainer(RunInputs(run), accelerator, is_new=True).published
            with published.led():
                os.kill(os.getpid(), signal.SIGSTOP)
    except RankFailed as error:
        assert "rank 0 of this learner has stopped or hangs" in str(error)
        assert "learner.collective_timeout_s" in str(error)
        os._exit(7)


def test_a_rank_notices_when_rank_0_hangs() -> None:
    first, second = ranks = [PROCESSES.Process(target=hang, args=(place,)) for place in places_of(2)]
    for rank in ranks:
        rank.start()
    try:
        second.join(120)
        assert (first.exitcode, second.exitcode) == (None, 7)
    finally:
        for rank in ranks:
            rank.kill()
            rank.join(30)
