"""Which cores a side takes that was told none. That both commands do so is in test_system.py."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from inference_server.__main__ import _on_own_cores
from inference_server.config import ServerRun
from protocol.config import load_config
from protocol.hardware import halves, has_gpu, share_of_cores

RECIPE = str(Path(__file__).parent.parent.parent / "deploy/recipes/reverse.toml")
LOOPBACK = ("tcp://127.0.0.1:5757",)

pytestmark = pytest.mark.skipif(has_gpu(), reason="cores are shared on machines without a GPU")


@pytest.fixture(autouse=True)
def five_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4, 5, 8, 9})


def test_halves_are_all_cores_once() -> None:
    assert halves(5) == {"server": (0, 1), "learner": (2, 3, 4)}


def test_two_sides_on_one_machine_take_a_half_each_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert share_of_cores("server", {}, LOOPBACK) == (0, 1)
        assert share_of_cores("learner", {"http_port": 0}, LOOPBACK) == (2, 3, 4)
    assert caplog.messages == [
        "using core(s) 0, 1 of 5, so that the learner has its own; server.cpu_cores overrides this",
        "using core(s) 2, 3, 4 of 5, so that the server has its own; learner.cpu_cores overrides this",
    ]


@pytest.mark.parametrize(
    ("taken", "left"),
    [([0], (1, 2, 3, 4)), ([1, 7], (0, 3, 4)), ([0, 1, 2, 3, 4], (2, 3, 4)), ([], (2, 3, 4))],
    ids=["one", "one beyond the last, which wraps around", "all, so the half", "none"],
)
def test_what_the_other_section_names_is_left_to_it(taken: list[int], left: tuple[int, ...]) -> None:
    assert share_of_cores("learner", {"cpu_cores": taken}, LOOPBACK) == left


@pytest.mark.parametrize("endpoints", [("tcp://10.0.0.5:5757",), ("tcp://[::]:5757",), ()])
def test_a_side_that_is_alone_on_its_machine_takes_what_there_is(endpoints: tuple[str, ...]) -> None:
    assert share_of_cores("learner", {}, endpoints) is None


def test_of_several_servers_one_on_this_machine_is_enough() -> None:
    assert share_of_cores("learner", {}, ("tcp://10.0.0.5:5757", *LOOPBACK)) == (2, 3, 4)


def test_ranks_and_workers_divide_a_half_and_too_many_are_left_where_they_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def of(rank: int, num_ranks: int, section: dict[str, Any] | None = None) -> tuple[int, ...] | None:
        return share_of_cores("learner", section or {}, LOOPBACK, rank=rank, num_processes=num_ranks)

    with caplog.at_level(logging.INFO):
        assert [of(rank, 2) for rank in (0, 1)] == [(2, 4), (3,)]
    assert len(caplog.messages) == 1
    assert of(0, 4) is None
    assert share_of_cores("server", {}, LOOPBACK, num_processes=2) == (0, 1)
    assert share_of_cores("server", {}, LOOPBACK, num_processes=3) is None


@pytest.mark.parametrize(("flags", "cores"), [((), (0, 1)), (("2",), (0, 1)), (("3",), None)])
def test_a_server_whose_workers_find_no_room_in_its_half_stays_where_it_is(
    flags: tuple[str, ...], cores: tuple[int, ...] | None
) -> None:
    workers = ["--server.tensor-parallel-size", *flags] if flags else []
    run = load_config(ServerRun, [RECIPE, *workers], "test")
    assert _on_own_cores(run).server.cpu_cores == cores
    named = load_config(ServerRun, [RECIPE, "--server.cpu-cores", "4"], "test")
    assert _on_own_cores(named).server.cpu_cores == (4,)
