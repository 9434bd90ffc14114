"""The simulation compared with closed forms, its invariants, and monotonicity in hardware."""

from itertools import pairwise

import msgspec
import numpy as np
import pytest

from deploy.planning.rates import Rates
from deploy.planning.servers import Failures, SimulatedGroup
from deploy.planning.simulation import Setup, Simulation, simulate
from protocol.errors import ConfigError
from tests.deploy.planned_run import CONSTANT, SPREAD, setup

BATCH_TOKENS = 8 * 8 * 100
GENERATION_S = 100 * (0.01 + 64 * 1e-4)
"""Generation time of a batch with constant lengths that fills the server."""
OVERLAP = {"weight_sync": {"overlap_with_training": True}}


def with_rates(**changes: float) -> Rates:
    return msgspec.structs.replace(CONSTANT, **changes)


@pytest.mark.parametrize("train_s", [0.2, 4.0])
def test_the_faster_of_two_constant_sides_waits_for_the_slower(train_s: float) -> None:
    outcome = simulate(setup(with_rates(learner_token_s=train_s / BATCH_TOKENS)), steps=100)
    step_s = max(train_s, GENERATION_S)
    assert outcome.step_s == pytest.approx(step_s, rel=0.01)
    assert outcome.samples_per_s == pytest.approx(64 / step_s, rel=0.01)
    assert outcome.learner_idle_frac == pytest.approx(1 - train_s / step_s, abs=0.01)
    assert outcome.server_idle_frac == pytest.approx(1 - GENERATION_S / step_s, abs=0.01)


def test_at_staleness_0_a_step_is_the_sum_of_its_parts() -> None:
    rates = with_rates(
        weight_sync_s=0.3, weight_sync_stall_s=0.2, weight_sync_feed_s=0.1, score_s=0.05, learner_step_s=0.15
    )
    outcome = simulate(setup(rates, learner={"max_staleness": 0}), steps=40)
    train_s, weight_sync_s = 0.15 + 1e-4 * BATCH_TOKENS, 0.4
    assert outcome.step_s == pytest.approx(GENERATION_S + 0.05 + train_s + weight_sync_s, rel=1e-6)
    assert outcome.learner_idle_frac == pytest.approx((GENERATION_S + 0.05) / outcome.step_s, rel=1e-6)
    assert outcome.learner_weight_sync_frac == pytest.approx(weight_sync_s / outcome.step_s, rel=1e-6)
    assert outcome.server_idle_frac == pytest.approx(1 - GENERATION_S / outcome.step_s, rel=1e-6)
    assert outcome.staleness_max == 0


@pytest.mark.parametrize("weight_sync_s", [0.1, 3.0])
def test_a_push_during_the_next_step_delays_the_step_after_it(weight_sync_s: float) -> None:
    rates = with_rates(decode_step_s=1e-4, decode_token_s=0.0, weight_sync_s=weight_sync_s)
    outcome = simulate(setup(rates, learner={"max_staleness": 4} | OVERLAP), steps=40)
    assert outcome.step_s == pytest.approx(max(weight_sync_s, 1e-4 * BATCH_TOKENS), rel=0.01)


def test_a_simulation_in_which_no_server_lives_long_enough_for_a_group_ends() -> None:
    with pytest.raises(ConfigError, match=r"--failures 0\.05 1: the servers fail before they complete a group"):
        simulate(setup(CONSTANT, servers=2, failures=Failures(every_s=0.05, restart_s=1.0)), steps=2)


@pytest.mark.parametrize(
    ("max_staleness", "failures"), [(0, None), (2, None), (2, Failures(every_s=40.0, restart_s=5.0))]
)
def test_no_group_exceeds_the_staleness_bound(max_staleness: int, failures: Failures | None) -> None:
    rates = msgspec.structs.replace(
        CONSTANT, lengths=SPREAD, learner_token_s=4e-4, weight_sync_s=0.2, weight_sync_stall_s=0.1
    )
    learner = {"max_staleness": max_staleness} | OVERLAP
    outcome = simulate(setup(rates, servers=2, learner=learner, failures=failures), steps=60)
    assert outcome.staleness_max <= max_staleness
    if failures is None:
        assert outcome.staleness_mean == pytest.approx(max_staleness, abs=0.1)  # the learner is the slow side


def test_more_servers_or_ranks_never_give_fewer_samples() -> None:
    rates = msgspec.structs.replace(CONSTANT, lengths=SPREAD, weight_sync_s=0.05, weight_sync_stall_s=0.05)
    learner = {"groups_per_step": 32} | OVERLAP
    of_n = [simulate(setup(rates, servers=n, ranks=4, learner=learner), steps=60) for n in (1, 2, 3, 5, 9)]
    of_m = [simulate(setup(rates, servers=4, ranks=m), steps=60) for m in (1, 2, 3, 5, 8)]
    for outcomes in (of_n, of_m):
        assert all(more.samples_per_s >= 0.99 * fewer.samples_per_s for fewer, more in pairwise(outcomes))
    assert of_n[1].samples_per_s > 1.5 * of_n[0].samples_per_s


