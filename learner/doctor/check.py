"""`slipstream check`: a preview of a run without training, from its prompts to the time it would take.

    config ─▶ prompts (first rows, tokens) ─▶ rewards (of right answers and noise, in workers) ─▶ workload
           ─▶ doctor.py: servers, memory, disk ─▶ trial

The checks do not change the run. With --trial, the first steps run in a temporary directory.
A trial needs an idle server, which keeps the trial's weights until the run's first weight sync.
"""

import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from statistics import fmean, median

import msgspec
import numpy as np

from learner.algorithm.plug_in import check_plug_ins
from learner.config import LearnerRun
from learner.doctor.doctor import examine
from learner.doctor.self_test import connected, in_directory
from learner.evaluation.eval_sets import sets_of
from learner.prompts.prompts import Prompt
from learner.report.summary import duration, read_metrics
from learner.report.trackers import refuse_absent
from learner.rewards.builtin.answers import golds_of
from learner.rewards.call import TrainerState
from learner.rewards.workers import GroupRewards, RewardWorkers
from learner.run_inputs import RunInputs
from learner.training.metrics import StepTimer, group_metrics
from learner.training.step import train_on
from learner.training.warm_start import check_answers
from protocol.doctor import Finding, ok, problem, problem_of, unknown
from protocol.errors import ConfigError, DataError, RewardError, SlipstreamError
from protocol.signals import Interrupt

NUM_SHOWN = 3
NUM_RATED = 8
NUM_COMPLETIONS = 4
"""Number of completions of a scored prompt. Functions may need several, as in training."""
MAX_CHARACTERS = 400
GOLD_COLUMN = "answer"
NUM_STEPS = 8
NUM_COLD = 3
"""Number of first steps left out of the timing.

They wait for the first groups and warm caches.
"""
Metrics = list[dict[str, float]]


def check(run: LearnerRun, *, with_trial: bool = False) -> Iterator[Finding]:
    """Yield the findings of all checks, and of a trial only if there is no problem.

    Checks that need a server are last. A trial changes the server's weights.
    """
    has_problem = False
    for finding in preview(run):
        has_problem |= finding.verdict == "problem"
        yield finding
    if not with_trial:
        yield unknown("time", "not measured; --trial runs the first steps on an idle server")
    elif has_problem:
        yield unknown("time", "not measured because of the problems above")
    else:
        yield from trial(run.in_effect())


def preview(run: LearnerRun) -> Iterator[Finding]:
    """Yield the findings of all checks that change nothing."""
    note = run.idle_keys_note()
    yield ok("config", note or "no conflicting and no unused keys")
    try:
        refuse_absent(run.learner.report.trackers)
    except ConfigError as error:
        yield problem_of("trackers", error, "install them, or remove them from learner.report.trackers")
    try:
        check_plug_ins(run.learner)
    except ConfigError as error:
        yield problem_of("plug-ins", error, "fix the function")
    run, run_inputs = run.in_effect(), RunInputs(run.in_effect())
    try:
        prompts = run_inputs.prompts
    except SlipstreamError as error:
        yield problem_of("prompts", error, "correct learner.data")
    else:
        yield from prompt_findings(run_inputs)
        if run.learner.environment.is_used:
            yield unknown("rewards", f"not checked: {run.learner.environment.named} rewards only episodes of a policy")
        else:
            yield from reward_findings(run_inputs, [prompts.prompt_at(i) for i in range(min(NUM_RATED, len(prompts)))])
        if run.learner.warm_start.steps:
            yield warm_start_finding(run_inputs)
        yield workload(run, len(prompts))
    if run.learner.evaluation.every_steps:
        yield from evaluation_findings(run_inputs)
    yield from examine(run)


