"""The first push to a server that nothing was pushed to changes nothing, or the run does not begin."""

from pathlib import Path

import pytest
import torch

from learner.train import train
from protocol.errors import ParityError
from protocol.model_files import resolve_model
from tests.learner.model_engine import ModelEngine, tiny_server
from tests.learner.runs import make_run, metrics_of

FAR_BELOW_PARITY = 3e-4
"""Relative change of the weights: the logprobs change by less than the bound of parity, which is 1e-3."""


class Reloading(ModelEngine):
    """Loads what is pushed a little differently from what it has loaded at its start."""

    async def set_version(self, version: int) -> None:
        self.weights = {name: tensor * (1 + FAR_BELOW_PARITY) for name, tensor in self.weights.items()}
        await super().set_version(version)


def test_a_first_push_that_changes_logprobs_stops_the_run_before_it_begins(tmp_path: Path) -> None:
    with tiny_server(Reloading(resolve_model("tiny:digits"))) as server:
        with pytest.raises(ParityError, match=r"the first weight sync sent the weights.*max_identity_abs_logprob"):
            train(make_run(tmp_path / "first", server.endpoint), resume=False)
        # It has the weights of a run now, so another run's first push may change what it serves.
        run = make_run(tmp_path / "second", server.endpoint, steps=1)
        train(run, resume=False)
    assert metrics_of(run)


def test_the_bound_may_be_raised(tmp_path: Path) -> None:
    with tiny_server(Reloading(resolve_model("tiny:digits"))) as server:
        run = make_run(tmp_path, server.endpoint, steps=1, parity={"max_identity_abs_logprob": 1e-3})
        train(run, resume=False)
    assert metrics_of(run)


def test_a_policy_that_is_not_what_the_server_has_loaded_is_not_compared(tmp_path: Path) -> None:
    """After a warm start, and when a run is resumed beside a server that was started anew."""
    warm_start = {"steps": 2, "rows_per_step": 4, "learning_rate": 1e-2}
    with tiny_server() as server:
        run = make_run(tmp_path, server.endpoint, steps=1, warm_start=warm_start)
        train(run, resume=False)
    with tiny_server() as server:
        train(make_run(tmp_path, server.endpoint, steps=2, warm_start=warm_start), resume=True)
    assert len(metrics_of(run)) == 2


def test_the_noise_of_the_server_widens_the_bound(tmp_path: Path) -> None:
    class Noisy(ModelEngine):
        """A server that is busy with others."""

        async def score(self, token_ids, replica):
            logprobs, version = await super().score(token_ids, replica)
            return logprobs + torch.randn(len(logprobs)).numpy() * 2e-4, version

    with tiny_server(Noisy(resolve_model("tiny:digits"))) as server:
        run = make_run(tmp_path, server.endpoint, steps=1)
        train(run, resume=False)
    assert metrics_of(run)
