"""TRL's side of tests/bench/step_gpu.py: `python -m tests.bench.trl_step MODEL [--rounds N] …`. Requires trl.

    rows ─▶ the tensors that GRPOTrainer makes of a batch ─▶ its own compute_loss, backward ─▶ clipping, AdamW

As TRL's Trainer in bfloat16: float32 weights, passes under autocast. The gradients of a few rows in float32 are written
to MODEL/oracle.safetensors.
"""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from safetensors.torch import save_file
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from learner.config.learner import AUTO_TOKENS
from learner.policy.model_shape import shape_of
from learner.training.batch import BatchRow
from learner.training.metrics import train_flops
from learner.training.packing import Layout, pieces_of
from tests.bench import step_gpu
from tests.bench.step_gpu import CLIPS, GROUP_SIZE, measure, oracle_rows, rows_of, summarize

LEARNING_RATE = 1e-6


def main() -> None:
    path = Path(sys.argv[1])
    options = step_gpu.parse_options(sys.argv[2:])
    (size,) = options.sizes
    trainer = make_trainer(path)
    optimizer = torch.optim.AdamW(trainer.model.parameters(), lr=LEARNING_RATE, fused=True)
    answer: dict[str, Any] = {"attention": trainer.model.config._attn_implementation}
    oracle = path / "oracle.safetensors"
    rows = oracle_rows(size)
    autocast = trainer.accelerator.autocast
    trainer.accelerator.autocast = nullcontext
    loss = gradient(trainer, rows, num_rows=1)
    save_file({"loss": torch.tensor(loss)} | gradients_of(trainer.model), oracle)
    trainer.accelerator.autocast = autocast
    optimizer.zero_grad()
    loss = gradient(trainer, rows, num_rows=len(rows))
    answer["off_trl_float32"] = step_gpu.differences(loss, gradients_of(trainer.model), oracle)
    optimizer.zero_grad()
    for length in options.lengths:
        rows = rows_of(size, length)
        num_rows = max(1, AUTO_TOKENS // rows[0].num_tokens)
        measured = measure(
            lambda rows=rows, num_rows=num_rows: step(trainer, optimizer, rows, num_rows), options.rounds
        )
        packed = Layout(max_tokens=AUTO_TOKENS, is_packed=True, pair_cost=0.0)
        flops = train_flops(shape_of(trainer.model.config), pieces_of(rows, packed))
        answer[str(length)] = summarize(measured, rows, flops)
    print(json.dumps(answer))


def make_trainer(path: Path) -> GRPOTrainer:
    config = GRPOConfig(
        output_dir=str(path / "trl"), report_to="none", bf16=True, gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"}, per_device_train_batch_size=GROUP_SIZE, num_generations=GROUP_SIZE,
        beta=0.0, loss_type="dapo", epsilon=CLIPS["clip_low"], epsilon_high=CLIPS["clip_high"],
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=str(path), reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
        train_dataset=Dataset.from_list([{"prompt": "1"}] * GROUP_SIZE),
        processing_class=AutoTokenizer.from_pretrained(path),
    )  # fmt: skip
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = (
        trainer.args.steps_per_generation
    )  # its own divisor: num_items_in_batch
    return trainer


def step(trainer: GRPOTrainer, optimizer: torch.optim.Optimizer, rows: list[BatchRow], num_rows: int) -> None:
    gradient(trainer, rows, num_rows)
    trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def gradient(trainer: GRPOTrainer, rows: list[BatchRow], num_rows: int) -> float:
    """Add up the gradient of all rows, `num_rows` in a pass; returns the loss."""
    total = 0.0
    num_tokens = torch.tensor(float(sum(len(row.branch.token_ids) for row in rows)), device="cuda")
    for first in range(0, len(rows), num_rows):
        inputs = batch(rows[first : first + num_rows]) | {"num_items_in_batch": num_tokens}
        loss = trainer.compute_loss(trainer.model, inputs)
        trainer.accelerator.backward(loss)
        total += float(loss.detach())
    return total


def batch(rows: list[BatchRow]) -> dict[str, torch.Tensor]:
    """All of one length, so that nothing is padded."""

    def stacked(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.stack([torch.from_numpy(value) for value in values]).to("cuda", dtype)

    prompt_ids = stacked([row.prompt_token_ids for row in rows], torch.long)
    completion_ids = stacked([row.branch.token_ids for row in rows], torch.long)
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": torch.ones_like(prompt_ids),
        "completion_ids": completion_ids,
        "completion_mask": torch.ones_like(completion_ids),
        "advantages": torch.tensor([row.advantage for row in rows], device="cuda"),
        "old_per_token_logps": stacked([row.branch.behavior_logprobs for row in rows], torch.float32),
    }


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


if __name__ == "__main__":
    main()