def prompt_findings(run_inputs: RunInputs) -> Iterator[Finding]:
    """Yield the first rows with all special tokens, and a problem if any is too long."""
    prompts, run, tokenizer = run_inputs.prompts, run_inputs.run, run_inputs.tokenizer
    row, length = prompts.longest()
    yield ok("prompts", f"{len(prompts):,} prompts in {prompts.name}; the longest, in row {row}, has {length:,} tokens")
    for i in range(min(NUM_SHOWN, len(prompts))):
        prompt = prompts.prompt_at(i)
        text, count = repr(tokenizer.decode(prompt.token_ids)), len(prompt.token_ids)
        if len(text) > MAX_CHARACTERS:
            text = f"{text[: MAX_CHARACTERS // 2]} … {text[-MAX_CHARACTERS // 2 :]}"
        yield ok(f"row {prompt.prompt_id}", f"{count} tokens: {text}")
    room = getattr(run_inputs.model_config.get_text_config(), "max_position_embeddings", None)
    needed = length + run.learner.sampling.max_tokens
    if room is not None and needed > room:
        yield problem(
            "prompts",
            f"the longest prompt plus learner.sampling.max_tokens is {needed:,} tokens, more than the model's {room:,}",
            "lower max_tokens, or set learner.data.max_prompt_tokens and overlong_prompts",
        )


