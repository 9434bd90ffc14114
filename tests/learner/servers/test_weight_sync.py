"""Weight syncs to scripted servers that fail, hang or are late: a server that cannot take one does not stop the
others."""

import asyncio
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from inference_server.engine.interface import EngineFailed, PushOrder, WorkerReport
from learner.config import WeightSyncConfig
from learner.servers.fleet import Fleet
from learner.servers.membership import Member
from learner.servers.weight_sync import WeightSync
from protocol.errors import ConfigError, DeadlineExceeded, PushError, PushIncomplete
from protocol.messages import AdapterSpec
from protocol.transports.worker_connections import TcpConnection
from protocol.weights.buckets import NamedTensors
from tests.fakes import LIMITS, ScriptedEngine, ServerThread, report
from tests.learner.servers.fleets import a_fleet
from tests.waiting import TIMEOUT_S, until

FAILED = [report(ok=False, state="receiving", error="scripted failure")]
PATIENCE_S = 1.5  # a healthy rank of a busy machine reports within it
NEVER_S = 600.0


class Weights:
    """All of one value."""

    wire_dtype, device, adapter, why_merged = torch.float32, torch.device("cpu"), None, None
    copy_device: torch.device | None = None

    def __init__(self) -> None:
        self.tensor = torch.zeros(10, 100)
        self.num_read = 0

    def tensors(self) -> NamedTensors:
        self.num_read += 1
        yield "a", self.tensor
        yield "b", self.tensor[0]

    def frozen_tensors(self) -> NamedTensors:
        raise AssertionError("there is no adapter")

    adapter_tensors = frozen_tensors


class AdaptedWeights(Weights):
    """Frozen tensors, and an adapter with a value of its own."""

    def __init__(self, why_merged: str | None = None) -> None:
        super().__init__()
        self.adapter, self.why_merged = AdapterSpec(rank=4, num_tensors=2), why_merged  # type: ignore[assignment]
        self.pair = torch.zeros(4, 3)

    frozen_tensors = Weights.tensors

    def adapter_tensors(self) -> NamedTensors:
        yield "a.lora_A.weight", self.pair
        yield "a.lora_B.weight", self.pair.T