def test_a_seed_gives_the_same_run_and_the_same_completions_for_every_number_of_servers() -> None:
    rates = msgspec.structs.replace(CONSTANT, lengths=SPREAD)
    spread = setup(rates, servers=2, failures=Failures(every_s=30, restart_s=2))
    first, again, other = (simulate(spread, steps=30, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    outcomes = [simulate(setup(rates, servers=n), steps=20, seed=5) for n in (1, 4)]
    tokens = [outcome.tokens_per_s * outcome.step_s for outcome in outcomes]
    assert np.ptp(tokens) == pytest.approx(0, abs=1e-6)


def test_every_push_stalls_all_servers_for_the_transfer_to_all() -> None:
    rates = with_rates(weight_sync_s=0.1, weight_sync_stall_s=0.05, weight_sync_feed_s=0.02)
    assert rates.weight_sync_seconds(10) == pytest.approx(0.3)
    assert rates.stall_seconds(10, overlap_weight_loading=False) == pytest.approx(0.25)
    assert rates.stall_seconds(10, overlap_weight_loading=True) == pytest.approx(0.05)
    few, many = (simulate(setup(rates, servers=n, learner=OVERLAP), steps=40) for n in (1, 20))
    assert many.server_stalled_frac > few.server_stalled_frac


def test_a_fleet_loses_its_share_of_downtime() -> None:
    rates = with_rates(learner_token_s=1e-6)
    failures = Failures(every_s=400.0, restart_s=97.0)
    base = setup(rates, servers=16, learner={"groups_per_step": 256, "max_staleness": 4})
    whole = simulate(base, steps=100)
    broken = simulate(msgspec.structs.replace(base, failures=failures), steps=100)
    availability = 400 / (400 + 100)
    assert broken.samples_per_s / whole.samples_per_s == pytest.approx(availability, abs=0.08)
    alone = simulate(setup(CONSTANT, failures=Failures(every_s=10.0, restart_s=20.0)), steps=40)
    assert alone.server_idle_frac > 0.4 and alone.staleness_max <= 2, "groups wait until the server is back"


def test_a_few_simulated_servers_represent_many() -> None:
    rates = msgspec.structs.replace(
        CONSTANT, lengths=SPREAD, weight_sync_s=0.1, weight_sync_feed_s=0.002, weight_sync_stall_s=0.1
    )
    many = setup(rates, servers=128, ranks=96, learner={"groups_per_step": 1024} | OVERLAP)
    whole, by_few = (simulate(many, steps=24, most_servers=most) for most in (128, 16))
    assert by_few.samples_per_s == pytest.approx(whole.samples_per_s, rel=0.02)
    assert by_few.groups_in_flight == pytest.approx(whole.groups_in_flight, rel=0.05)
    assert by_few.learner_idle_frac == pytest.approx(whole.learner_idle_frac, abs=0.02)
    assert by_few.server_idle_frac == pytest.approx(whole.server_idle_frac, abs=0.02)


def test_auto_staleness_is_as_fast_as_its_bound_and_less_stale() -> None:
    rates = msgspec.structs.replace(CONSTANT, lengths=SPREAD, learner_token_s=2e-4)
    bound, auto = (
        simulate(setup(rates, servers=4, learner={"max_staleness": most} | OVERLAP), steps=200) for most in (8, "auto")
    )
    assert auto.samples_per_s > 0.97 * bound.samples_per_s
    assert auto.staleness_mean < 0.6 * bound.staleness_mean
    slow = simulate(setup(with_rates(learner_token_s=1e-3), learner={"max_staleness": "auto"}), steps=120)
    assert slow.learner_idle_frac < 0.01 and slow.staleness_mean < 1.1, "staleness decreases for a slow learner"


def test_every_slot_is_consumed_once_and_in_order() -> None:
    taken: list[int] = []

    class Watched(Simulation):
        def _take(self, version: int):  # type: ignore[no-untyped-def]
            groups: list[SimulatedGroup] = yield from super()._take(version)
            taken.extend(group.slot for group in groups)
            return groups

    rates = msgspec.structs.replace(CONSTANT, lengths=SPREAD)
    broken: Setup = setup(rates, servers=3, failures=Failures(every_s=20.0, restart_s=3.0))
    Watched(broken, seed=3, most_servers=3).after(50)
    assert taken == list(range(50 * 8))


def test_ranks_share_tokens_but_not_single_completions() -> None:
    rates = with_rates(learner_step_s=0.5, learner_sync_s=0.25)
    assert rates.train_s(6400, 100, 1) == pytest.approx(0.5 + 0.64)
    assert rates.train_s(6400, 100, 4) == pytest.approx(0.75 + 0.16)
    assert rates.train_s(6400, 100, 1000) == pytest.approx(0.75 + 0.01)
