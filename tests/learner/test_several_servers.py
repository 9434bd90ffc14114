"""Whole runs on several servers (the real server code with a transformers model): each is used, and none is needed."""

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from inference_server.config import ServerConfig
from learner.config import LearnerRun
from learner.report.records import read_events
from learner.train import train
from protocol.channel.sockets import ServerChannel
from protocol.config import DEFAULT_ENDPOINT, to_toml
from protocol.errors import ConfigError, DeadlineExceeded, ParityError, PushError
from protocol.messages import PushBegin
from protocol.model_files import resolve_model
from tests.fakes import ServerThread, report
from tests.learner.checkpoints import weights_of
from tests.learner.model_engine import TINY_LIMITS, ModelEngine, tiny_server
from tests.learner.ranks import fork
from tests.learner.runs import make_run, metrics_of, rows_of
from tests.ports import free_port

TIMEOUT_S = 60.0


class Engine(ModelEngine):
    """Tells when it gets a version."""

    def __init__(self) -> None:
        super().__init__(resolve_model("tiny:digits"))
        self.on_version: dict[int, Any] = {}
        self.versions: list[int] = []

    async def set_version(self, version: int) -> None:
        await super().set_version(version)
        self.versions.append(version)
        if act := self.on_version.pop(version, None):
            act()


@contextmanager
def servers(*engines: ModelEngine) -> Iterator[list[ServerThread]]:
    with ExitStack() as cleanup:
        yield [cleanup.enter_context(tiny_server(engine)) for engine in engines]


