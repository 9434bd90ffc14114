"""The episodes benchmark: its two environments differ only in the delay of their tool."""

import time
from pathlib import Path

import pytest

from learner.environments.contract import load_environment
from tests.bench.episodes import SIDES, config_of
from tests.bench.slow_tool import SECONDS

pytestmark = pytest.mark.system


@pytest.mark.parametrize(("side", "seconds"), [("slow", SECONDS), ("quick", 0.0)])
def test_a_side_takes_the_time_of_its_name(tmp_path: Path, side: str, seconds: float) -> None:
    environment = config_of(tmp_path, SIDES[side], steps=1, num_episodes=64).learner.environment
    assert (environment.max_turns, environment.max_concurrent) == (4, 64)
    instance = load_environment(environment.factory or "", takes_text=True)()
    instance.reset(secret=3)
    started = time.monotonic()
    assert instance.use("12=") == ">"
    assert time.monotonic() - started >= seconds
    assert 0 <= instance.get_reward() < 1
