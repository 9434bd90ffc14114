"""Agreement of ranks: one decision for all, and the error of a disagreement, on two real ranks."""

from typing import Any

import msgspec
import pytest
from accelerate import Accelerator

from learner.rank_agreement import (
    any_rank,
    broadcast_bytes,
    decide_on_rank_0,
    describe_differences,
    first_problem,
    require_agreement,
)
from protocol.errors import ConfigError, RankFailed, RanksDisagree
from tests.learner.ranks import on_two_ranks


class View(msgspec.Struct, frozen=True, kw_only=True):
    step: int
    settings: dict[str, Any] = {}


def agree(accelerator: Accelerator) -> None:
    rank = accelerator.process_index
    assert decide_on_rank_0(accelerator, lambda: View(step=rank), View) == View(step=0)
    assert decide_on_rank_0(accelerator, lambda: None if rank == 0 else 1, int | None) is None
    expected = ConfigError if rank == 0 else RankFailed
    with pytest.raises(expected, match="no such key" if rank == 0 else "rank 0 of this learner has stopped"):
        decide_on_rank_0(accelerator, refuse, View)
    sent = bytes(range(256)) * 1000 if rank == 0 else b"ignored"
    assert broadcast_bytes(accelerator, sent) == bytes(range(256)) * 1000
    assert broadcast_bytes(accelerator, b"" if rank == 0 else b"ignored") == b""

    assert any_rank(accelerator, rank == 1) and not any_rank(accelerator, False)
    assert first_problem(accelerator, None) is None
    assert first_problem(accelerator, "no compiler" if rank == 1 else None) == "on rank 1: no compiler"
    assert first_problem(accelerator, "a longer problem" if rank == 0 else "none") == "on rank 0: a longer problem"

    require_agreement(accelerator, View(step=3, settings={"kind": "adamw", "rate": 1e-5}), "Do nothing")
    with pytest.raises(RanksDisagree) as caught:
        require_agreement(accelerator, View(step=3 + rank, settings={"kind": "adamw"} if rank else {}), "Start again")
    assert str(caught.value) == (
        "the ranks of this learner disagree: step is 3 on rank 0 and 4 on rank 1; settings.kind is absent on rank 0 "
        "and "
        '"adamw" on rank 1. Start again'
    )
    require_agreement(accelerator, View(step=5), "Do nothing")  # the ranks are still synchronized


def refuse() -> View:
    raise ConfigError("no such key")


def test_two_ranks_agree_or_report_their_differences() -> None:
    on_two_ranks(agree)


def test_a_single_rank_decides_without_a_collective() -> None:
    class Alone:
        num_processes = 1

    assert decide_on_rank_0(Alone(), lambda: 7, int) == 7  # type: ignore[arg-type]
    assert any_rank(Alone(), True) and not any_rank(Alone(), False)  # type: ignore[arg-type]
    assert first_problem(Alone(), "no compiler") == "no compiler"  # type: ignore[arg-type]
    require_agreement(Alone(), View(step=1), "")  # type: ignore[arg-type]


def test_differences_group_ranks_by_value_and_count_omitted_fields() -> None:
    views = [{"layout": {"is_packed": value}} for value in (True, False, True, False)]
    assert describe_differences(views) == "layout.is_packed is true on ranks 0, 2 and false on ranks 1, 3"
    many = [{f"key{number}": rank for number in range(8)} for rank in range(2)]
    assert describe_differences(many).endswith("key4 is 0 on rank 0 and 1 on rank 1; and 3 more fields")
