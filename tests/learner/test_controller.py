"""The controller: servers that do not score in time, and quantized ones."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from learner.controller import Controller
from learner.run_inputs import RunInputs
from protocol.errors import ConfigError, DeadlineExceeded, ScoringFailed
from tests.learner.runs import make_run


class Server:
    def __init__(self, endpoint: str = "tcp://a:1", quantization: str = "") -> None:
        self.endpoint = endpoint
        self.welcome = SimpleNamespace(max_model_len=64, dtype="float32", quantization=quantization)
        self.link = SimpleNamespace(welcome=self.welcome)


def parts_of(tmp_path: Path, **parts: Any) -> dict[str, Any]:
    """Return the parts of a controller, of which only `parts` exist."""
    run_inputs = RunInputs(make_run(tmp_path, "tcp://a:1", connect_timeout_s=0.1))
    return dict.fromkeys(Controller.__struct_fields__) | {"run_inputs": run_inputs} | parts


def test_a_run_without_servers_ends_at_a_deadline(tmp_path: Path) -> None:
    fleet = SimpleNamespace(is_connected=False, on_wait=lambda: None, no_server=lambda: DeadlineExceeded("nobody"))
    rollouts, evaluations = SimpleNamespace(next_batch=lambda *_: time.sleep(0.01)), SimpleNamespace(holds=False)
    idleness = SimpleNamespace(begin_wait=lambda: None)
    parts = parts_of(tmp_path, fleet=fleet, idleness=idleness, rollouts=rollouts, evaluations=evaluations)
    controller = Controller(**parts)
    interrupt: Any = SimpleNamespace(requested=False)
    with pytest.raises(DeadlineExceeded, match="nobody"):
        controller.next_batch(0, interrupt)


@pytest.mark.parametrize("is_several", [True, False])
def test_a_server_that_does_not_score_is_synced_again_or_ends_the_run_if_it_is_the_only_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_several: bool
) -> None:
    busy: Any = Server()
    members = [busy, Server("tcp://b:1")]
    failed: list[Any] = []

    def measure(member: Any, version: int) -> float:
        if member is busy:
            raise DeadlineExceeded("no score in time")
        return 0.5

    sync = {"send": lambda version, due: None, "holders": lambda version: members, "failed": failed.append}
    fleet, parity = SimpleNamespace(is_several=is_several, is_quantized=None), SimpleNamespace(measure=measure)
    controller = Controller(**parts_of(tmp_path, fleet=fleet, parity=parity, weight_sync=SimpleNamespace(**sync)))
    if is_several:
        assert controller._sync(members, 1) == 0.5 and failed == [busy]
        assert "parity could not be measured: no score in time" in caplog.messages
    else:
        with pytest.raises(DeadlineExceeded):
            controller._sync([busy], 1)


def test_a_server_that_is_lost_before_its_parity_is_measured_is_synced_again(tmp_path: Path) -> None:
    lost: Any = Server()
    failed: list[Any] = []
    sync = SimpleNamespace(
        send=lambda version, due: None, holders=lambda version: [], received=lambda version: {lost: "id"},
        failed=failed.append,
    )  # fmt: skip
    fleet = SimpleNamespace(is_several=False, is_quantized=None)
    assert Controller(**parts_of(tmp_path, fleet=fleet, weight_sync=sync))._sync([lost], 1) is None
    assert failed == [lost]


def test_a_server_that_cannot_score_is_excluded_and_the_others_stay(tmp_path: Path) -> None:
    broken: Any = Server()
    members = [broken, Server("tcp://b:1")]
    excluded: list[tuple[Any, Exception]] = []

    def measure(member: Any, version: int) -> float:
        if member is broken:
            raise ScoringFailed("cannot score 3 tokens")
        return 0.5

    sync = SimpleNamespace(send=lambda version, due: None, holders=lambda version: members)
    fleet = SimpleNamespace(is_several=True, is_quantized=None, exclude=lambda *one: excluded.append(one))
    parity = SimpleNamespace(measure=measure)
    assert Controller(**parts_of(tmp_path, fleet=fleet, parity=parity, weight_sync=sync))._sync(members, 1) == 0.5
    ((member, error),) = excluded
    assert member is broken and str(error) == "cannot score 3 tokens"


def test_a_version_is_published_for_a_server_that_received_it_also_if_it_is_lost_just_now(tmp_path: Path) -> None:
    published: list[Any] = []
    sync = SimpleNamespace(holders=lambda version: [], received=lambda version: {Server(): "id"})
    sync_check = SimpleNamespace(ask=lambda *_: None, ask_before=lambda holders: None)
    rollouts = SimpleNamespace(publish=lambda version, *server_ids: published.append((version, server_ids)))
    Controller(**parts_of(tmp_path, weight_sync=sync, sync_check=sync_check, rollouts=rollouts)).publish(3)
    assert published == [(3, ("id",))]


def test_an_interrupt_ends_the_wait_for_a_lost_server_of_the_policy_or_the_reference(tmp_path: Path) -> None:
    fleets = [SimpleNamespace(), SimpleNamespace()]
    reference = SimpleNamespace(scores=SimpleNamespace(server=SimpleNamespace(fleet=fleets[1])))
    interrupt: Any = SimpleNamespace(requested=False)
    Controller(**parts_of(tmp_path, fleet=fleets[0], reference=reference)).attach_interrupt(interrupt)
    assert [fleet.is_interrupted() for fleet in fleets] == [False, False]
    interrupt.requested = True
    assert [fleet.is_interrupted() for fleet in fleets] == [True, True]


def test_the_only_server_joins_again_with_all_checks_if_it_restarted_during_a_step(tmp_path: Path) -> None:
    excluded: list[Exception] = []

    def exclude(member: Any, error: Exception) -> None:
        excluded.append(error)
        raise error  # as for the last server

    restarted: Any = Server(quantization="fp8 KV cache")
    fleet = SimpleNamespace(is_quantized=False, exclude=exclude, wait=lambda: [restarted])
    sync = SimpleNamespace(wait=lambda: None, holders=lambda *_: [])
    sync_check = SimpleNamespace(ask_before=lambda holders: None, check=lambda: None)
    ledger = SimpleNamespace(consume=lambda groups, step: None)
    parts = parts_of(tmp_path, fleet=fleet, weight_sync=sync, sync_check=sync_check, ledger=ledger)
    with pytest.raises(ConfigError, match="quantizes"):
        Controller(**parts).sync_weights(2, [])
    assert len(excluded) == 1


def test_a_step_reports_the_sync_with_which_its_only_server_joined(tmp_path: Path) -> None:
    report = SimpleNamespace(metrics=lambda: {"weight_sync/bytes": 7.0})
    joined = SimpleNamespace(link=SimpleNamespace(welcome=None))
    sync = SimpleNamespace(
        wait=lambda: None, holders=lambda *_: [joined], received=lambda *_: {}, joiners=lambda: [],
        pop_report=lambda: None,
        send=lambda step: None, report_of={2: report}.get,
    )  # fmt: skip
    nothing = SimpleNamespace(
        ask=lambda *_: None, ask_before=lambda holders: None, check=lambda: None, expect=lambda step: None,
        consume=lambda groups, step: None, publish=lambda version, *servers: None,
    )  # fmt: skip
    parts = parts_of(tmp_path, weight_sync=sync, sync_check=nothing, ledger=nothing, rollouts=nothing)
    assert Controller(**parts).sync_weights(2, []) == {"weight_sync/bytes": 7.0}


def test_a_quantized_server_that_joins_a_run_of_others_gets_no_weights(tmp_path: Path) -> None:
    excluded: list[tuple[Any, Exception]] = []
    fleet = SimpleNamespace(is_quantized=False, exclude=lambda *one: excluded.append(one))
    controller = Controller(**parts_of(tmp_path, fleet=fleet))
    quantized: Any = Server(quantization="fp8 KV cache")
    assert controller._sync([quantized], 1) is None
    ((member, error),) = excluded
    assert member is quantized and "the server at tcp://a:1 quantizes (fp8 KV cache)" in str(error)


def test_the_correction_is_chosen_by_the_servers_before_the_run_waits_for_its_reference(tmp_path: Path) -> None:
    server: Any = Server(quantization="fp8 KV cache")
    present = [server]
    fleet = SimpleNamespace(is_connected=True, is_several=False, is_quantized=None, wait=lambda: present)

    def connect(version: int) -> None:
        present.clear()  # the server is lost meanwhile
        raise DeadlineExceeded("no reference")

    sync = SimpleNamespace(send=lambda version, due: None, holders=lambda version: present)
    parts = parts_of(
        tmp_path, fleet=fleet, weight_sync=sync, reference=SimpleNamespace(connect=connect),
        parity=SimpleNamespace(measure=lambda member, version: 0.1),
    )  # fmt: skip
    with pytest.raises(DeadlineExceeded, match="no reference"):
        Controller(**parts).connect(1)
    assert fleet.is_quantized is True