def reward_findings(run_inputs: RunInputs, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """Yield each function's mean reward for right answers, if any, and for noise."""
    config = run_inputs.run.learner.reward
    try:
        # A service that is down is a finding, and no reason to wait.
        with RewardWorkers(msgspec.structs.replace(config, unreachable_s=0.0)) as workers:
            noisy = [_rated(run_inputs, workers, prompt, _noise(run_inputs, prompt)) for prompt in prompts]
            gold = [
                _rated(run_inputs, workers, prompt, texts) for prompt in prompts if (texts := _right_answers(prompt))
            ]
    except RewardError as error:
        yield problem_of("rewards", error, "correct learner.reward.functions")
        return
    for message in dict.fromkeys(one.message for group in [*gold, *noisy] for one in group.functions if one.message):
        yield problem_of("rewards", RewardError(message), "fix the function")
    for i, name in enumerate(config.names):
        of_noise = _mean([value for group in noisy for value in group.functions[i].rewards])
        of_gold = _mean([value for group in gold for value in group.functions[i].rewards])
        yield ok("rewards", f"{name}: {of_gold} for the column {GOLD_COLUMN!r}, {of_noise} for noise")
    if not gold:
        yield unknown(
            "rewards",
            f"none of the first {len(prompts)} prompts has an {GOLD_COLUMN!r}, so right answers could not be rated",
        )
        return
    right, wrong = ([one for group in groups for one in group.rewards if one is not None] for groups in (gold, noisy))
    if right and wrong and fmean(right) <= fmean(wrong):
        yield unknown(
            "rewards",
            f"right answers score no higher than noise ({fmean(right):.3g} and {fmean(wrong):.3g} in total); check "
            "that this is intended",
        )


def warm_start_finding(run_inputs: RunInputs) -> Finding:
    """Return whether the data has the answers of the warm start."""
    config = run_inputs.run.learner
    try:
        check_answers(run_inputs, config)
    except DataError as error:
        return problem_of("warm start", error, "correct learner.warm_start")
    return ok("warm start", f"the column {config.warm_start.answer_column!r} has an answer for each of its prompts")


def workload(run: LearnerRun, num_prompts: int) -> Finding:
    """Return the amount of work in the run."""
    config = run.learner
    num_groups, num_completions = config.steps * config.groups_per_step, config.sampling.group_size
    num_turns = config.environment.max_turns if config.environment.is_used else 1
    tokens = num_groups * num_completions * num_turns * config.sampling.max_tokens
    return ok(
        "course",
        f"{config.steps:,} steps of {config.groups_per_step:,} groups of {num_completions:,} completions: each prompt "
        f"{num_groups / num_prompts:,.3g} times, {num_groups * num_completions:,} completions, at most {tokens:,} "
        f"sampled tokens, at most {config.staleness_bound} versions behind",
    )


def evaluation_findings(run_inputs: RunInputs) -> Iterator[Finding]:
    """Yield the prompts of each evaluation set and how often the run samples them."""
    try:
        sets = sets_of(run_inputs)
    except SlipstreamError as error:
        yield problem_of("evaluation", error, "correct learner.evaluation")
        return
    for eval_set in sets:
        config = eval_set.config
        times = math.ceil(run_inputs.run.learner.steps / config.every_steps) + config.at_start
        each = "greedy" if config.temperature == 0 else f"{config.num_samples:,} samples each"
        of_set = f"{eval_set.set_name}: " if eval_set.set_name else ""
        yield ok(
            "evaluation",
            f"{of_set}{len(eval_set.prompts):,} prompts of {eval_set.name}, {each}, evaluated {times:,} times at "
            f"{eval_set.url}",
        )


def _rated(run_inputs: RunInputs, workers: RewardWorkers, prompt: Prompt, texts: list[str]) -> GroupRewards:
    state = TrainerState(global_step=0, max_steps=run_inputs.run.learner.steps)
    ids = [run_inputs.tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return workers.submit(prompt, texts, ids, state).result()  # the workers end every call at its deadline


def _right_answers(prompt: Prompt) -> list[str]:
    """Return completions that give the first gold answer."""
    golds = golds_of(prompt.columns.get(GOLD_COLUMN))[:1]
    return [prompt.completion_of(gold) for gold in golds * NUM_COMPLETIONS]


def _noise(run_inputs: RunInputs, prompt: Prompt) -> list[str]:
    """Return random completions, the same in every call."""
    generator = np.random.default_rng(prompt.prompt_id)
    num_tokens = min(run_inputs.run.learner.sampling.max_tokens, 64)
    ids = generator.integers(0, len(run_inputs.tokenizer), (NUM_COMPLETIONS, num_tokens))
    return list(run_inputs.tokenizer.batch_decode(ids.tolist(), skip_special_tokens=True))


def _mean(values: Sequence[float | None]) -> str:
    scored = [value for value in values if value is not None]
    return f"{fmean(scored):.3g}" if scored else "nothing"


def trial(run: LearnerRun) -> Iterator[Finding]:
    """Run the first steps; yield the parity of server and learner, and the time."""
    with tempfile.TemporaryDirectory(prefix="slipstream-trial-") as directory:
        try:
            with redirect_stdout(sys.stderr):  # log lines are not findings
                metrics = first_steps(in_directory(run, Path(directory) / "run"))
        except SlipstreamError as error:
            yield problem_of("trial", error, "fix this error, or stop other runs on the server")
            return
    yield from findings_of(run, metrics)


def first_steps(run: LearnerRun) -> Metrics:
    """Run the first steps and return their metrics. Raises SlipstreamError."""
    with connected(run, "slipstream check") as (trainer, controller):
        trainer.set_kl_coef(0, None)
        interrupt = Interrupt()  # not entered: Ctrl-C ends the trial at once
        num_steps = min(NUM_STEPS, run.learner.steps)
        timer = StepTimer()
        for step in range(1, num_steps + 1):
            with timer("wait_for_batch"):
                groups = controller.next_batch(step - 1, interrupt)
            assert groups is not None
            metrics = train_on(trainer, groups, step - 1, timer)
            mismatches = trainer.mismatch.pop_by_server(trainer.accelerator, groups)
            with timer("weight_sync"):
                metrics |= controller.sync_weights(step, groups)
            metrics |= group_metrics(groups, step - 1)
            metrics |= trainer.after_step(step, metrics)
            controller.record(step, groups, metrics, mismatches, timer)
        controller.finish(num_steps, interrupt)
    return read_metrics(Path(run.run_dir))


def findings_of(run: LearnerRun, metrics: Metrics) -> Iterator[Finding]:
    if mismatches := _present(metrics, "parity/abs_logprob") + _present(metrics, "policy/mismatch_abs_logprob"):
        yield ok("parity", f"mean |Δ logprob| of at most {max(mismatches):.1e} between server and learner")
    warm = metrics[NUM_COLD:] or metrics[-1:]
    step_s = median(_present(warm, "time/step"))
    speed = fmean(_present(warm, "perf/completion_tokens_per_s"))
    length = fmean(_present(metrics, "rollout/completion_length_mean"))
    idle = {
        "learner": _present(warm, "perf/learner_idle_frac"),
        "server": _present(warm, "perf/server_idle_frac"),
    }
    waits = ", ".join(f"the {side} idle for {fmean(shares):.0%}" for side, shares in idle.items() if shares)
    without = " and the warm start" if run.learner.warm_start.steps else ""
    yield ok(
        "time",
        f"{run.learner.steps:,} steps of {step_s:.2f} s, about {duration(run.learner.steps * step_s)} without "
        f"evaluations{without}; {speed:,.0f} completion tokens/s, {length:,.0f} tokens each, {waits} (median of "
        f"{len(warm)} steps)",
    )


def _present(metrics: Metrics, name: str) -> list[float]:
    return [line[name] for line in metrics if name in line]
