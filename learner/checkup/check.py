"""`learner check`: what a run would do, shown without training: its prompts as the model gets them, its rewards on right answers and
on noise, how much there is to do; then what the doctor sees, and with --trial how long it would take.

    config ─▶ prompts (first rows, their tokens) ─▶ rewards (processes as in the run) ─▶ course ─▶ doctor.py: servers, memory, disk ─▶ trial.py

It comes before everything else in the data's way, and changes nothing of the run.
"""

import math
from collections.abc import Iterator, Sequence
from statistics import fmean

import numpy as np

from learner.checkup.doctor import examine
from learner.checkup.trial import trial
from learner.config import LearnerRun
from learner.evaluation.questions import sets_of
from learner.material import Material
from learner.prompts.prompts import Prompt
from learner.report.trackers import refuse_absent
from learner.rewards.workers import GroupRewards, RewardWorkers
from protocol.checkup import Finding, ok, problem, problem_of, unknown
from protocol.errors import ConfigError, RewardError, SlipstreamError

NUM_SHOWN = 3
NUM_RATED = 8
NUM_NOISY = 4
"""Completions of noise for each prompt that is rated."""
MAX_CHARACTERS = 400
GOLD_COLUMN = "answer"
STARTUP_S = 60.0


def check(run: LearnerRun, *, with_trial: bool = False) -> Iterator[Finding]:
    """Look at everything, what needs a server last, and what changes its weights, a trial, only where all before is well."""
    has_problem = False
    for finding in look(run):
        has_problem |= finding.verdict == "problem"
        yield finding
    if not with_trial:
        yield unknown("time", "not measured; --trial takes the first steps with a server that nobody uses")
    elif has_problem:
        yield unknown("time", "not measured, for the problems above")
    else:
        yield from trial(run.in_effect())


def look(run: LearnerRun) -> Iterator[Finding]:
    """Without changing anything."""
    note = run.note_on_idle_keys()
    yield ok("config", note or "no key contradicts another, none is idle")
    try:
        refuse_absent(run.learner.report.trackers)
    except ConfigError as error:
        yield problem_of("trackers", error, "install them, or leave them out")
    run, material = run.in_effect(), Material(run.in_effect())
    try:
        prompts = material.prompts
    except SlipstreamError as error:
        yield problem_of("prompts", error, "correct learner.data")
    else:
        yield from of_prompts(material)
        if run.learner.environment.is_used:
            yield unknown("rewards", f"they are of {run.learner.environment.named}, which answers only a policy")
        else:
            yield from of_rewards(material, [prompts.prompt_at(place) for place in range(min(NUM_RATED, len(prompts)))])
        yield course(run, len(prompts))
    if run.learner.evaluation.every_steps:
        yield from of_evaluation(material)
    yield from examine(run)


def of_prompts(material: Material) -> Iterator[Finding]:
    """The first rows with every special token, and what often is wrong with them."""
    prompts, run, tokenizer = material.prompts, material.run, material.tokenizer
    row, length = prompts.longest()
    yield ok("prompts", f"{len(prompts):,} of {prompts.name}, the longest of {length:,} tokens in row {row}")
    for place in range(min(NUM_SHOWN, len(prompts))):
        prompt = prompts.prompt_at(place)
        text, count = repr(tokenizer.decode(prompt.token_ids)), len(prompt.token_ids)
        if len(text) > MAX_CHARACTERS:
            text = f"{text[: MAX_CHARACTERS // 2]} … {text[-MAX_CHARACTERS // 2 :]}"
        yield ok(f"row {prompt.prompt_id}", f"{count} tokens: {text}")
    room = getattr(material.model_config.get_text_config(), "max_position_embeddings", None)
    needed = length + run.learner.sampling.max_tokens
    if room is not None and needed > room:
        yield problem(
            "prompts",
            f"the longest and learner.sampling.max_tokens are {needed:,} tokens, the model knows {room:,}",
            "lower max_tokens, or set learner.data.max_prompt_tokens and too_long",
        )


