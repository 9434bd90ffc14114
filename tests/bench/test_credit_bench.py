"""The credit benchmarks: when a run has reached its target, what its runs differ in, and what the toy shows."""

import json
from pathlib import Path

import pytest

from tests.bench.credit import CREDITS, RECIPES, WINDOW, Cell, as_text, config_of, has_reached, steps_to
from tests.bench.credit_lock import MAX_STEPS, RULES, steps_to_target


def test_the_target_is_reached_by_the_mean_of_the_last_steps() -> None:
    assert steps_to([0.0] * 5 + [1.0] * 20, 0.9) == 14
    assert steps_to([1.0] * (WINDOW - 1), 0.9) is None and steps_to([0.8] * 50, 0.9) is None


def test_a_run_in_progress_is_read_up_to_its_last_complete_line(tmp_path: Path) -> None:
    assert not has_reached(tmp_path, 0.9)
    path = tmp_path / "metrics.jsonl"
    lines = "".join(json.dumps({"reward/mean": 1.0}) + "\n" for _ in range(WINDOW - 1))
    path.write_text(lines + '{"reward/mean": 1.')
    assert not has_reached(tmp_path, 0.9)
    path.write_text(lines + '{"reward/mean": 1.0}\n{"rew')
    assert has_reached(tmp_path, 0.9)


@pytest.mark.parametrize("recipe", RECIPES)
def test_runs_of_a_recipe_differ_in_their_credit_alone(recipe: str, tmp_path: Path) -> None:
    runs = [config_of(Cell(recipe, 1, credit), tmp_path) for credit in CREDITS]
    assert [run.learner.advantage.credit for run in runs] == list(CREDITS)
    assert {(run.seed, run.learner.environment.factory, run.learner.steps) for run in runs} == {
        (1, f"{recipe}_by_turn", runs[0].learner.steps)
    }


def test_the_table_has_a_median_only_if_every_seed_has_reached_the_target() -> None:
    results = [
        {"recipe": "guess", "seed": seed, "credit": credit, "steps": steps, "steps_run": 400, "anchored_frac": 0.5}
        for credit, of_seeds in {"turn": [30, 10, 20], "episode": [30, None, 20]}.items()
        for seed, steps in enumerate(of_seeds)
    ]
    _, episode, turn = as_text(results).splitlines()
    assert turn.split() == ["guess", "turn", "30,", "10,", "20", "20", "50%"]
    assert episode.split() == ["guess", "episode", "30,", ">", "400,", "20", "–", "50%"]


def test_credit_by_turn_learns_sooner_where_each_turn_earns_its_own_reward() -> None:
    soon, later, last = (steps_to_target(RULES[name], seed=0) for name in ("turn, gamma 0.5", "turn", "episode"))
    assert 1.1 * soon < later and 1.05 * later < last < MAX_STEPS
