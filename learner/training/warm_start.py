"""Supervised warm start: cross-entropy on the data's answers, before the first weight sync of a new run.

    prompts of the data ─▶ answer + end ─▶ rows ─▶ micro-batches ─▶ cross-entropy ─▶ AdamW of its own

Runs after the policy is loaded and before the reference, the server and the checkpoints read its weights.
Invariant: up to rounding, the result does not depend on the number of ranks or the size of the micro-batches.
It depends only on the weights, the data, the seed and the config.

Suffixes: B answers, T tokens of the longest.
"""

import logging
import math

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from learner.config import LearnerConfig
from learner.environments.episode import UNKNOWN_VERSION, TokenSequence
from learner.forward.logprobs import token_logprobs
from learner.prompts.prompts import Prompt
from learner.rewards.builtin.answers import golds_of
from learner.run_inputs import RunInputs
from learner.training.batch import BatchRow, MicroBatch
from learner.training.distributed import clear_gradients, gradient_sync, my_batches
from learner.training.optimizer import NotFiniteError, make_optimizer
from protocol.console import PROGRESS_EVERY_S, output_mode
from protocol.errors import DataError

log = logging.getLogger(__name__)


def warm_start(run_inputs: RunInputs, config: LearnerConfig, accelerator: Accelerator, policy: nn.Module) -> float:
    """Train for `warm_start.steps` steps; return the last step's mean loss per token.

    `config` is the one that fits the memory, `policy` is as prepared by accelerate. Every rank reads the data and
    takes its share of the rows.

    Raises:
        DataError: The data has no usable answers, or the tokenizer has no end-of-sequence token.
        NotFiniteError: The gradient norm is NaN or inf.
    """
    settings, prompts, tokenizer = config.warm_start, run_inputs.prompts, run_inputs.tokenizer
    end = check_answers(run_inputs, config)
    optimizer = make_optimizer(policy, config.optimizer, settings.learning_rate)
    loss = 0.0
    steps = tqdm(
        range(settings.steps),
        "warm start",
        disable=not (accelerator.is_main_process and output_mode().has_bars),
        mininterval=PROGRESS_EVERY_S,
    )
    for step in steps:
        slots = range(step * settings.rows_per_step, (step + 1) * settings.rows_per_step)
        rows = answer_rows([prompts.prompt_at(slot) for slot in slots], tokenizer, config, end)
        batches = my_batches(accelerator, policy, rows, config, f"step {step + 1} of the warm start")
        loss = _train_on_answers(accelerator, policy, batches)
        grad_norm = float(accelerator.clip_grad_norm_(policy.parameters(), config.optimizer.max_grad_norm) or 0.0)
        if not math.isfinite(grad_norm):
            raise NotFiniteError(
                f"step {step + 1} of the warm start: the gradient norm is {grad_norm} and the loss is {loss:g}; lower "
                "learner.warm_start.learning_rate"
            )
        optimizer.step()
        clear_gradients(policy, optimizer)
        steps.set_postfix(loss=f"{loss:.3f}", refresh=False)
    log.info("completed the warm start (%d steps, last loss %.3f per token)", settings.steps, loss)
    return loss


def check_answers(run_inputs: RunInputs, config: LearnerConfig) -> int:
    """Check every answer of the warm start, and return the token that ends them.

    Raises:
        DataError: The data has no usable answers, or the tokenizer has no end-of-sequence token.
    """
    settings, prompts, tokenizer = config.warm_start, run_inputs.prompts, run_inputs.tokenizer
    end: int | None = prompts.template.turn_end() if prompts.are_conversations else tokenizer.eos_token_id
    if end is None:
        raise DataError(
            f"learner.warm_start.steps = {settings.steps} needs a tokenizer with an end-of-sequence token, but this "
            "model's has none; set learner.warm_start.steps to 0, or set `model` to another one"
        )
    for slot in range(min(settings.steps * settings.rows_per_step, len(prompts))):
        _answer_ids(prompts.prompt_at(slot), tokenizer, config, end)
    return end


def answer_rows(
    prompts: list[Prompt], tokenizer: PreTrainedTokenizerBase, config: LearnerConfig, end: int
) -> list[BatchRow]:
    """Return one row per prompt, with its answer and the token `end` as completion.

    All tokens have the same weight. Reasoning that the prompt has opened ends before the answer.

    Raises:
        DataError: An answer is missing, or longer than a completion may be.
    """
    answers = [_answer_ids(prompt, tokenizer, config, end) for prompt in prompts]
    num_tokens = sum(map(len, answers))
    return [
        BatchRow(
            prompt_token_ids=np.array(prompt.token_ids, np.int32),
            branch=TokenSequence(
                token_ids=token_ids,
                behavior_logprobs=np.zeros(len(token_ids), np.float32),
                versions=[(0, len(token_ids))],
                finish_reason="stop",
            ),
            group=i,
            episode=i,
            advantage=1.0,
            weight=1 / num_tokens,
            entered_version=UNKNOWN_VERSION,
        )
        for i, (prompt, token_ids) in enumerate(zip(prompts, answers, strict=True))
    ]


def _answer_ids(prompt: Prompt, tokenizer: PreTrainedTokenizerBase, config: LearnerConfig, end: int) -> np.ndarray:
    column, max_tokens = config.warm_start.answer_column, config.sampling.max_tokens
    golds = golds_of(prompt.columns.get(column))
    if not golds:
        raise DataError(
            f"learner.warm_start.steps = {config.warm_start.steps} needs answers, but row {prompt.prompt_id} of the "
            f"data has none in column {column!r}; its other columns are: {', '.join(prompt.columns) or 'none'}. Set "
            "learner.warm_start.answer_column to the column with the answers, or learner.warm_start.steps to 0"
        )
    token_ids = tokenizer(prompt.completion_of(golds[0]), add_special_tokens=False)["input_ids"]
    if len(token_ids) >= max_tokens:
        raise DataError(
            f"the answer in row {prompt.prompt_id} of the data has {len(token_ids)} tokens plus an end token, more "
            f"than learner.sampling.max_tokens = {max_tokens}; raise it, or remove such rows from the data"
        )
    return np.array([*token_ids, end], np.int32)


def _train_on_answers(accelerator: Accelerator, policy: nn.Module, batches: list[MicroBatch]) -> float:
    """Accumulate the gradient of the step's mean cross-entropy; return that mean."""
    total = torch.zeros((), device=accelerator.device)
    for i, batch in enumerate(batches):
        with gradient_sync(accelerator, policy, is_last=i == len(batches) - 1):
            loss = _cross_entropy(policy, batch)
            accelerator.backward(loss * accelerator.num_processes)  # averaged over ranks; the loss is a share
        total += loss.detach()
    return float(accelerator.reduce(total, "sum"))


def _cross_entropy(policy: nn.Module, batch: MicroBatch) -> torch.Tensor:
    """Return this micro-batch's share of the step's mean -log p over answer tokens."""
    logprobs_BT, _ = token_logprobs(policy, batch.pack, temperature=1.0)
    return -(torch.where(batch.mask_BT, logprobs_BT, 0.0) * batch.weights_B.unsqueeze(1)).sum()