def of_rewards(material: Material, prompts: Sequence[Prompt]) -> Iterator[Finding]:
    """What each function says of right answers, if the data has any, and of noise."""
    config = material.run.learner.reward
    try:
        with RewardWorkers(config) as workers:
            noisy = [_rated(material, workers, prompt, _noise(material, prompt)) for prompt in prompts]
            gold = [
                _rated(material, workers, prompt, [str(prompt.columns[GOLD_COLUMN])])
                for prompt in prompts
                if prompt.columns.get(GOLD_COLUMN) is not None
            ]
    except RewardError as error:
        yield problem_of("rewards", error, "correct learner.reward.functions")
        return
    for message in dict.fromkeys(one.message for group in [*gold, *noisy] for one in group.functions if one.message):
        yield problem_of("rewards", RewardError(message), "correct the function")
    for place, name in enumerate(config.names):
        of_noise = _mean([value for group in noisy for value in group.functions[place].rewards])
        of_gold = _mean([value for group in gold for value in group.functions[place].rewards])
        yield ok("rewards", f"{name}: {of_gold} for the column {GOLD_COLUMN!r}, {of_noise} for noise")
    if not gold:
        yield unknown(
            "rewards",
            f"none of the first {len(prompts)} prompts has an {GOLD_COLUMN!r}, so no right answer could be rated",
        )
        return
    right, wrong = ([one for group in groups for one in group.rewards if one is not None] for groups in (gold, noisy))
    if right and wrong and fmean(right) <= fmean(wrong):
        yield unknown(
            "rewards",
            f"right answers are worth no more than noise, {fmean(right):.3g} and {fmean(wrong):.3g} in all: is the reward meant so?",
        )


def course(run: LearnerRun, num_prompts: int) -> Finding:
    """What the run will do."""
    config = run.learner
    num_groups, num_completions = config.steps * config.groups_per_step, config.sampling.num_completions
    num_turns = config.environment.max_turns if config.environment.is_used else 1
    tokens = num_groups * num_completions * num_turns * config.sampling.max_tokens
    return ok(
        "course",
        f"{config.steps:,} steps of {config.groups_per_step:,} groups of {num_completions:,} completions: each prompt "
        f"{num_groups / num_prompts:,.3g} times, {num_groups * num_completions:,} completions, at most {tokens:,} tokens to sample, none "
        f"trained on when more than {config.staleness_bound} versions old",
    )


def of_evaluation(material: Material) -> Iterator[Finding]:
    """What will be asked while the run trains, and how often."""
    try:
        sets = sets_of(material)
    except SlipstreamError as error:
        yield problem_of("evaluation", error, "correct learner.evaluation")
        return
    for questions in sets:
        config = questions.config
        times = math.ceil(material.run.learner.steps / config.every_steps) + config.at_start
        each = "greedy" if config.temperature == 0 else f"{config.num_samples:,} samples each"
        of_set = f"{questions.set_name}: " if questions.set_name else ""
        yield ok(
            "evaluation",
            f"{of_set}{len(questions.prompts):,} prompts of {questions.name}, {each}, asked {times:,} times of {questions.url}",
        )


def _rated(material: Material, workers: RewardWorkers, prompt: Prompt, texts: list[str]) -> GroupRewards:
    config, tokenizer = material.run.learner.reward, material.tokenizer
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    return workers.submit(prompt, texts, ids).result(STARTUP_S + len(config.functions) * config.timeout_s)


def _noise(material: Material, prompt: Prompt) -> list[str]:
    """Tokens by chance, the same at every call."""
    generator = np.random.default_rng(prompt.prompt_id)
    num_tokens = min(material.run.learner.sampling.max_tokens, 64)
    ids = generator.integers(0, len(material.tokenizer), (NUM_NOISY, num_tokens))
    return list(material.tokenizer.batch_decode(ids.tolist(), skip_special_tokens=True))


def _mean(values: Sequence[float | None]) -> str:
    scored = [value for value in values if value is not None]
    return f"{fmean(scored):.3g}" if scored else "nothing"
