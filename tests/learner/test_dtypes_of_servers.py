"""Whole runs on servers whose dtypes differ from each other and from the run's: each is held to bounds of its own."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from learner.servers.parity import coarser, comparison, is_finer
from learner.train import train
from protocol.errors import ParityError
from protocol.messages import Completion, Sampling, Welcome
from protocol.model_files import resolve_model
from tests.learner.model_engine import TINY_LIMITS, ModelEngine
from tests.learner.runs import make_run, metrics_of
from tests.learner.test_several_servers import servers

BETWEEN = 0.05
"""Above the bound of float32, which is 1e-3, and below that of bfloat16, 0.3."""
BEYOND = 0.6
ALL_COUNT = {"entropy_coef": 1e-6}
"""A loss to which groups without signal belong too."""


class Engine(ModelEngine):
    """Gives logprobs that are off, as a coarser dtype's would be, in scores and samples or in samples alone."""

    def __init__(self, dtype: str, off: float = 0.0, scores_too: bool = True) -> None:
        super().__init__(resolve_model("tiny:digits"))
        self.limits = msgspec.structs.replace(TINY_LIMITS, dtype=dtype)
        self._off, self._off_in_scores = off, off if scores_too else 0.0

    async def score(self, token_ids: np.ndarray, replica: int) -> tuple[np.ndarray, int | None]:
        logprobs, version = await super().score(token_ids, replica)
        return logprobs - np.float32(self._off_in_scores), version

    def _completion(self, prompt: list[int], index: int, sampling: Sampling) -> Completion:
        completion = super()._completion(prompt, index, sampling)
        return msgspec.structs.replace(
            completion, behaviour_logprobs=completion.behaviour_logprobs - np.float32(self._off)
        )


class Reloading(Engine):
    """Loads what is pushed otherwise than what it has loaded at its start, by less than parity would notice in bfloat16."""

    async def set_version(self, version: int) -> None:
        self.weights = {name: tensor * 1.02 for name, tensor in self.weights.items()}
        await super().set_version(version)


def test_a_coarser_server_is_used_beside_an_exact_one_and_its_bound_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "learner")
    with servers(Engine("float32"), Engine("bfloat16", BETWEEN)) as (exact, coarse):
        run = make_run(tmp_path, exact.endpoint, coarse.endpoint, steps=8, loss=ALL_COUNT)
        train(run, resume=False)
    assert min(len(exact.engine.prompts), len(coarse.engine.prompts)) >= 8
    assert (
        f"the server at {coarse.endpoint} computes in bfloat16 and this run in float32; allowing a mean |Δ logprob| of up to 0.3"
        in caplog.text
    )
    assert f"the server at {exact.endpoint} computes in" not in caplog.text
    assert f"parity of the server at {coarse.endpoint}: mean |Δ logprob| = 5.0e-02" in caplog.text
    assert metrics_of(run)[-1]["servers/ready"] == 2


def test_the_bound_of_a_coarser_server_is_not_that_of_its_neighbour(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with servers(Engine("float32", BETWEEN), Engine("bfloat16", BETWEEN)) as (wrong, coarse):
        run = make_run(tmp_path, wrong.endpoint, coarse.endpoint, steps=4, loss=ALL_COUNT)
        train(run, resume=False)
    assert wrong.engine.prompts == [] and len(metrics_of(run)) == 4
    assert f"excluded the server at {wrong.endpoint}: server and learner disagree" in caplog.text
    assert "is 0.05, the bound is 0.001 for float32 (" in caplog.text


@pytest.mark.parametrize(
    ("dtype", "off", "words"),
    [("float32", BETWEEN, "float32"), ("bfloat16", BEYOND, "float32 on the learner and bfloat16 on the server")],
)
def test_fresh_tokens_are_held_to_the_bound_of_the_server_that_they_come_from(
    tmp_path: Path, dtype: str, off: float, words: str
) -> None:
    with servers(Engine("bfloat16", BETWEEN), Engine(dtype, off, scores_too=False)) as (coarse, wrong):
        run = make_run(tmp_path, coarse.endpoint, wrong.endpoint, steps=8, max_staleness=0, loss=ALL_COUNT)
        with pytest.raises(
            ParityError,
            match=rf"of fresh tokens is {off:g}.* for {words} \(.*Check that the server at {wrong.endpoint} has",
        ):
            train(run, resume=False)


def test_one_coarser_server_alone_is_held_to_its_bound_push_after_push(tmp_path: Path) -> None:
    class Worsening(Engine):
        """From version 2 on."""

        async def set_version(self, version: int) -> None:
            await super().set_version(version)
            if version >= 2:
                self._off_in_scores = BEYOND

    with servers(Worsening("bfloat16", BETWEEN)) as (server,):
        run = make_run(tmp_path, server.endpoint, steps=6, loss=ALL_COUNT)
        with pytest.raises(ParityError, match=r"of texts of the step is 0\.6, the bound is 0\.3"):
            train(run, resume=False)
    assert metrics_of(run)


def test_a_server_in_a_finer_dtype_than_weights_travel_in_is_not_asked_whether_its_first_push_changed_nothing(
    tmp_path: Path,
) -> None:
    with servers(Reloading("float32")) as (server,):
        run = msgspec.structs.replace(make_run(tmp_path, server.endpoint, steps=2), dtype="bfloat16")
        train(run, resume=False)
    assert len(metrics_of(run)) == 2


@pytest.mark.parametrize("run_dtype", ["bfloat16", "float32"])
def test_a_server_in_bfloat16_is_asked_whether_its_first_push_changed_nothing(tmp_path: Path, run_dtype: str) -> None:
    with servers(Reloading("bfloat16")) as (server,):
        run = msgspec.structs.replace(make_run(tmp_path, server.endpoint), dtype=run_dtype)
        with pytest.raises(ParityError, match=r"the first weight sync sent.*the bound is 0\.001 for bfloat16"):
            train(run, resume=False)


@pytest.mark.parametrize(
    ("ours", "theirs", "bound"),
    [("float32", "float32", 1e-3), ("float32", "bfloat16", 0.3), ("bfloat16", "float32", 0.3)],
)
def test_the_bound_is_that_of_the_coarser_dtype_whichever_side_has_it(
    tmp_path: Path, ours: str, theirs: str, bound: float
) -> None:
    run = msgspec.structs.replace(make_run(tmp_path, "tcp://127.0.0.1:1"), dtype=ours)
    assert comparison(run, welcome(theirs)).bound == bound
    assert is_finer(ours, theirs) == (ours != theirs and ours == "float32")
    assert coarser(ours, theirs) == ("float32" if bound == 1e-3 else "bfloat16")


def test_a_bound_that_is_set_holds_for_every_dtype(tmp_path: Path) -> None:
    run = make_run(tmp_path, "tcp://127.0.0.1:1", parity={"max_mean_abs_logprob": 0.01})
    assert comparison(run, welcome("bfloat16")).bound == 0.01


def welcome(dtype: str, **changes: Any) -> Welcome:
    return Welcome(
        server_id="s", policy_version=None, num_workers=1, dtype=dtype, transports=["gloo"], devices=["cpu"], max_model_len=64,
        max_concurrent_sequences=8, is_untouched=True, **changes,
    )  # fmt: skip