def assert_each_prompt_once(run: LearnerRun, num_steps: int) -> None:
    """In every epoch of the 8 prompts, of which a step consumes 3; no attempt was spent."""
    consumed = rows_of(run, "epoch, prompt_id", "state = 'consumed'")
    assert sorted(consumed) == [(index // 8, index % 8) for index in range(3 * num_steps)]
    assert rows_of(run, "max(attempt), count(*)") == [(0, 3 * num_steps)]


def warnings_about_servers(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING and ".servers." in one.name]


def wait_until_free(*servers: ServerThread) -> None:
    """Long before they would be by themselves: the run has told them that it is over there."""
    give_up_at = time.monotonic() + ServerConfig().orphan_timeout_s / 2
    while any(server.running.server.status()["tenancy"]["state"] != "free" for server in servers):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def free_endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("overlap", [False, True])
def test_a_run_on_two_servers_uses_both_and_consumes_every_prompt_once(tmp_path: Path, overlap: bool) -> None:
    with servers(Engine(), Engine()) as (one, other):
        run = make_run(tmp_path, one.endpoint, other.endpoint, steps=8, weight_sync={"overlap_with_training": overlap})
        train(run, resume=False)
    assert_each_prompt_once(run, 8)
    assert len(one.engine.prompts) + len(other.engine.prompts) == 24
    assert min(len(one.engine.prompts), len(other.engine.prompts)) >= 8
    metrics = metrics_of(run)
    assert all(line["staleness/max"] <= 2 for line in metrics) and metrics[-1]["servers/ready"] == 2
    for name, tensor in one.engine.weights.items():
        assert torch.equal(tensor, other.engine.weights[name]), name
    assert one.engine.versions == other.engine.versions == list(range(9))


def test_one_server_alone_is_reported_as_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "learner")
    with servers(Engine()) as (one,):
        run = make_run(tmp_path, one.endpoint, steps=2)
        train(run, resume=False)
    assert not any(name.startswith("servers/") for name in metrics_of(run)[-1])
    assert "synced version" not in caplog.text and "→" not in caplog.text


@pytest.mark.parametrize("overlap", [False, True])
def test_a_server_that_dies_costs_nothing_but_its_speed(
    tmp_path: Path, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "learner")
    mortal, survivor = Engine(), Engine()
    with servers(mortal, survivor) as (one, other):
        mortal.on_version[2], mortal.on_version[3] = mortal.release.clear, one.die  # with the groups of version 2 in it
        run = make_run(tmp_path, one.endpoint, other.endpoint, steps=8, weight_sync={"overlap_with_training": overlap})
        train(run, resume=False)
    assert_each_prompt_once(run, 8)
    assert mortal.versions[-1] == 3 and survivor.versions == list(range(9))
    assert f"the server at {one.endpoint}: ready → joining" in caplog.text
    told = [event.what for event in read_events(Path(run.run_dir) / "timeline.jsonl")]
    assert told[0] == "the run started" and told[-1] == f"the server at {one.endpoint}: ready → joining"
    assert f"the server at {other.endpoint}: joining → syncing" in told
    assert metrics_of(run)[-1]["servers/ready"] == 1


def test_a_server_that_comes_late_gets_a_push_of_its_own_and_then_groups(tmp_path: Path) -> None:
    late, first = Engine(), Engine()
    endpoint = free_endpoint()
    with servers(first) as (one,), ExitStack() as cleanup:
        started = threading.Event()

        def start() -> None:
            cleanup.enter_context(tiny_server(late, endpoint))
            started.set()

        first.on_version[2] = lambda: threading.Thread(target=start).start()
        run = make_run(tmp_path, one.endpoint, endpoint, steps=40)
        train(run, resume=False)
        assert started.wait(TIMEOUT_S)
    assert_each_prompt_once(run, 40)
    assert first.versions == list(range(41))
    assert late.versions[0] >= 2 and late.versions == list(range(late.versions[0], 41)) and late.prompts


def test_a_server_whose_push_fails_is_left_to_itself_and_pushed_to_again_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clumsy, other = Engine(), Engine()
    clumsy.reports_from_version[3] = [report(ok=False, state="receiving", error="scripted failure")]
    with servers(clumsy, other) as (one, two):
        run = make_run(tmp_path, one.endpoint, two.endpoint, steps=40, weight_sync={"timeout_s": 5})
        train(run, resume=False)
    assert_each_prompt_once(run, 40)
    assert other.versions == list(range(41))
    assert (
        f"weight sync of version 3 to {one.endpoint} failed while" in caplog.text and "scripted failure" in caplog.text
    )
    assert clumsy.versions[:3] == [0, 1, 2] and 3 not in clumsy.versions
    assert clumsy.versions[-1] == 40, "it has come back"


def test_servers_come_and_go_with_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "learner")
    monkeypatch.setattr("learner.servers.fleet.REREAD_EVERY_S", 0.1)
    monkeypatch.setattr("learner.servers.fleet.CLOSE_AFTER_S", 0.1)
    leaves, stays, comes = Engine(), Engine(), Engine()
    listed = tmp_path / "servers.txt"
    with servers(leaves, stays, comes) as (one, two, three):
        listed.write_text(f"# of this test\n{one.endpoint}\n{two.endpoint}  # stays\n")
        stays.on_version[2] = lambda: listed.write_text(f"{two.endpoint}\n{three.endpoint}\n")
        run = make_run(tmp_path, one.endpoint, steps=40)
        run = msgspec.structs.replace(run, endpoint=DEFAULT_ENDPOINT, endpoints_from=f"file:{listed}")
        train(run, resume=False)
        assert one.running.server.status()["groups_unacked"] == one.running.server.status()["groups_running"] == 0
        wait_until_free(one, two, three)
    assert_each_prompt_once(run, 40)
    assert stays.versions == list(range(41)) and leaves.versions[-1] < 40 and leaves.prompts
    assert comes.versions[0] >= 2 and comes.versions[-1] == 40 and comes.prompts
    assert f"the server at {one.endpoint}: ready → draining" in caplog.text
    assert f"the server at {one.endpoint}: draining → gone" in caplog.text
    assert metrics_of(run)[-1]["servers/ready"] == 2 and metrics_of(run)[-1]["servers/gone"] == 0


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_server_that_is_shut_down_costs_nothing_and_no_warning(
    tmp_path: Path, overlap: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "learner")
    leaves, stays = Engine(), Engine()
    drained: list[Future[None]] = []
    with servers(leaves, stays) as (one, other):
        leaves.on_version[2] = lambda: drained.append(one.told_to_end())
        run = make_run(tmp_path, one.endpoint, other.endpoint, steps=40, weight_sync={"overlap_with_training": overlap})
        train(run, resume=False)
        drained[0].result(TIMEOUT_S)
    assert_each_prompt_once(run, 40)
    assert stays.versions == list(range(41)) and leaves.versions[-1] <= 3 and leaves.prompts
    told = [event.what for event in read_events(Path(run.run_dir) / "timeline.jsonl")]
    assert [what.partition(": ")[2] for what in told if one.endpoint in what][-2:] == [
        "ready → draining", "draining → gone",
    ]  # fmt: skip
    assert metrics_of(run)[-1]["servers/ready"] == metrics_of(run)[-1]["servers/joining"] == 1
    assert warnings_about_servers(caplog) == []