def failures_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the learner says of syncs that failed."""
    told = [record.getMessage() for record in caplog.records if record.name == "learner.servers.weight_sync"]
    return [message for message in told if "failed while" in message]


def value_at(engine: ScriptedEngine) -> float:
    (value,) = {float(number) for tensor in engine.weights.values() for number in tensor.unique()}
    return value


@contextmanager
def syncing(
    tmp_path: Path, *engines: ScriptedEngine, connect_timeout_s: float = TIMEOUT_S, weights: Weights | None = None,
    **weight_sync: Any,
) -> Iterator[tuple[WeightSync, Weights, Fleet]]:  # fmt: skip
    """Syncs of a fleet on servers with these engines, which have version 0."""
    settings = {"timeout_s": 20.0} | weight_sync
    with ExitStack() as cleanup:
        endpoints = [cleanup.enter_context(ServerThread(engine)).endpoint for engine in engines]
        fleet = cleanup.enter_context(
            a_fleet(tmp_path, *endpoints, connect_timeout_s=connect_timeout_s, weight_sync=settings)
        )
        until(lambda: len(fleet.connected()) == len(engines))
        weights = weights or Weights()
        sync = WeightSync(fleet, weights, fleet._run.learner.weight_sync)
        cleanup.callback(sync.close)
        assert sync.send(0) is not None
        yield sync, weights, fleet


def test_a_server_that_does_not_fit_the_run_gets_no_weights_when_it_comes_in_the_middle_of_a_sync(
    tmp_path: Path,
) -> None:
    def check(member: Member) -> None:
        raise ConfigError(f"{member.endpoint} quantizes")

    engine = ScriptedEngine()
    with ServerThread(engine) as server, a_fleet(tmp_path, server.endpoint) as fleet:
        sync = WeightSync(fleet, Weights(), fleet._run.learner.weight_sync, check)
        with closing(sync), pytest.raises(ConfigError, match="quantizes"):
            sync.send(1)  # of all servers with older weights there are none: those that are there are due
        assert engine.orders == []


def test_a_policy_is_read_once_for_all_servers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "learner")
    one, other = ScriptedEngine(), ScriptedEngine()
    with syncing(tmp_path, one, other) as (sync, weights, fleet):
        weights.tensor += 1
        weights.num_read = 0
        assert sync.send(1) is not None
        assert weights.num_read == 1 and value_at(one) == value_at(other) == 1
        assert sync.holders(1) == fleet.connected() and len(sync.holders()) == 2
    (line,) = [message for message in caplog.messages if message.startswith("synced version 1 to ")]
    assert all(f"{member.endpoint} in " in line for member in fleet.members)


def test_servers_share_one_session_which_one_that_joins_enters_after_a_sync_of_its_own(tmp_path: Path) -> None:
    engines = [ScriptedEngine() for _ in range(3)]
    with syncing(tmp_path, *engines, compression="delta") as (sync, weights, fleet):
        first = sync.report_of(0)
        assert first is not None
        one, two, joiner = fleet.members
        weights.tensor += 1
        assert sync.send(1, [one, two]) is not None, "the third is not there, as it were"
        assert sync.send(1, [joiner]) is not None, "alone, while the others generate"
        assert sync.send(1) is None, "all have it"
        assert sync.report_of(1) is not None and sync.report_of(0) is None
        together = sync.send(2)
        again = sync.send(3)
        assert together is not None and again is not None
        assert together.num_bytes == first.num_bytes > 10 * again.num_bytes > 0, (
            "they leave the learner once, from one baseline"
        )
        assert [value_at(engine) for engine in engines] == [1, 1, 1]
    sessions = [[order.session for order in engine.orders] for engine in engines]
    assert sessions[0] == sessions[1] and sessions[0][-2:] == sessions[2][-2:] and sessions[0][1] != sessions[2][1]
    assert [order.rendezvous is not None for order in engines[0].orders] == [True, True, True, False]
    assert [order.rendezvous.first_rank for engine in engines if (order := engine.orders[0]).rendezvous] == [1, 2, 3]


def test_a_server_that_is_lost_when_its_weights_are_published_is_used_once_it_returns(tmp_path: Path) -> None:
    with syncing(tmp_path, ScriptedEngine()) as (sync, _, fleet):
        (member,) = fleet.members
        assert sync.send(1) is not None

        async def publish_while_lost() -> None:
            await member.link.greet_again()
            assert sync.holders(1) == [] and list(sync.received(1)) == [member]
            fleet.published(1, sync.received(1).values())

        fleet.loop.call(publish_while_lost(), TIMEOUT_S)
        until(lambda: sync.holders(1) == [member])
        assert fleet.is_ready(member) and sync.joiners() == []


def test_a_sync_whose_weights_cannot_be_read_leaves_no_server_waiting(tmp_path: Path) -> None:
    one, other = ScriptedEngine(), ScriptedEngine()
    with syncing(tmp_path, one, other) as (sync, weights, fleet):

        def broken(*, adapter_alone: bool) -> NamedTensors:
            yield "a", weights.tensor + 1
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            sync._send_until_done(1, broken)
        assert sync.holders() == []
        assert sync.send(1) is not None and sync.holders(1) == fleet.connected()


def test_a_sync_beside_the_next_step_sends_the_weights_as_they_were(tmp_path: Path) -> None:
    class Slow(ScriptedEngine):
        may_receive = threading.Event()

        def _load(self, order: PushOrder) -> WorkerReport:
            assert order.version == 0 or self.may_receive.wait(TIMEOUT_S)
            return super()._load(order)

    with syncing(tmp_path, engine := Slow()) as (sync, weights, _):
        done = list[int]()
        weights.tensor += 1
        sync.begin(1, lambda: done.append(1))
        weights.tensor += 1
        assert sync.is_syncing and done == [] and sync.pop_report() is None
        engine.may_receive.set()
        sync.wait()
        assert done == [1] and sync.pop_report() is not None and value_at(engine) == 1


def test_a_sync_beside_the_next_step_uses_a_stream_of_its_own_after_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the stream that trains, each bucket would wait for the step's kernels, while generation is paused."""
    events = list[str]()

    class Stream:
        device = torch.device("cuda")

        def wait_stream(self, other: str) -> None:
            events.append(f"{threading.current_thread().name}: wait for {other}")

    @contextmanager
    def selected(stream: Stream) -> Iterator[None]:
        events.append(threading.current_thread().name.partition("_")[0] + ": enter")
        yield
        events.append("leave")

    def send(*_: object) -> None:
        events.append("sync")

    weights: Any = Weights()
    weights.device = Stream.device
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "stream", selected)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "the stream that trains")
    sync = WeightSync(cast(Any, SimpleNamespace(loop=None, on_wait=lambda: None)), weights, WeightSyncConfig())
    monkeypatch.setattr(sync, "_send_until_done", send)
    monkeypatch.setattr(sync._copy, "update", lambda tensors: events.append("copy"))
    with closing(sync):
        for version in (1, 2):
            sync.begin(version, lambda: None)
            sync.wait()
    of_one = ["copy", "MainThread: wait for the stream that trains", "weight-sync: enter", "sync", "leave"]
    assert events == 2 * of_one


