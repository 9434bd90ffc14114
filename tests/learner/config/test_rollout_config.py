"""Keys about rollouts that contradict others are refused with the reason."""

from pathlib import Path

import msgspec
import pytest

from tests.learner.runs import make_run


@pytest.mark.parametrize(
    ("learner", "reason"),
    [
        ({"max_resamples": 0, "dynamic_sampling": True}, "max_resamples = 0 must be at least 1"),
        (
            {"reward": {"functions": ["share_right"], "overlong_buffer_tokens": 5}},
            r"reward\.overlong_buffer_tokens = 5 must be below sampling\.max_tokens = 5",
        ),
        (
            {"sampling": {"stop": ["</a>", ""]}},
            r"stop = \('</a>', ''\) must be at most 16 texts of 1 to 256 characters",
        ),
        (
            {"curriculum": {"kind": "pass_rate", "reward": "overlong"}},
            r"curriculum\.reward = 'overlong' is not a reward function of this run; use one of: share_right, exact_match",
        ),
    ],
)
def test_a_config_of_rollouts_that_contradicts_itself_is_refused(tmp_path: Path, learner: dict, reason: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=reason):
        make_run(tmp_path, "tcp://127.0.0.1:1", **learner)
