"""max_staleness = "auto": in a simulated pipeline it ends at the least lookahead that loses nothing, and it moves a real queue."""

import time
from pathlib import Path

import pytest

from learner.config.learner import LearnerConfig
from learner.rollouts.slot_order import SPARE_TAKES, AutoStaleness
from learner.train import train
from protocol.messages import Generate, Message
from tests.learner.config.settings import ALWAYS, load
from tests.learner.model_engine import tiny_server
from tests.learner.rollouts.test_rollouts import TIMEOUT_S, HandServer, group_of, rollouts_on, slots
from tests.learner.test_train import make_run, metrics_of

NUM_STEPS = 200


def config_of(tmp_path: Path, **learner: object) -> LearnerConfig:
    return load(tmp_path, ALWAYS | learner).learner


def simulate(
    lookahead: AutoStaleness, latency: float, num_at_once: int, jitter: float = 0.0
) -> tuple[list[int], float]:
    """A learner that takes a second for each batch, and a server that generates `num_at_once` batches at once, each in `latency`
    seconds. Returns the lookahead at every step, and the seconds per step of the last half.
    """
    free_at = [0.0] * num_at_once
    ready_at: list[float] = []
    now = last_take = 0.0
    seen, taken_at = [], []
    for version in range(NUM_STEPS):
        while len(ready_at) <= version + lookahead.versions:
            place = min(range(num_at_once), key=free_at.__getitem__)
            late = jitter * (len(ready_at) * 7 % 5) / 4
            free_at[place] = max(free_at[place], now) + latency + late
            ready_at.append(free_at[place])
        came_at = max(now, ready_at[version])
        step_s = max(came_at - last_take, 1e-9)
        num_running = sum(at > came_at for at in ready_at)
        lookahead.update(
            waited_share=(came_at - now) / step_s,
            has_room=num_running < num_at_once,
            has_spare=len(ready_at) > version + 1 and ready_at[version + 1] <= came_at,
        )
        last_take = came_at
        taken_at.append(came_at)
        seen.append(lookahead.versions)
        now = came_at + 1.0
    half = NUM_STEPS // 2
    return seen, (taken_at[-1] - taken_at[half]) / (NUM_STEPS - 1 - half)


@pytest.mark.parametrize(("latency", "least"), [(0.3, 1), (0.95, 1), (1.5, 2), (3.5, 4), (6.9, 7)])
@pytest.mark.parametrize("jitter", [0.0, 0.04])
def test_it_ends_at_the_least_lookahead_that_keeps_the_learner_fed(
    tmp_path: Path, latency: float, least: int, jitter: float
) -> None:
    seen, step_s = simulate(
        AutoStaleness(config_of(tmp_path, max_staleness="auto")), latency, num_at_once=20, jitter=jitter
    )
    assert set(seen[NUM_STEPS // 2 :]) == {least}
    assert step_s == pytest.approx(1.0, rel=0.02)
    if least > 1:  # and none below it would have
        _, slower_s = simulate(AutoStaleness(config_of(tmp_path, max_staleness=least - 1)), latency, num_at_once=20)
        assert slower_s > 1.05


@pytest.mark.parametrize("num_at_once", [1, 2, 3])
def test_a_full_server_is_not_asked_for_more(tmp_path: Path, num_at_once: int) -> None:
    latency = 4.0 * num_at_once
    seen, step_s = simulate(AutoStaleness(config_of(tmp_path, max_staleness="auto")), latency, num_at_once)
    assert max(seen) <= num_at_once + 1
    assert step_s == pytest.approx(4.0, rel=0.02)


def test_it_never_goes_beyond_its_bounds(tmp_path: Path) -> None:
    seen, _ = simulate(
        AutoStaleness(config_of(tmp_path, max_staleness="auto", max_auto_staleness=3)), 50.0, num_at_once=99
    )
    assert max(seen) == 3
    seen, _ = simulate(
        AutoStaleness(config_of(tmp_path, max_staleness="auto", max_auto_staleness=1)), 0.01, num_at_once=99
    )
    assert set(seen) == {1}


@pytest.mark.parametrize("versions", [0, 2, 5])
def test_a_number_stays_what_it_is(tmp_path: Path, versions: int) -> None:
    seen, _ = simulate(AutoStaleness(config_of(tmp_path, max_staleness=versions)), 3.0, num_at_once=9)
    assert set(seen) == {versions}


def test_a_single_hiccup_of_the_server_is_given_back(tmp_path: Path) -> None:
    lookahead = AutoStaleness(config_of(tmp_path, max_staleness="auto"))
    for _ in range(9):
        lookahead.update(waited_share=0.0, has_room=True, has_spare=False)
    lookahead.update(waited_share=0.6, has_room=True, has_spare=False)
    assert lookahead.versions == 3
    for _ in range(SPARE_TAKES):
        lookahead.update(waited_share=0.0, has_room=True, has_spare=True)
    assert lookahead.versions == 2


@pytest.mark.parametrize(("num_sequences", "is_more_asked_for"), [(8, False), (1000, True)])
def test_a_queue_that_waits_asks_for_more_if_the_server_has_room(
    tmp_path: Path, num_sequences: int, is_more_asked_for: bool
) -> None:
    def slowly(server: HandServer, request: Generate) -> list[Message]:
        time.sleep(0.05)
        return [group_of(request, server.version)]

    with (
        HandServer(slowly, num_sequences) as server,
        rollouts_on(server, tmp_path, max_staleness="auto", steps=30) as rollouts,
    ):
        allowed = []
        for version in range(9):
            rollouts.publish(version, server.server_id)
            assert len(slots(rollouts.next_batch(version, TIMEOUT_S))) == 3
            allowed.append(rollouts.batch_metrics["staleness/allowed"])
            assert len(server.generated) <= (allowed[-1] + version + 1) * 3
    assert allowed[0] == 2 and (max(allowed) > 2) == is_more_asked_for


def test_a_run_finds_its_lookahead_and_trains_on_nothing_staler(tmp_path: Path) -> None:
    with tiny_server() as server:
        run = make_run(tmp_path, server.endpoint, steps=8, max_staleness="auto", max_auto_staleness=3)
        train(run, resume=False)
    lines = metrics_of(run)
    assert all(1 <= line["staleness/allowed"] <= 3 and line["staleness/max"] <= 3 for line in lines)
    assert len(lines) == 8
