"""Run one evaluation: rewards with confidence intervals, and the change from the previous evaluation.

    EvalSet ─▶ openai_client.py, or episodes.py ─▶ rewards as in training, as answers arrive ─▶ Evaluation

Called by `slipstream evaluate`, and during training by background.py. It uses the OpenAI API of a server, so
training continues, and `vllm serve` with a checkpoint works too.
Invariant: every prompt is rated once, or an error explains why there is no evaluation.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np

from learner.config import LearnerRun
from learner.evaluation.episodes import ends_of, episodes_of, open_players, rate_played
from learner.evaluation.eval_sets import EvalSet, sets_of
from learner.evaluation.openai_client import PromptAnswers, ask_all, completions_of
from learner.evaluation.results import (
    FILE,
    Evaluation,
    estimate,
    is_binary,
    majority_values,
    pass_at,
    problem_means,
    record_evaluation,
)
from learner.prompts.reasoning import texts_of
from learner.rewards.call import TrainerState
from learner.rewards.workers import GroupRewards, RewardWorkers
from learner.run_inputs import RunInputs
from learner.servers.loop_thread import LoopThread
from protocol.errors import ConfigError, RewardError, SlipstreamError

log = logging.getLogger(__name__)

Rating = Future[GroupRewards] | asyncio.Future[GroupRewards]
SCORING_S = 60.0
"""Extra time to rate a group, on top of the deadlines of the reward functions, in seconds."""


def evaluate(run: LearnerRun) -> list[Evaluation]:
    """Sample, rate, compare and record each set. Raises SlipstreamError."""
    if not run.learner.reward.functions:
        raise ConfigError(
            "learner.reward.functions = [] rates no answer; add a function, with learner.reward.only_logged = true to "
            "learn from the reference alone"
        )
    sets = sets_of(RunInputs(run))
    # Load the reward functions first: if one is broken, the server must not work for nothing.
    with RewardWorkers(run.learner.reward) as workers, ExitStack() as cleanup:
        loop = LoopThread("evaluation")
        cleanup.callback(loop.stop)
        open_players(sets, workers, loop, cleanup)
        work = ask_and_rate_all(sets, workers, {}, lambda index, answered: None)
        made = loop.submit(work).result()
    return [_recorded(Path(run.run_dir) / FILE, one) for one in made]


def _recorded(path: Path, made: Evaluation) -> Evaluation:
    """Record an evaluation. If that fails, its result, which took minutes, is still printed."""
    try:
        return record_evaluation(path, made)
    except (SlipstreamError, OSError) as error:
        log.warning("the evaluation could not be recorded: %s", error)
        return made


async def ask_and_rate_all(
    sets: Sequence[EvalSet],
    workers: RewardWorkers,
    known: Mapping[int, PromptAnswers],
    when_answered: Callable[[int, PromptAnswers], None],
    *,
    of_run: str | None = None,
) -> list[Evaluation]:
    """Evaluate one set after the other. Prompt indices count through all sets.

    `of_run`: training run whose policy alone may answer. It also hides the progress bar.
    """
    made, first = [], 0
    for eval_set in sets:
        end = first + len(eval_set.prompts)
        of_set = {index - first: answered for index, answered in known.items() if first <= index < end}
        made.append(await ask_and_rate(eval_set, workers, of_set, _counted_from(first, when_answered), of_run=of_run))
        first = end
    return made


def _counted_from(
    first: int, when_answered: Callable[[int, PromptAnswers], None]
) -> Callable[[int, PromptAnswers], None]:
    return lambda index, answered: when_answered(first + index, answered)


async def ask_and_rate(
    eval_set: EvalSet,
    workers: RewardWorkers,
    known: Mapping[int, PromptAnswers],
    when_answered: Callable[[int, PromptAnswers], None],
    *,
    of_run: str | None = None,
) -> Evaluation:
    """Evaluate one set.

    Args:
        known: Answers by prompt index, which are not requested again.
        when_answered: Called with every other answer.

    Raises:
        EvaluationError: The server does not answer, or not as requested.
        RewardError: A reward function failed.
    """
    started = time.monotonic()
    ratings = {index: _submit(eval_set, workers, index, answered) for index, answered in known.items()}

    def take(index: int, answered: PromptAnswers) -> None:
        when_answered(index, answered)
        ratings[index] = _submit(eval_set, workers, index, answered)

    missing = [index for index in range(len(eval_set.prompts)) if index not in known]
    answer_to = completions_of if eval_set.player is None else episodes_of
    model, new = await ask_all(eval_set, missing, answer_to, take, of_run=of_run)
    answers = dict(known) | new
    rewards = [await _rated(eval_set, ratings[index]) for index in range(len(eval_set.prompts))]
    made = summarize_ratings(eval_set, model, [answers[index] for index in range(len(answers))], rewards)
    return msgspec.structs.replace(made, seconds=time.monotonic() - started)


def _submit(eval_set: EvalSet, workers: RewardWorkers, index: int, answered: PromptAnswers) -> "Rating":
    prompt, (version, _) = eval_set.prompts[index], answered.versions or (0, 0)
    state = TrainerState(global_step=max(version, 0), max_steps=eval_set.run.learner.steps)
    if answered.played is not None:
        return asyncio.ensure_future(rate_played(eval_set, workers, prompt, answered.played, state))
    texts_K, ids_K = _texts(eval_set, answered, eval_set.run.learner.reward.skip_special_tokens), answered.token_ids_K
    if ids_K is None:
        ids_K = [eval_set.tokenizer.encode(text, add_special_tokens=False) for text in texts_K]
    return workers.submit(prompt, texts_K, ids_K, state, built_in_completions=_texts(eval_set, answered, True))


def _texts(eval_set: EvalSet, answered: PromptAnswers, skips: bool) -> list[str]:
    """Return the texts, with or without special tokens, decoded as in training if the server returned tokens."""
    tokenizer = eval_set.tokenizer
    if answered.token_ids_K is not None:
        return texts_of(tokenizer, answered.token_ids_K, skips)
    texts_K = answered.texts_K
    for token in tokenizer.all_special_tokens if skips else ():
        texts_K = [text.replace(token, "") for text in texts_K]
    return texts_K


async def _rated(eval_set: EvalSet, rating: "Rating") -> GroupRewards:
    config = eval_set.run.learner.reward
    limit_s = SCORING_S + config.unreachable_s + len(eval_set.prompts) * len(config.functions) * config.timeout_s
    try:
        async with asyncio.timeout(limit_s):
            group = await (asyncio.wrap_future(rating) if isinstance(rating, Future) else rating)
    except TimeoutError as error:
        raise RewardError(
            f"answers were not rated within {limit_s:g} s; lower learner.reward.timeout_s ({config.timeout_s:g}), or "
            "raise learner.reward.num_workers"
        ) from error
    for function in group.functions:
        if function.outcome in ("failed", "unreachable"):
            raise RewardError(function.message or function.name)
        if function.outcome == "timed_out":
            log.warning("one prompt of the evaluation has no reward: %s", function.message)
    return group


def summarize_ratings(
    eval_set: EvalSet, model: str, answers: Sequence[PromptAnswers], rewards: Sequence[GroupRewards]
) -> Evaluation:
    run, config = eval_set.run, eval_set.config
    is_played = eval_set.player is not None
    ends, turns_mean = ends_of(answers) if is_played else ({}, None)
    values_PK = _table(group.rewards for group in rewards)
    by_name = {
        name: _table(group.functions[index].rewards for group in rewards)
        for index, name in enumerate(run.learner.reward.names)
    }
    is_finished_PK = np.array([answered.is_finished_K for answered in answers])
    versions = [answered.versions for answered in answers if answered.versions is not None]
    texts_PK = [
        [prompt.turn_start + text for text in _texts(eval_set, answered, True)]
        for prompt, answered in zip(eval_set.prompts, answers, strict=True)
    ]
    return Evaluation(
        time=time.time(),
        set_name=eval_set.set_name,
        data=eval_set.name,
        questions_digest=eval_set.digest,
        url=eval_set.url,
        model=model,
        versions=(min(low for low, _ in versions), max(high for _, high in versions)) if versions else None,
        num_prompts=len(answers),
        num_samples=config.num_samples,
        temperature=config.temperature,
        seconds=0.0,
        reward=estimate(values_PK),
        functions={name: estimate(table) for name, table in by_name.items()},
        pass_at={
            name: {
                str(k): found
                for k in _powers(config.num_samples)
                if (found := estimate(pass_at(k, table)[:, None])) is not None
            }
            for name, table in by_name.items()
            if config.num_samples > 1 and is_binary(table) and not np.isnan(table).all()
        },
        majority=estimate(majority_values(texts_PK, values_PK)[:, None])
        if config.num_samples > 2 and not is_played
        else None,
        reward_finished=estimate(np.where(is_finished_PK, values_PK, np.nan)),
        truncated_frac=ends["length"] / is_finished_PK.size if is_played else float(1 - is_finished_PK.mean()),
        length_mean=sum(answered.num_tokens for answered in answers) / is_finished_PK.size,
        ends=ends,
        turns_mean=turns_mean,
        rewards_P=[None if np.isnan(mean) else float(mean) for mean in problem_means(values_PK)],
    )


def _table(rows: Iterable[list[float | None]]) -> np.ndarray:
    return np.array([[np.nan if value is None else value for value in row] for row in rows], float)


def _powers(most: int) -> list[int]:
    """Return 1, 2, 4, … up to `most`, and `most` itself."""
    return sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})
