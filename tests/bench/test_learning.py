"""The parts of the learning benchmark: grid, sampler, result file, summary."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from learner.config import LearnerRun
from learner.forward.logprobs import sequences_logprobs
from learner.policy.model import load_policy, load_tokenizer
from learner.prompts.prompts import Prompts
from learner.prompts.tasks import make_rows
from protocol.errors import ConfigError
from protocol.model_files import resolve_model
from tests.bench import results
from tests.bench.cell import ALGORITHMS, LARGE_STEPS, NUM_TASK_PROMPTS, STALENESSES, TASKS, Cell, grid
from tests.bench.learning import is_chosen, parse_options
from tests.bench.plots import write_plots
from tests.bench.sampler import StaleSampler, exact_match, sample
from tests.bench.summary import as_text, summarize
from tests.bench.trial import Point, Trial, held_out_prompts

pytestmark = pytest.mark.system


def trial_of(cell: Cell, *exact: float) -> Trial:
    curve = [Point(step=25 * i, exact_match=value, sampled_exact_match=value / 2) for i, value in enumerate(exact)]
    return Trial(cell=cell, settings_hash=cell.settings_hash, seconds=2.0, curve=curve)


def sampler_at(max_staleness: int) -> tuple[StaleSampler, torch.nn.Module, LearnerRun]:
    run = Cell(task="sort", algorithm="grpo", max_staleness=max_staleness, seed=3).run()
    path = resolve_model("tiny:digits")
    policy, tokenizer = load_policy(path, gradient_checkpointing=False), load_tokenizer(path)
    return StaleSampler(policy, Prompts(run.learner.data, tokenizer, 3), tokenizer, run.learner, 3), policy, run


def test_the_grid_has_every_algorithm_at_every_staleness_and_every_reference_once_per_seed() -> None:
    cells = grid(["sort", "arithmetic"], [0, 1, 2, 3])
    assert len(cells) == len(set(cells)) == 4 * 2 * (5 * 4 + 4)
    assert {(cell.algorithm, cell.max_staleness) for cell in cells} == {(a, s) for a in ALGORITHMS for s in STALENESSES}
    assert {cell.reference for cell in cells} == {"none", "fixed", "every", "ema", "adaptive"}


def test_with_large_steps_only_the_clips_and_no_correction_are_compared() -> None:
    cells = grid([LARGE_STEPS])
    assert [(cell.algorithm, cell.max_staleness, cell.seed) for cell in cells] == [
        (algorithm, 8, seed) for seed in range(8) for algorithm in ("grpo", "gspo", "uncorrected")
    ]
    assert {(task, cell.run().learner.optimizer.schedule) for task in ("sort",
        LARGE_STEPS) for cell in grid([task])} == {
        ("sort", "linear"), (LARGE_STEPS, "constant")
    }  # fmt: skip


@pytest.mark.parametrize("cell", grid(list(TASKS), [0]), ids=lambda cell: cell.name)
def test_every_cell_is_a_config_the_learner_accepts(cell: Cell) -> None:
    learner = cell.run().learner
    assert learner.max_staleness == cell.max_staleness and learner.reference.kind == cell.reference


def test_only_picks_cells_by_name() -> None:
    options = parse_options(["--only", "sort/grpo/stale[04]/none/*", "--seeds", "0", "1"])
    chosen = [cell.name for cell in grid(options.tasks, options.seeds) if is_chosen(cell, options.only)]
    assert chosen == [f"sort/grpo/stale{s}/none/seed{seed}" for seed in (0, 1) for s in (0, 4)]


def test_samples_and_logprobs_are_of_weights_with_the_given_staleness() -> None:
    sampler, policy, _ = sampler_at(max_staleness=2)
    weights = []
    for version in range(5):
        if version:
            with torch.no_grad():
                policy.transformer.wte.weight.add_(0.1 * torch.randn(policy.transformer.wte.weight.shape))
            sampler.publish(policy)
        weights.append({name: tensor.clone() for name, tensor in policy.state_dict().items()})
        groups = sampler.groups()
        assert [group.entered_version for group in groups] == [max(0, version - 2)] * 16
        assert [group.slot for group in groups] == list(range(16 * version, 16 * version + 16))
    old = load_policy(resolve_model("tiny:digits"), gradient_checkpointing=False)
    old.load_state_dict(weights[2])
    for group in groups[:3]:
        for completion in group.completions:
            ids = [*group.prompt_token_ids.tolist(), *completion.token_ids.tolist()]
            expected = sequences_logprobs(old, [ids], torch.device("cpu"))[len(group.prompt_token_ids) - 1 :].numpy()
            np.testing.assert_allclose(completion.behavior_logprobs, expected, atol=1e-5)
            assert completion.versions == [(2, len(completion.token_ids))]


def test_completions_end_with_the_first_end_token_and_are_scored_as_in_the_learner() -> None:
    sampler, _, _ = sampler_at(max_staleness=0)
    tokenizer = load_tokenizer(resolve_model("tiny:digits"))
    lengths = set()
    for group in sampler.groups():
        prompt = tokenizer.decode(group.prompt_token_ids)
        assert len(group.completions) == 16
        for completion, reward in zip(group.completions, group.rewards_G, strict=True):
            ids = completion.token_ids.tolist()
            assert ids.index(0) == len(ids) - 1 if 0 in ids else len(ids) == 5
            assert completion.finish_reason == ("stop" if 0 in ids else "length")
            text, gold = tokenizer.decode(ids, skip_special_tokens=True), "".join(sorted(prompt[:-1]))
            right = sum(a == b for a, b in zip(text, gold, strict=False)) + (len(text) == 4)
            assert reward == pytest.approx(right / 5)
            lengths.add(len(ids))
    assert len(lengths) > 1


def test_greedy_completions_are_the_most_likely_tokens_and_exact_match_counts_correct_ones() -> None:
    run = Cell(task="sort", algorithm="grpo", max_staleness=0).run()
    path = resolve_model("tiny:digits")
    policy, tokenizer = load_policy(path, gradient_checkpointing=False), load_tokenizer(path)
    prompts = held_out_prompts(run)[:8]
    sampled_ids = [[0] if not i else c.token_ids.tolist() for i,
        c in enumerate(sample(policy, prompts, 1, 5, version=0, generator=None))]  # fmt: skip
    for prompt, ids in list(zip(prompts, sampled_ids, strict=True))[1:]:
        for t, token in enumerate(ids):
            logits = policy(torch.tensor([prompt.token_ids + ids[:t]])).logits[0, -1]
            assert token == int(logits.argmax())
    labeled = [
        msgspec.structs.replace(prompt, columns={"answer": tokenizer.decode(ids, skip_special_tokens=True)})
        for prompt, ids in zip(prompts, sampled_ids, strict=True)
    ]
    assert exact_match(policy, labeled, tokenizer, 5) == pytest.approx(7 / 8)


def test_held_out_prompts_are_new_to_the_run() -> None:
    run = Cell(task="arithmetic", algorithm="grpo", max_staleness=0, seed=2).run()
    trained = {row["prompt"] for row in make_rows("arithmetic", 4096, 2)}
    held_out = {prompt.prompt for prompt in held_out_prompts(run)}
    assert len(held_out) == 512 and not trained & held_out and len(trained) + 512 < NUM_TASK_PROMPTS


def test_a_truncated_line_is_ignored_and_the_next_cell_starts_a_new_line(tmp_path: Path) -> None:
    first, second, third = grid(["sort"], [0])[:3]
    results.append(tmp_path, trial_of(first, 0.1))
    results.append(tmp_path, trial_of(second, 0.2))
    path = tmp_path / results.RESULTS_FILE
    path.write_bytes(path.read_bytes()[:-20])
    results.append(tmp_path, trial_of(third, 0.3))
    assert results.read(tmp_path) == {first: trial_of(first, 0.1), third: trial_of(third, 0.3)}


def test_cells_with_other_settings_are_rejected(tmp_path: Path) -> None:
    cell = grid(["sort"], [0])[0]
    results.append(tmp_path, msgspec.structs.replace(trial_of(cell, 0.1), settings_hash="0123456789ab"))
    with pytest.raises(ConfigError, match=r"sort/grpo/stale0/none/seed0 of other settings \(0123456789ab, now .*--out"):
        results.read(tmp_path)


def test_the_summary_gives_means_and_deviations_over_seeds_and_the_headlines(tmp_path: Path) -> None:
    exact = {
        ("sort", "grpo", 0): (0.5, 0.7), ("sort", "grpo", 4): (0.4, 0.7), ("sort", "grpo", 8): (0.9, 0.9),
        (LARGE_STEPS, "grpo", 8): (0.4, 0.5), (LARGE_STEPS, "uncorrected", 8): (0.02, 0.0),
    }  # fmt: skip
    trials = {}
    for (task, algorithm, staleness), values in exact.items():
        for seed, value in enumerate(values):
            cell = Cell(task=task, algorithm=algorithm, max_staleness=staleness, seed=seed)
            trials[cell] = trial_of(cell, 0.0, value, value / 2)
    summary = summarize(trials)
    assert summary["async_4_minus_sync"] == pytest.approx(-0.05)
    assert (summary["stale8_clipped"], summary["stale8_uncorrected"]) == pytest.approx((0.45, 0.01))
    row = next(row for row in summary["table"] if (row["task"], row["max_staleness"]) == ("sort", 0))
    assert (row["best_mean"], row["best_std"]) == pytest.approx((0.6, 0.02**0.5))
    assert row["final_by_seed"] == {"0": 0.25, "1": 0.35} and row["final_mean"] == pytest.approx(0.3)
    assert "0.600 ± 0.141" in as_text(summary) and "async_4_minus_sync: -0.050" in as_text(summary)
    assert {path.name for path in write_plots(trials, tmp_path)} == {
        "sort-staleness.png", "sort-curves.png", "sort-references.png",
    }  # fmt: skip
    assert all(path.stat().st_size > 5000 for path in tmp_path.iterdir())


def test_a_headline_with_missing_cells_is_none() -> None:
    cell = Cell(task="arithmetic", algorithm="grpo", max_staleness=4)
    summary = summarize({cell: trial_of(cell, 0.5)})
    assert summary["async_4_minus_sync"] is None and summary["stale8_clipped"] is None
    assert "async_4_minus_sync: not run" in as_text(summary)
