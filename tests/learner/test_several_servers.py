"""Whole runs on several servers (the real server with a transformers model): each is used, and none is required."""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from learner.report.records import read_events
from learner.train import train
from protocol.config import DEFAULT_ENDPOINT
from protocol.errors import ParityError
from protocol.messages import Completion, Sampling
from tests.fakes import ServerThread, report
from tests.learner.model_engine import TINY_LIMITS, VersionedEngine, tiny_server, tiny_servers
from tests.learner.runs import assert_each_prompt_once, make_run, metrics_of
from tests.ports import free_endpoint
from tests.waiting import TIMEOUT_S, until

COARSE = 0.05
"""Above the bound of float32, 1e-3, and below that of bfloat16, 0.3."""
ALL_COUNT = {"entropy_coef": 1e-6}
"""A loss to which groups without signal contribute."""


class Coarse(VersionedEngine):
    """Returns inexact logprobs, as with a coarser dtype, in scores and samples or only in samples."""

    def __init__(self, dtype: str, beside: VersionedEngine | None = None) -> None:
        """`beside`: inexact only in samples, and only after `beside` has received requests too."""
        super().__init__(msgspec.structs.replace(TINY_LIMITS, dtype=dtype))
        self._beside, self._off_in_scores = beside, COARSE if beside is None else 0.0

    async def score(self, token_ids: np.ndarray, replica: int) -> tuple[np.ndarray, int | None]:
        logprobs, version = await super().score(token_ids, replica)
        return logprobs - np.float32(self._off_in_scores), version

    def _completion(self, prompt: list[int], index: int, sampling: Sampling) -> Completion:
        completion = super()._completion(prompt, index, sampling)
        is_off = self._beside is None or self._beside.prompts
        off = completion.behavior_logprobs - np.float32(COARSE if is_off else 0.0)
        return msgspec.structs.replace(completion, behavior_logprobs=off)


def events_of(run_dir: str) -> list[str]:
    return [event.what for event in read_events(Path(run_dir) / "timeline.jsonl")]


def warnings_about_servers(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING and ".servers." in one.name]


def begin_together(servers: Sequence[ServerThread], engines: Sequence[VersionedEngine]) -> None:
    """Hold completions until all these servers have weights: a run begins with the first one that answers."""
    for engine in engines:
        engine.release.clear()

    def release() -> None:
        until(lambda: all(engine.versions for engine in engines))
        for server, engine in zip(servers, engines, strict=True):
            server._loop.call_soon_threadsafe(engine.release.set)

    threading.Thread(target=release).start()


def test_a_run_uses_every_fitting_server_and_checks_each_with_the_bound_of_its_dtype(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "learner")
    unknown = VersionedEngine(msgspec.structs.replace(TINY_LIMITS, dtype="float16"))
    engines = [VersionedEngine(), Coarse("bfloat16"), Coarse("float32"), unknown]
    with tiny_servers(*engines) as servers:
        endpoints = [server.endpoint for server in servers]
        overlap = {"overlap_with_training": True}
        run = make_run(tmp_path, *endpoints, steps=8, loss=ALL_COUNT, weight_sync=overlap)
        begin_together(servers[:2], engines[:2])
        train(run, resume=False)
    assert_each_prompt_once(run, 8)
    exact, coarse, wrong, unknown = engines
    # A prompt is requested again if the machine is so busy that a server is silent for 2 s.
    assert len(exact.prompts) + len(coarse.prompts) >= 24 and exact.prompts and coarse.prompts
    assert wrong.prompts == unknown.prompts == []
    assert exact.versions == coarse.versions == list(range(9))
    for name, tensor in exact.weights.items():
        assert torch.equal(tensor, coarse.weights[name]), name
    metrics = metrics_of(run)
    assert all(line["staleness/max"] <= 2 for line in metrics)
    assert (metrics[-1]["servers/ready"], metrics[-1]["servers/gone"]) == (2, 2)
    assert "weight_sync/seconds" not in metrics[0] and "weight_sync/seconds" in metrics[1]
    assert f"parity of the server at {endpoints[1]}: mean |Δ logprob| = 5.0e-02" in caplog.text
    for endpoint, reason in ((endpoints[2], "server and learner disagree"), (endpoints[3], "the server at")):
        assert f"excluded the server at {endpoint}: {reason}" in caplog.text


def test_a_server_with_wrong_fresh_tokens_is_reported_although_the_overall_mean_passes(tmp_path: Path) -> None:
    exact = VersionedEngine()
    with tiny_servers(exact, Coarse("float32", beside=exact)) as (one, other):
        run = make_run(
            tmp_path, one.endpoint, other.endpoint, steps=8, max_staleness=0, loss=ALL_COUNT,
            parity={"max_mean_abs_logprob": 0.99 * COARSE},
        )  # fmt: skip
        with pytest.raises(ParityError, match=rf"of fresh tokens is 0\.05,.*the server at {other.endpoint} has"):
            train(run, resume=False)
    assert metrics_of(run)[-1]["policy/mismatch_abs_logprob"] < 0.99 * COARSE
    assert not any("tcp://" in name for name in metrics_of(run)[-1])


