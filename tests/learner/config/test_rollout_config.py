"""Keys about rollouts that do nothing beside the others, or contradict them, are refused with the reason."""

from pathlib import Path

import msgspec
import pytest

from tests.learner.test_train import make_run


@pytest.mark.parametrize(
    ("learner", "reason"),
    [
        ({"max_replacements": 3}, "max_replacements = 3 does nothing without active_sampling = true"),
        ({"max_replacements": 0, "active_sampling": True}, "max_replacements = 0 must be at least 1"),
        (
            {"reward": {"functions": ["share_right"], "overlong_buffer_tokens": 5}},
            r"reward\.overlong_buffer_tokens = 5 must be below sampling\.max_tokens = 5",
        ),
        (
            {"curriculum": {"kind": "pass_rate", "reward": "overlong"}},
            r"curriculum\.reward = 'overlong' is none of the reward functions: share_right, exact_match",
        ),
        (
            {"reward": {"functions": ["share_right"]}, "advantage": {"combine": "normalize_then_sum"}},
            "does nothing with 1 reward function",
        ),
    ],
)
def test_a_config_of_rollouts_that_does_nothing_is_refused(tmp_path: Path, learner: dict, reason: str) -> None:
    with pytest.raises(msgspec.ValidationError, match=reason):
        make_run(tmp_path, "tcp://127.0.0.1:1", **learner)
