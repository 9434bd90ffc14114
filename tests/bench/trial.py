"""Run one cell of the learning benchmark in this process: the learner's step on groups of a fixed staleness.

sampler ─▶ train_on (learner/training/step.py) ─▶ publish ─▶ every EVALUATE_EVERY steps: held-out exact match
"""

import statistics
import time
from collections import defaultdict
from functools import cache

import msgspec
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from learner.config import LearnerRun
from learner.policy.model import load_tokenizer
from learner.prompts.prompts import Prompt
from learner.prompts.tasks import make_rows
from learner.run_inputs import RunInputs
from learner.training.metrics import StepTimer, group_metrics
from learner.training.policy_trainer import make_trainer
from learner.training.step import train_on
from protocol.model_files import resolve_model
from tests.bench.cell import NUM_TASK_PROMPTS, Cell
from tests.bench.sampler import StaleSampler, exact_match

EVALUATE_EVERY = 25
NUM_HELD_OUT = 512
WATCHED = {
    "reward/exact_match": "sampled_exact_match",
    "policy/entropy": "entropy",
    "policy/behavior_kl": "behavior_kl",
    "loss/clipped_frac": "clipped_frac",
    "optim/grad_norm": "grad_norm",
    "reference/kl": "reference_kl",
}
"""Metrics of the step in a curve, as means since the previous point."""


class Point(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One evaluation."""

    step: int
    exact_match: float
    """Greedy exact match on held-out prompts."""
    sampled_exact_match: float | None = None
    """Exact match of the completions trained on since the previous point."""
    entropy: float | None = None
    behavior_kl: float | None = None
    clipped_frac: float | None = None
    grad_norm: float | None = None
    reference_kl: float | None = None


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one cell."""

    cell: Cell
    settings_hash: str
    seconds: float
    curve: list[Point]

    @property
    def final(self) -> float:
        return self.curve[-1].exact_match

    @property
    def best(self) -> float:
        return max(point.exact_match for point in self.curve)


def run_trial(cell: Cell, *, last_step: int | None = None) -> Trial:
    """Train one cell to its end, or to `last_step`."""
    started = time.monotonic()
    run = cell.run()
    config = run.learner
    accelerator = cpu_accelerator()
    set_seed(run.seed)
    run_inputs = RunInputs(run)
    trainer = make_trainer(run_inputs, accelerator, is_new=True)
    policy, tokenizer = accelerator.unwrap_model(trainer.policy), run_inputs.tokenizer
    held_out = held_out_prompts(run)
    sampler = StaleSampler(policy, run_inputs.prompts, tokenizer, config, run.seed)
    curve = [Point(step=0, exact_match=exact_match(policy, held_out, tokenizer, config.sampling.max_tokens))]
    window: dict[str, list[float]] = defaultdict(list)
    num_steps = last_step or config.steps
    for step in range(1, num_steps + 1):
        groups = sampler.groups()
        metrics = train_on(trainer, groups, step - 1, StepTimer())
        metrics |= group_metrics(groups, step - 1)
        metrics |= trainer.after_step(step, metrics)
        sampler.publish(policy)
        for metric, name in WATCHED.items():
            window[name] += [metrics[metric]] if metric in metrics else []
        if step % EVALUATE_EVERY == 0 or step == num_steps:
            exact = exact_match(policy, held_out, tokenizer, config.sampling.max_tokens)
            means = {name: statistics.fmean(values) for name, values in window.items() if values}
            curve.append(Point(step=step, exact_match=exact, **means))
            window.clear()
    accelerator.free_memory()  # otherwise it keeps every prepared model
    return Trial(cell=cell, settings_hash=cell.settings_hash, seconds=time.monotonic() - started, curve=curve)


@cache
def cpu_accelerator() -> Accelerator:
    """Return the accelerator of this process, with one thread."""
    torch.set_num_threads(1)
    return Accelerator(cpu=True)


def held_out_prompts(run: LearnerRun) -> list[Prompt]:
    """Return prompts of the run's task that the run does not train on."""
    data, tokenizer = run.learner.data, load_tokenizer(resolve_model(run.model))
    assert data.task is not None and data.num_prompts is not None
    trained = {row["prompt"] for row in make_rows(data.task, data.num_prompts, run.seed, num_digits=data.num_digits)}
    everything = make_rows(data.task, NUM_TASK_PROMPTS, run.seed, num_digits=data.num_digits)
    rows = [row for row in everything if row["prompt"] not in trained][:NUM_HELD_OUT]
    return [
        Prompt(prompt_id=i, prompt=row["prompt"], token_ids=tokenizer(row["prompt"])["input_ids"], columns=row)
        for i, row in enumerate(rows)
    ]
