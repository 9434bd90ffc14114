"""Which servers fit a run, and what one costs that does not score in time."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from learner.controller import Controller, check_fits
from learner.run_inputs import RunInputs
from protocol.errors import ConfigError, DataError, DeadlineExceeded
from tests.learner.runs import make_run


class Server:
    welcome = SimpleNamespace(max_model_len=64, dtype="float32")

    def __init__(self, endpoint: str = "tcp://a:1") -> None:
        self.endpoint = endpoint


@pytest.mark.parametrize(
    ("learner", "error", "expected"),
    [
        ({"environment": {"factory": "guess", "max_turns": 4, "max_episode_tokens": 64}}, None, ""),
        (
            {"environment": {"factory": "guess", "max_turns": 4, "max_episode_tokens": 65}},
            ConfigError,
            r"= 65 .* max_model_len = 64 of",
        ),
        (
            {"sampling": {"group_size": 2, "max_tokens": 60}},
            DataError,
            r"5 tokens.*max_tokens = 60.*64.*server\.max_model_len",
        ),
    ],
)
def test_what_is_longer_than_the_server_allows_is_refused_with_the_numbers(
    tmp_path: Path, learner: dict[str, Any], error: type[Exception] | None, expected: str
) -> None:
    server: Any = Server()
    run_inputs = RunInputs(make_run(tmp_path, server.endpoint, **learner))
    if error is None:
        check_fits(run_inputs, server)
    else:
        with pytest.raises(error, match=expected):
            check_fits(run_inputs, server)


@pytest.mark.parametrize("is_several", [True, False])
def test_a_server_that_does_not_score_gets_another_sync_later_and_ends_the_run_where_it_is_the_only_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_several: bool
) -> None:
    busy: Any = Server()
    members = [busy, Server("tcp://b:1")]
    failed: list[Any] = []

    def measure(member: Any, version: int) -> float:
        if member is busy:
            raise DeadlineExceeded("it did not score")
        return 0.5

    parts: dict[str, Any] = dict.fromkeys(Controller.__struct_fields__)
    parts |= {
        "run_inputs": RunInputs(make_run(tmp_path, busy.endpoint)),
        "fleet": SimpleNamespace(is_several=is_several),
        "parity": SimpleNamespace(measure=measure),
        "weight_sync": SimpleNamespace(
            push=lambda version, due: None, holders=lambda version: members, failed=failed.append
        ),
    }
    if is_several:
        assert Controller(**parts)._sync(members, 1) == 0.5 and failed == [busy]
        assert "parity could not be measured: it did not score" in caplog.messages
    else:
        with pytest.raises(DeadlineExceeded):
            Controller(**parts)._sync([busy], 1)
