"""Which servers fit a run: the context, and the routed experts that it replays."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from learner.run_inputs import RunInputs
from learner.server_fit import check_experts, check_fits
from protocol.errors import ConfigError, DataError
from protocol.messages import RoutingShape
from tests.learner.runs import make_run


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
def test_lengths_beyond_the_servers_limit_are_rejected_with_the_numbers(
    tmp_path: Path, learner: dict[str, Any], error: type[Exception] | None, expected: str
) -> None:
    welcome = SimpleNamespace(max_model_len=64, dtype="float32")
    server: Any = SimpleNamespace(endpoint="tcp://a:1", welcome=welcome)
    run_inputs = RunInputs(make_run(tmp_path, server.endpoint, **learner))
    if error is None:
        check_fits(run_inputs, server, is_quantized=None)
    else:
        with pytest.raises(error, match=expected):
            check_fits(run_inputs, server, is_quantized=None)


MIXTRAL = RoutingShape(num_layers=32, num_experts=8, num_per_token=2)


@pytest.mark.parametrize(
    ("expected", "offered", "max_model_len", "error"),
    [
        (None, MIXTRAL, 64, None),
        (MIXTRAL, MIXTRAL, 1 << 24, None),
        (
            MIXTRAL,
            None,
            64,
            r"returns no routed experts, expected 2 of 8 experts in 32 layers; set server\.return_rout",
        ),
        (MIXTRAL, msgspec.structs.replace(MIXTRAL, num_per_token=1), 64, r"returns 1 of 8 experts in 32 layers"),
        (MIXTRAL, MIXTRAL, (1 << 24) + 1, r"1024 MiB, expected at most 1024; lower server\.max_model_len to 16777216"),
    ],
)
def test_a_run_that_replays_needs_a_server_that_returns_the_experts_of_its_model(
    expected: RoutingShape | None, offered: RoutingShape | None, max_model_len: int, error: str | None
) -> None:
    welcome: Any = SimpleNamespace(experts=offered, max_model_len=max_model_len)
    if error is None:
        check_experts(expected, "tcp://a:1", welcome)
    else:
        with pytest.raises(ConfigError, match=error):
            check_experts(expected, "tcp://a:1", welcome)


def test_a_dense_model_has_nothing_to_replay(tmp_path: Path) -> None:
    assert RunInputs(make_run(tmp_path, "tcp://a:1")).experts is None
    with pytest.raises(ConfigError, match="routing_replay = true, but the config of model = 'tiny:digits' names no ex"):
        _ = RunInputs(make_run(tmp_path, "tcp://a:1", routing_replay=True)).experts
