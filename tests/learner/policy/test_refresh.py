"""When the reference is refreshed: each schedule compared with versions computed by hand."""

import msgspec
import pytest

from learner.config import ReferenceConfig
from learner.policy.reference import RefreshState, decide, first_state

ADAPTIVE = {"kind": "adaptive", "kl_threshold": 0.1}


def refreshes(settings: dict, steps: list[tuple[float | None, float | None]]) -> list[int]:
    """Return the versions at which a reference is refreshed, given (KL, reward) per step; None: not measured."""
    config = ReferenceConfig(**settings)
    state, last, found = first_state(config), 0, []
    for version, (kl, reward) in enumerate(steps, 1):
        state = msgspec.json.decode(msgspec.json.encode(state), type=RefreshState)  # as at a resume
        measured = {"reward/mean": reward, "reference/kl": kl}
        metrics = {name: value for name, value in measured.items() if value is not None}
        is_due, state = decide(config, state, version - last, metrics)
        if is_due:
            found.append(version)
            last = version
    return found


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kind": "fixed"}, []),
        ({"kind": "every", "every_steps": 5}, [5, 10, 15, 20]),
        ({"kind": "every", "every_steps": 1, "growth": 2.0}, [1, 3, 7, 15]),
        # 2, 3, 4.5, 6.75: rounded down for use, but grown without rounding
        ({"kind": "every", "every_steps": 2, "growth": 1.5}, [2, 5, 9, 15]),
        ({"kind": "every", "every_steps": 2, "growth": 1.5, "max_every_steps": 4}, [2, 5, 9, 13, 17, 21]),
        ({"kind": "ema", "every_steps": 7, "alpha": 0.1}, [7, 14, 21]),
        ({"kind": "mixture", "every_steps": 9, "num_snapshots": 2}, [9, 18]),
    ],
)
def test_a_fixed_schedule_ignores_measurements(settings: dict, expected: list[int]) -> None:
    assert refreshes(settings, [(9.0, 0.0)] * 21) == expected


@pytest.mark.parametrize(
    ("settings", "kls", "expected"),
    [
        pytest.param({}, [0.0] * 9, [], id="none"),
        pytest.param({}, [0.1] * 9, [], id="at the threshold"),
        pytest.param({}, [float("nan")] * 9, [], id="not a number"),
        pytest.param({}, [0.2, 0.2, 0.05, *[0.2] * 6], [6, 9], id="for the patience without a break"),
        pytest.param({"patience": 4}, [0.2, 0.2, 0.05, *[0.2] * 6], [7], id="for a longer patience"),
        pytest.param({}, [0.2, None, None, 0.2, None, 0.2, 0.0, None, 0.2, 0.2], [6], id="not measured at some steps"),
        pytest.param({"min_every_steps": 5}, [0.2] * 20, [5, 10, 15, 20], id="at a least distance"),
        pytest.param({"min_every_steps": 5, "growth": 2.0}, [0.2] * 40, [5, 15, 35], id="at one that grows"),
        pytest.param(
            {"min_every_steps": 5, "growth": 2.0, "max_every_steps": 12},
            [0.2] * 40,
            [5, 15, 27, 39],
            id="up to a limit",
        ),
        pytest.param({"min_every_steps": 5}, [*[0.0] * 17, *[0.2] * 3, *[0.0] * 9], [20], id="long after it"),
    ],
)
def test_drift_refreshes_an_adaptive_reference(settings: dict, kls: list[float | None], expected: list[int]) -> None:
    assert refreshes(ADAPTIVE | settings, [(kl, 1.0) for kl in kls]) == expected


def test_a_step_without_a_scorable_completion_does_not_count_as_lost_reward() -> None:
    rewards = [1.0, None, None, None, 1.0]
    assert refreshes(ADAPTIVE | {"patience": 5}, [(0.2, reward) for reward in rewards]) == [5]
    assert refreshes(ADAPTIVE | {"patience": 2}, [(0.2, None)] * 4) == [2, 4]


def test_a_policy_that_lost_reward_becomes_the_reference_only_when_the_average_is_back() -> None:
    """Averages: 1, 1, 0.9, 0.9, 1.06 (held back at 3 and 4), then 1.054, 1.054, 1.054, 1.0602 (held back at 8)."""
    rewards = [1.0, 1.0, 0.0, 0.9, 2.5, 1.0, 1.054, 1.054, 1.116]
    steps = [(0.2, reward) for reward in rewards]
    assert refreshes(ADAPTIVE, steps) == [5, 9]
    assert refreshes(ADAPTIVE | {"reward_guard": False}, steps) == [3, 6, 9]


EVERY, EMA = {"kind": "every", "every_steps": 3}, {"kind": "ema", "every_steps": 3, "alpha": 0.5}
MIXTURE = {"kind": "mixture", "every_steps": 3, "num_snapshots": 2}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"kind": "every"}, 'kind = "every" needs every_steps'),
        ({"kind": "ema", "every_steps": 3}, 'kind = "ema" needs alpha'),
        ({"kind": "adaptive"}, 'kind = "adaptive" needs kl_threshold'),
        ({"kind": "mixture", "every_steps": 3}, 'kind = "mixture" needs num_snapshots'),
        (EVERY | {"every_steps": 0}, "every_steps = 0 must be at least 1"),
        (EMA | {"alpha": 1.0}, r'alpha = 1\.0 must be between 0 and 1.*"every"'),
        (MIXTURE | {"num_snapshots": 1}, "num_snapshots = 1 must be at least 2"),
        (ADAPTIVE | {"patience": 0}, "patience = 0 must be at least 1"),
        (ADAPTIVE | {"kl_threshold": 0.0}, r"kl_threshold = 0\.0 must be above 0"),
        (ADAPTIVE | {"kl_threshold": float("inf")}, 'kl_threshold = inf .*kind = "fixed"'),
        (EVERY | {"growth": 1.0}, r"growth = 1\.0 must be above 1"),
        (EVERY | {"growth": float("inf")}, "growth = inf must be .* finite"),
        (EVERY | {"growth": 2.0, "max_every_steps": 2}, "max_every_steps = 2 must not be below every_steps = 3"),
        (ADAPTIVE | {"growth": 2.0}, r"growth = 2\.0 needs min_every_steps"),
        (EVERY | {"every_steps": 1, "reset_optimizer": True}, "the moments would be reset after every step"),
        (EVERY | {"only": "h.(0"}, r"only = 'h\.\(0' is not a regular expression: .*position"),
        (EVERY | {"device": "gpu"}, "device = 'gpu' must be"),
    ],
)
def test_contradictory_settings_are_rejected(settings: dict, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        ReferenceConfig(**settings)


def test_a_growing_interval_can_start_below_the_patience() -> None:
    assert ReferenceConfig(**ADAPTIVE, min_every_steps=1, growth=2.0).growth == 2.0
    assert ReferenceConfig(**EVERY | {"every_steps": 1, "growth": 2.0}, reset_optimizer=True).reset_optimizer