def test_servers_that_die_start_late_or_fail_in_a_sync_cost_only_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "learner")
    monkeypatch.setattr("learner.servers.weight_sync.LEAST_PAUSE_S", 0.1)
    survivor, mortal, clumsy, late = (VersionedEngine() for _ in range(4))
    clumsy.reports_from_version[3] = [report(ok=False, state="receiving", error="scripted failure")]
    endpoint_of_late, is_complete = free_endpoint(), threading.Event()
    with tiny_servers(survivor, mortal, clumsy) as (one, two, three), ExitStack() as cleanup:

        def start() -> None:
            """Start a server. The step waits for it and for the clumsy server."""
            cleanup.enter_context(tiny_server(late, endpoint_of_late))
            until(lambda: late.versions and clumsy.versions[-1] > 3)
            one._loop.call_soon_threadsafe(survivor.release.set)
            is_complete.set()

        def hold_up() -> None:
            survivor.release.clear()
            threading.Thread(target=start).start()

        mortal.on_version = {2: mortal.release.clear, 3: two.die}  # while it has groups of version 2
        survivor.on_version = {4: hold_up}
        endpoints = [one.endpoint, two.endpoint, three.endpoint, endpoint_of_late]
        run = make_run(tmp_path, *endpoints, steps=16)
        begin_together((one, two, three), (survivor, mortal, clumsy))
        train(run, resume=False)
        assert is_complete.wait(TIMEOUT_S)
    assert_each_prompt_once(run, 16)
    assert survivor.versions == list(range(17)) and mortal.versions[-1] == 3
    assert late.versions[0] >= 4 and late.versions == list(range(late.versions[0], 17)) and late.prompts
    assert clumsy.versions[:3] == [0, 1, 2] and 3 not in clumsy.versions and clumsy.versions[-1] == 16, (
        "the clumsy server must return"
    )
    assert f"weight sync of version 3 to {three.endpoint} failed while" in caplog.text
    timeline = events_of(run.run_dir)
    assert timeline[0] == "the run started"
    assert {f"the server at {two.endpoint}: ready → joining", f"the server at {one.endpoint}: joining → syncing"} <= {
        *timeline
    }
    assert metrics_of(run)[-1]["servers/ready"] == 3


def test_servers_that_leave_or_join_the_list_or_shut_down_cause_no_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "learner")
    monkeypatch.setattr("learner.servers.fleet.REREAD_EVERY_S", 0.1)
    monkeypatch.setattr("learner.servers.fleet.CLOSE_AFTER_S", 0.1)
    leaves, stays, comes, ends = (VersionedEngine() for _ in range(4))
    listed, drained = tmp_path / "servers.txt", list[Future[None]]()
    with tiny_servers(leaves, stays, comes, ends) as (one, two, three, four):
        listed.write_text(f"# of this test\n{one.endpoint}\n{two.endpoint}  # stays\n{four.endpoint}\n")
        run = make_run(tmp_path, DEFAULT_ENDPOINT, steps=16)

        def await_changes() -> None:
            """Hold the step until the changes of servers have happened."""
            until(
                lambda: comes.versions and sum(what.endswith("draining → gone") for what in events_of(run.run_dir)) == 2
            )
            two._loop.call_soon_threadsafe(stays.release.set)

        def change_the_list() -> None:
            listed.write_text(f"{two.endpoint}\n{three.endpoint}\n{four.endpoint}\n")
            stays.release.clear()
            threading.Thread(target=await_changes).start()

        stays.on_version[2] = change_the_list
        ends.on_version[2] = lambda: drained.append(four.drain())
        run = msgspec.structs.replace(run, endpoints_from=f"file:{listed}")
        begin_together((one, two, four), (leaves, stays, ends))
        train(run, resume=False)
        drained[0].result(TIMEOUT_S)
        status = one.running.server.status()
    assert status["groups_unacked"] == status["groups_running"] == 0 and status["tenancy"]["state"] == "free"
    assert_each_prompt_once(run, 16)
    assert stays.versions == list(range(17)) and leaves.versions[-1] < 16 and leaves.prompts
    assert comes.versions[0] >= 2 and comes.versions[-1] == 16 and comes.prompts
    assert ends.versions[-1] <= 3 and ends.prompts
    for endpoint in (one.endpoint, four.endpoint):
        timeline = [what.partition(": ")[2] for what in events_of(run.run_dir) if endpoint in what]
        assert timeline[-2:] == ["ready → draining", "draining → gone"]
    last = metrics_of(run)[-1]
    assert (last["servers/ready"], last["servers/joining"], last["servers/gone"]) == (2, 1, 0)
    assert warnings_about_servers(caplog) == []


def test_a_run_continues_on_the_next_server_at_the_endpoint_of_the_only_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "learner")
    first, second, endpoint = VersionedEngine(), VersionedEngine(), free_endpoint()
    with ExitStack() as cleanup:
        one = cleanup.enter_context(tiny_server(first, endpoint))

        def follow() -> None:
            one.drain().result(TIMEOUT_S)
            one.__exit__()
            cleanup.enter_context(tiny_server(second, endpoint))

        follower = threading.Thread(target=follow)
        first.on_version[2] = follower.start
        run = make_run(tmp_path, endpoint, steps=8, weight_sync={"max_attempts": 1}, connect_timeout_s=TIMEOUT_S)
        train(run, resume=False)
        follower.join(TIMEOUT_S)
    assert_each_prompt_once(run, 8)
    assert first.versions[-1] in (2, 3) and second.versions[-1] == 8 and second.prompts
    assert caplog.text.count("is shutting down and no other server is connected") == 1
    assert warnings_about_servers(caplog) == []