@pytest.mark.parametrize("crosses_a_push", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_only_server_is_shut_down_and_the_next_one_at_its_endpoint_goes_on(
    tmp_path: Path, crosses_a_push: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "learner")
    first, second, endpoint = Engine(), Engine(), free_endpoint()
    receive = ServerChannel.receive
    with ExitStack() as cleanup:
        one = cleanup.enter_context(tiny_server(first, endpoint))

        def follow() -> None:
            one.told_to_end().result(TIMEOUT_S)
            one.__exit__()
            cleanup.enter_context(tiny_server(second, endpoint))

        follower = threading.Thread(target=follow)

        async def told_before_it_reads_of_version_2(channel: ServerChannel) -> Any:
            peer, message = await receive(channel)
            if isinstance(message, PushBegin) and message.version == 2 and follower.ident is None:
                follower.start()
                while not one.running.server.drain.is_draining:
                    await asyncio.sleep(0)
            return peer, message

        if crosses_a_push:
            monkeypatch.setattr(ServerChannel, "receive", told_before_it_reads_of_version_2)
        else:
            first.on_version[2] = follower.start
        run = make_run(tmp_path, endpoint, steps=16, weight_sync={"max_attempts": 1})
        train(run, resume=False)
        follower.join(TIMEOUT_S)
    assert_each_prompt_once(run, 16)
    assert first.versions[-1] in ((1,) if crosses_a_push else (2, 3))
    assert second.versions[-1] == 16 and second.prompts
    lines = [record.getMessage() for record in caplog.records]
    assert sum("is shutting down and no other server is connected" in line for line in lines) == 1
    assert (
        f"skipped the weight sync of version 2 to the server at {endpoint} (shutting down)" in lines
    ) == crosses_a_push
    assert warnings_about_servers(caplog) == []


def test_two_names_of_one_server_are_one_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with servers(Engine()) as (one,):
        run = make_run(tmp_path, one.endpoint, one.endpoint.replace("127.0.0.1", "localhost"), steps=8)
        train(run, resume=False)
    assert_each_prompt_once(run, 8)
    assert "under another address" in caplog.text and metrics_of(run)[-1]["servers/gone"] == 1


def test_the_run_ends_when_no_server_can_be_pushed_to(tmp_path: Path) -> None:
    bad = [report(ok=False, state="receiving", error="scripted failure")]
    one, other = Engine(), Engine()
    one.reports_from_version[2] = other.reports_from_version[2] = bad
    with (
        servers(one, other) as running,
        pytest.raises(PushError, match=r"weight sync of version 2 failed in 2 attempts.*scripted failure"),
    ):
        train(
            make_run(
                tmp_path, *(server.endpoint for server in running), weight_sync={"timeout_s": 20, "max_attempts": 2}
            ),
            resume=False,
        )


def test_a_server_that_does_not_fit_is_left_out_and_the_last_one_ends_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong, right = Engine(), Engine()
    wrong.limits = msgspec.structs.replace(TINY_LIMITS, dtype="float16")
    with servers(wrong, right) as (one, other):
        run = make_run(tmp_path / "two", one.endpoint, other.endpoint)
        train(run, resume=False)
        assert f"excluded the server at {one.endpoint}: the server at {one.endpoint} computes in" in caplog.text
        assert wrong.prompts == [] and len(metrics_of(run)) == 4
        with pytest.raises(
            ConfigError,
            match=f"the server at {one.endpoint} computes in float16 and this run in dtype = 'float32'.*server.dtype",
        ):
            train(make_run(tmp_path / "one", one.endpoint), resume=False)


def test_a_server_with_other_weights_is_named(tmp_path: Path) -> None:
    class LosesATensor(Engine):
        """From version 3 on."""

        async def set_version(self, version: int) -> None:
            before = self.model.transformer.wpe.weight.detach().clone()
            await super().set_version(version)
            if version >= 3:
                with torch.no_grad():
                    self.model.transformer.wpe.weight.copy_(before)

    with servers(Engine(), LosesATensor()) as (one, other):
        run = make_run(tmp_path, one.endpoint, other.endpoint, steps=8)
        with pytest.raises(
            ParityError, match=rf"of texts of the step is 0\.\d+.*Check that the server at {other.endpoint} has"
        ):
            train(run, resume=False)


def test_when_none_of_several_answers_all_are_named(tmp_path: Path) -> None:
    one, other = free_endpoint(), free_endpoint()
    began = time.monotonic()
    with pytest.raises(
        DeadlineExceeded, match=rf"no inference server answers at {one}, {other} after 1 s.*`endpoints`"
    ):
        train(make_run(tmp_path, one, other, connect_timeout_s=1), resume=False)
    assert time.monotonic() - began < TIMEOUT_S


def test_a_server_whose_fresh_tokens_are_off_is_named_though_the_mean_of_all_would_pass(tmp_path: Path) -> None:
    class Off(Engine):
        """Scores as it should and samples with other logprobs."""

        async def sample(self, prompt_token_ids: Any, sampling: Any) -> Any:
            completions, version = await super().sample(prompt_token_ids, sampling)
            return [
                msgspec.structs.replace(one, behaviour_logprobs=one.behaviour_logprobs - 0.05) for one in completions
            ], version

    with servers(Engine(), Off()) as (one, other):
        run = make_run(
            tmp_path, one.endpoint, other.endpoint, steps=8, max_staleness=0, parity={"max_mean_abs_logprob": 0.045},
            loss={"entropy_coef": 1e-6},  # so that all groups count, also those without signal
        )  # fmt: skip
        with pytest.raises(
            ParityError, match=rf"of fresh tokens is 0\.05,.*Check that the server at {other.endpoint} has"
        ):
            train(run, resume=False)
    assert metrics_of(run)[-1]["policy/mismatch_abs_logprob"] < 0.045
    assert not any("tcp://" in name for name in metrics_of(run)[-1])


@pytest.mark.parametrize("is_sharded", [False, pytest.param(True, id="sharded", marks=pytest.mark.slow)])
def test_two_ranks_on_two_servers_read_the_policy_once_for_both_and_outlive_one(
    tmp_path: Path, is_sharded: bool
) -> None:
    mortal, survivor = Engine(), Engine()
    with servers(mortal, survivor) as (one, other):
        mortal.on_version[4] = one.die
        run = make_run(tmp_path, one.endpoint, other.endpoint, steps=8, checkpoint={"every_steps": 8})
        config = tmp_path / "run.toml"
        config.write_text(to_toml(run))
        fork(config, num_ranks=2, is_sharded=is_sharded)
    assert_each_prompt_once(run, 8)
    assert survivor.versions == list(range(9)) and mortal.versions == list(range(5))
    (checkpoint,) = tmp_path.rglob("step-000008")
    for name, tensor in weights_of(checkpoint).items():
        assert torch.equal(survivor.weights[name], tensor), name