def test_a_sync_that_fails_is_tried_again_in_a_new_session(tmp_path: Path) -> None:
    engine = ScriptedEngine()
    with syncing(tmp_path, engine) as (sync, weights, _):
        weights.tensor += 1
        engine.scripted_reports = [FAILED]
        assert sync.send(1) is not None and sync.send(2) is not None
        assert value_at(engine) == 1
    first, failed, again, last = engine.orders
    assert first.session == failed.session != again.session == last.session
    assert again.rendezvous is not None and last.rendezvous is None
    assert [order.version for order in engine.orders] == [0, 1, 1, 2]


@pytest.mark.parametrize("num_servers", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_syncs_that_never_succeed_end_the_run(tmp_path: Path, overlap: bool, num_servers: int) -> None:
    engines = [ScriptedEngine() for _ in range(num_servers)]
    with syncing(tmp_path, *engines, max_attempts=2) as (sync, _, _):
        for engine in engines:
            engine.reports_from_version[1] = FAILED
        with pytest.raises(PushError, match=r"weight sync of version 1 failed in 2 attempts .*scripted failure"):
            sync.begin(1, lambda: None) if overlap else sync.send(1)
            sync.wait()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sync_that_would_fail_again_is_not_tried_again(tmp_path: Path, overlap: bool) -> None:
    engine, error = ScriptedEngine(), str(PushIncomplete.missing(["model.norm.weight"]))
    engine.reports_from_version[1] = [
        report(ok=False, state="loading", weights_intact=False, retryable=False, error=error)
    ]
    with (
        syncing(tmp_path, engine) as (sync, _, _),
        pytest.raises(PushIncomplete, match=r"is missing weights .*model\.norm\.weight.*the same `model`"),
    ):
        sync.begin(1, lambda: None) if overlap else sync.send(1)
        sync.wait()
    assert [order.version for order in engine.orders] == [0, 1]


def test_a_server_whose_sync_fails_pauses_and_gets_one_of_its_own_while_the_other_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("learner.servers.weight_sync.LEAST_PAUSE_S", NEVER_S)
    clumsy, other = ScriptedEngine(), ScriptedEngine()
    clumsy.reports_from_version[1] = FAILED
    with syncing(tmp_path, clumsy, other) as (sync, _, fleet):
        one, two = fleet.members
        server_ids = [member.welcome.server_id for member in fleet.members if member.welcome is not None]
        fleet.loop.call_soon(fleet.published, 0, server_ids)
        until(lambda: one.state(0) == "ready")
        assert sync.send(1) is not None and sync.holders(1) == [two]
        assert f"weight sync of version 1 to {one.endpoint} failed while" in caplog.text
        until(lambda: one.state(0) == "syncing", "it has welcomed the run again, and is asked for nothing")
        assert sync.joiners() == []
        sync._failures[one] = (1, 0.0)  # the pause is over
        assert sync.joiners() == [one]
        assert sync.send(2) is not None and sync.send(2, [one]) is not None and sync.holders(2) == [one, two]
    assert [order.version for order in other.orders] == [0, 1, 1, 2]  # again without the one that failed


def test_a_server_pauses_longer_after_each_sync_that_failed_until_one_succeeds(tmp_path: Path) -> None:
    with syncing(tmp_path, ScriptedEngine()) as (sync, _, fleet):
        (member,) = fleet.members

        def pause_s() -> int:
            before = time.monotonic()
            sync.failed(member)
            return round(sync._failures[member][1] - before)

        assert [pause_s() for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
        until(lambda: member in fleet.connected())
        assert sync.send(1) is not None and pause_s() == 1


def test_a_server_that_shuts_down_during_a_sync_is_skipped_without_a_warning_and_costs_no_attempt(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "learner")

    class Ending(ScriptedEngine):
        async def load_push(self, order: PushOrder) -> Any:
            if order.version == 1:
                fleet.members[0].link.is_draining = True
                return FAILED
            return await super().load_push(order)

    with (
        syncing(tmp_path, Ending(), connect_timeout_s=2.0, max_attempts=1) as (sync, _, fleet),
        pytest.raises(DeadlineExceeded, match="no inference server answers"),  # it waits for the next one
    ):
        sync.send(1)
    skipped = f"skipped the weight sync of version 1 to the server at {fleet.members[0].endpoint} (shutting down)"
    assert skipped in caplog.messages and failures_of(caplog) == []


@pytest.mark.parametrize("compression", ["none", "delta"])
@pytest.mark.parametrize("is_large", [True, False])
def test_a_large_sync_shows_how_far_it_is(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    compression: str,
    is_large: bool,
) -> None:
    if is_large:
        monkeypatch.setattr("learner.servers.weight_transfer.PROGRESS_BYTES", 1)
    with syncing(tmp_path, ScriptedEngine(), compression=compression) as (sync, weights, _):
        weights.tensor += 1
        sync.send(1)
    drawn = capsys.readouterr().err.replace("\r", "\n")
    for version in (0, 1):
        bars = re.findall(rf"weight sync {version}: +(.*)", drawn)
        assert bool(bars) == is_large
        assert not bars or (bars[0].startswith("0%") and bars[-1].startswith("100%") and "4.40k/4.40k" in bars[-1])


# --- stragglers ------------------------------------------------------------------------------------------------------

READY_BEFORE, DONE_BEFORE = "another server was ready 1.5 s", "another server had the version 1.5 s"
SILENT = "it kept the weight sync waiting for 1.5 s"


class Hanging(ScriptedEngine):
    """Stands still at a point of a sync until it is released."""

    def __init__(self, point: str) -> None:
        super().__init__()
        self._point, self.may_go_on = point, threading.Event()
        self.may_go_on.set()

    async def pause(self) -> None:
        await self._reach("pausing")
        await super().pause()

    async def set_version(self, version: int) -> None:
        await self._reach("labelling")
        await super().set_version(version)

    def _load(self, order: PushOrder) -> WorkerReport:
        asyncio.run(self._reach("receiving"))  # in a thread of its own
        return super()._load(order)

    async def _reach(self, point: str) -> None:
        while point == self._point and not self.may_go_on.is_set():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("point", "states", "reasons", "state_of_its_own", "overlap"),
    [
        ("pausing", {"pausing"}, {READY_BEFORE}, "pausing", False),
        ("receiving", {"sending", "finishing"}, {SILENT}, "joining", False),
        # On a busy machine, its last report may be as late as the other server's version is early.
        ("labelling", {"finishing"}, {DONE_BEFORE, SILENT}, "finishing", True),
    ],
)
def test_a_server_that_hangs_is_left_behind_and_comes_back_with_a_sync_of_its_own(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    point: str,
    states: set[str],
    reasons: set[str],
    state_of_its_own: str,
    overlap: bool,
) -> None:
    hanging, other = Hanging(point), ScriptedEngine()
    patience = {"timeout_s": NEVER_S, "straggler_timeout_s": PATIENCE_S}
    with syncing(tmp_path, hanging, other, **patience) as (sync, weights, fleet):
        one, two = fleet.members
        weights.tensor += 1
        hanging.may_go_on.clear()
        sync.begin(1, lambda: None) if overlap else sync.send(1)
        sync.wait()
        assert sync.holders(1) == [two]
        hanging.may_go_on.set()
        until(lambda: one in fleet.connected(), "it has welcomed the run again")
        hanging.may_go_on.clear()
        assert sync.send(1, [one]) is None, "that one gets no further either, and nobody waits for it"
        hanging.may_go_on.set()
        until(lambda: sync.send(1, [one]) is not None, "it has ended what was given up")
        assert sync.holders(1) == [one, two] and value_at(hanging) == 1
    # Once more in a session without the straggler, unless it had the version before, and never again.
    assert [order.version for order in other.orders] in ([0, 1], [0, 1, 1])
    told = failures_of(caplog)
    assert any(f"weight sync of version 1 to {one.endpoint} failed while {state} " in told[0] for state in states)
    assert any(f"{reason} (learner.weight_sync.straggler_timeout_s)" in told[0] for reason in reasons)
    assert f" failed while {state_of_its_own} " in told[1] and "(learner.weight_sync.straggler_timeout_s)" in told[1]


def test_a_server_on_a_slow_link_gets_its_own_sync_while_another_one_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One span takes longer than others wait, but its bytes never stand still."""
    weights = Weights()
    weights.tensor = torch.zeros(1024, 1024)

    def send_slowly(connection: TcpConnection, memory: memoryview) -> int:
        time.sleep(0.05)
        connection._send_moved_at = time.monotonic()
        return connection._socket.send(memory[: 1 << 16])

    with syncing(
        tmp_path, ScriptedEngine(), ScriptedEngine(), weights=weights, straggler_timeout_s=PATIENCE_S, max_attempts=1
    ) as (sync, _, fleet):
        monkeypatch.setattr(TcpConnection, "_send_some", send_slowly)
        cost = sync.send(1, [fleet.members[0]])
    assert cost is not None and cost.transfer_s > 2 * PATIENCE_S


@pytest.mark.parametrize("point", ["pausing", "receiving", "labelling"])
def test_servers_that_are_equally_slow_are_waited_for(tmp_path: Path, point: str) -> None:
    engines, patience_s = [Hanging(point), Hanging(point)], 4.0  # on a busy machine, a healthy rank is silent for 1.5 s
    with syncing(tmp_path, *engines, timeout_s=TIMEOUT_S, straggler_timeout_s=patience_s) as (sync, _, fleet):
        for engine in engines:
            engine.may_go_on.clear()
        sync.begin(1, lambda: None)
        time.sleep(1.25 * patience_s)
        assert sync.is_syncing
        for engine in engines:
            engine.may_go_on.set()
        sync.wait()
        assert sync.holders(1) == fleet.connected() and [len(engine.orders) for engine in engines] == [2, 2]


def test_a_server_that_does_not_end_a_sync_which_another_one_failed_is_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Failing(ScriptedEngine):
        async def set_version(self, version: int) -> None:
            if not hanging.may_go_on.is_set():
                raise EngineFailed("scripted failure")
            await super().set_version(version)

    hanging = Hanging("labelling")
    with syncing(tmp_path, hanging, Failing(), straggler_timeout_s=PATIENCE_S) as (sync, _, _):
        hanging.may_go_on.clear()
        sync.begin(1, lambda: None)
        until(lambda: len(failures_of(caplog)) == 2)
        hanging.may_go_on.set()
        sync.wait()
    (of_one,) = [message for message in failures_of(caplog) if "scripted failure" not in message]
    assert "another server failed 1.5 s (learner.weight_sync.straggler_timeout_s) earlier" in of_one


FROZEN, PAIR = {"a", "b"}, {"a.lora_A.weight", "a.lora_B.weight"}


def of_rank(max_lora_rank: int) -> ScriptedEngine:
    return ScriptedEngine(limits=msgspec.structs.replace(LIMITS, max_lora_rank=max_lora_rank))


@pytest.mark.parametrize("overlap", [False, True])
def test_a_session_brings_the_frozen_weights_once_and_then_the_adapter_alone(tmp_path: Path, overlap: bool) -> None:
    one, other, weights = of_rank(4), of_rank(8), AdaptedWeights()
    with syncing(tmp_path, one, other, weights=weights) as (sync, _, fleet):
        assert one.weights.keys() == other.weights.keys() == FROZEN | PAIR
        for version in (1, 2):
            weights.pair += 1
            if overlap:
                sync.begin(version, lambda: None)
                weights.pair += 100
                sync.wait()
                weights.pair -= 100
                report = sync.pop_report()
            else:
                report = sync.send(version)
            assert report is not None
            assert report.num_bytes == 2 * weights.pair.nbytes + 16  # the trailer is 16 bytes
            for engine in (one, other):
                assert engine.weights.keys() == PAIR and value_at(engine) == version
                assert engine.calls[-5:] == ["stage_push", "pause", "load_push", f"set_version {version}", "resume"]
        assert sync.holders(2) == fleet.connected() and sync.sample.changed_frac(2, torch.float32) == 1


@pytest.mark.parametrize("overlap", [False, True])
def test_every_new_session_brings_the_frozen_weights_to_all_of_its_servers(tmp_path: Path, overlap: bool) -> None:
    one, other, weights = of_rank(4), of_rank(4), AdaptedWeights()
    with syncing(tmp_path, one, other, weights=weights) as (sync, _, fleet):

        def send(version: int) -> None:
            weights.pair += 1
            if overlap:
                sync.begin(version, lambda: None)
                sync.wait()
            else:
                assert sync.send(version) is not None

        def has(engine: ScriptedEngine, names: set[str], value: float) -> bool:
            return engine.weights.keys() == names and float(engine.weights["a.lora_B.weight"][0, 0]) == value

        send(1)
        one.scripted_reports = [FAILED]
        send(2)
        assert has(other, FROZEN | PAIR, 2), "interrupted by the failure, and alone in a session after that"
        send(3)
        assert has(other, PAIR, 3)
        (behind,) = [member for member in fleet.members if member not in sync.holders(3)]
        until(lambda: behind in sync.joiners())
        assert sync.send(3, [behind]) is not None
        assert has(one, FROZEN | PAIR, 3) and other.orders[-1].session != one.orders[-1].session
        send(4)
        assert has(one, FROZEN | PAIR, 4) and has(other, FROZEN | PAIR, 4), "in a session of both"
        send(5)
        assert has(one, PAIR, 5) and has(other, PAIR, 5)
        assert other.orders[-1].session == one.orders[-1].session


@pytest.mark.parametrize(
    ("ranks", "why_merged", "lora", "expected"),
    [
        ((4, 3), None, "adapter", "supports a rank of up to 3; set server.max_lora_rank = 4 there"),
        ((4, 4), "it adapts something", "adapter", "merged with the adapter: it adapts something"),
        ((4, 4), None, "merged", ""),
    ],
)
def test_all_servers_get_merged_weights_if_one_cannot_apply_the_adapter_or_on_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ranks: tuple[int, ...], why_merged: str | None, lora: str,
    expected: str,
) -> None:  # fmt: skip
    caplog.set_level("INFO", "learner")
    engines = [of_rank(rank) for rank in ranks]
    with syncing(tmp_path, *engines, weights=AdaptedWeights(why_merged), lora=lora) as (sync, _, _):
        assert sync.send(1) is not None
        assert [engine.weights.keys() for engine in engines] == [FROZEN, FROZEN]
    notes = [message for message in caplog.messages if message.startswith("weight syncs send")]
    assert len(notes) == (expected != "") and all(expected in note for note in notes)


def test_a_compression_that_adapters_do_not_have_costs_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with syncing(tmp_path, of_rank(4), weights=AdaptedWeights(), compression="delta") as (sync, _, _):
        assert sync.send(1) is not None
    assert 'compression = "delta" has no effect: weight syncs send the adapter alone' in caplog.text


def test_a_server_without_adapters_that_comes_later_is_left_out_with_the_key_to_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as cleanup:
        endpoints = [cleanup.enter_context(ServerThread(of_rank(rank))).endpoint for rank in (4, 0)]
        fleet = cleanup.enter_context(a_fleet(tmp_path, *endpoints, weight_sync={"timeout_s": 20.0}))
        until(lambda: len(fleet.connected()) == 2)
        able, unable = fleet.members
        sync = WeightSync(fleet, AdaptedWeights(), fleet._run.learner.weight_sync)
        cleanup.callback(sync.close)
        assert sync.send(0, [able]) is not None
        assert sync.send(0, [unable]) is None
        assert sync.holders(0) == [able] and unable.is_gone
    assert "supports a rank of up to 0; set server.max_lora_rank = 4 there" in caplog.text


@pytest.mark.parametrize("overlap", [False, True])
def test_a_sync_of_an_interrupted_run_waits_for_no_lost_server(tmp_path: Path, overlap: bool) -> None:
    with syncing(tmp_path, ScriptedEngine(), connect_timeout_s=NEVER_S) as (sync, _, fleet):
        (member,) = fleet.members
        member.is_unlisted = True  # as if it had left
        is_done, interrupted = threading.Event(), threading.Event()
        fleet.is_interrupted = interrupted.is_set
        threading.Timer(0.2, interrupted.set).start()
        if overlap:
            sync.begin(1, is_done.set)
            sync.wait()
            assert is_done.is_set() and sync.pop_report() is None
        else:
            assert sync.send(1) is None
