"""Measure the learner's step on a CPU: `python -m tests.bench.step [--json] [--rounds N] [--skip-half-b]`.

    useful_over_bare                    tokens/s of the learner's forward and backward pass ÷ those of transformers,
                                        with loss, on dense rows of one length without shared prefixes
    sharing_speedup_over_token_ratio    by group size and prompt length: speedup of computing each prompt once
                                        ÷ ratio of computed tokens
    branches_speedup_over_token_ratio   the same for episodes with several branches, whose prompts are a tree
    logits_peak_over_chunk              peak memory of the head, without inputs and outputs, ÷ that of one tile
    half_b                              a step of 16,384 tokens of a random Qwen2.5-0.5B: peak memory, seconds

Each speed has an oracle: loss and gradient of the plain padded pass. Rounds alternate; results are medians. Uses one
thread unless --threads is given.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from learner.forward.lm_head import TILE_COLUMNS, TILE_LOGITS, HeadLogprobs, LogprobSettings
from learner.forward.tile import LogitMap
from learner.training.batch import BatchRow
from learner.training.distributed import my_batches
from learner.training.policy_trainer import PolicyTrainer
from learner.training.step import forward_backward, optimizer_step
from tests.bench.live_memory import LiveBytes
from tests.bench.step_model import HALF_B, SMALL, VERSION, apart, load_trainer, make_model, make_rows
from tests.learner.policy.plain import ordinary

GROUP_SIZES = (4, 8, 16)
PROMPT_LENGTHS = (64, 512, 2048)
COMPLETION_LENGTH = 64
NUM_BRANCHES, TURN_TOKENS = 4, 96
"""Branches of an episode whose template rewrites earlier turns, and the tokens that each turn adds to the next
prompt."""
VOCABULARIES = (32_000, 151_936)
TOKENS = 16_384


def main() -> None:
    options = parse_options(sys.argv[1:])
    torch.set_num_threads(options.threads)
    transformers.utils.logging.set_verbosity_error()
    if options.half_b_step is not None:
        print(json.dumps(half_b_step(options.half_b_step)))
        return
    result = run(options)
    print(json.dumps(result) if options.json else json.dumps(result, indent=1))


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.step", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one line")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each comparison")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--skip-half-b", action="store_true", help="skip the model with half a billion parameters")
    parser.add_argument("--half-b-step", type=Path, default=None, help=argparse.SUPPRESS)  # in a separate process
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as directory:
        make_model(SMALL, Path(directory))
        trainer = load_trainer(Path(directory), micro_batch_tokens=TOKENS)
        say("against dense rows")
        dense = against_dense(trainer, options.rounds)
        sharing = []
        for group_size in GROUP_SIZES:
            for num_prompt in PROMPT_LENGTHS:
                say(f"groups of {group_size}, prompts of {num_prompt}")
                sharing.append(against_unshared(trainer, group_size, num_prompt, options.rounds))
        say(f"{NUM_BRANCHES} branches of each episode")
        branches = [against_unshared(trainer, 8, num, options.rounds, NUM_BRANCHES) for num in PROMPT_LENGTHS]
    say("head")
    heads = [head_peak(vocab_size) for vocab_size in VOCABULARIES]
    half_b = None if options.skip_half_b else half_b_in_process(options.threads)
    return {
        "useful_over_bare": dense["useful_over_bare"],
        "sharing_speedup_over_token_ratio": statistics.median(one["over_token_ratio"] for one in sharing),
        "branches_speedup_over_token_ratio": statistics.median(one["over_token_ratio"] for one in branches),
        "logits_peak_over_chunk": max(one["peak_over_chunk"] for one in heads),
        "half_b_peak_gb": None if half_b is None else half_b["peak_gb"],
        "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine(),
            "threads": options.threads,
                    "torch": torch.__version__, "transformers": transformers.__version__},
        "dense": dense,
        "sharing": sharing,
        "branches": branches,
        "head": heads,
        "half_b": half_b,
    }  # fmt: skip


def against_dense(trainer: PolicyTrainer, num_rounds: int, num_rows: int = 64) -> dict[str, Any]:
    """Compare on rows of 256 tokens, each a separate group."""
    rows = make_rows(num_rows, 1, 16, 240, SMALL["vocab_size"])
    token_ids_BS = torch.stack([_sequence(row) for row in rows])
    ours, bare = (lambda: our_pass(trainer, rows)), (lambda: plain_pass(trainer, rows, token_ids_BS))
    oracle = differences(trainer, ours, bare)
    seconds = alternated({"ours": ours, "bare": bare}, num_rounds)
    return {
        "useful_over_bare": seconds["bare"] / seconds["ours"],
        "tokens_per_s": token_ids_BS.numel() / seconds["ours"],
        "oracle": oracle,
    }


def against_unshared(
    trainer: PolicyTrainer, group_size: int, num_prompt: int, num_rounds: int, num_branches: int = 1
) -> dict[str, Any]:
    """Compare on groups with about TOKENS unshared tokens. The prompt of each branch has TURN_TOKENS more tokens."""
    num_before = num_prompt + TURN_TOKENS * (num_branches - 1) // 2
    num_groups = max(1, TOKENS // (group_size * num_branches * (num_before + COMPLETION_LENGTH)))
    rows = make_rows(
        num_groups,
        group_size,
        num_prompt,
        COMPLETION_LENGTH,
        SMALL["vocab_size"],
        num_branches=num_branches,
        num_said=TURN_TOKENS,
    )
    alone = apart(rows)
    ours, unshared = (lambda: our_pass(trainer, rows)), (lambda: our_pass(trainer, alone))
    oracle = differences(trainer, ours, unshared)
    seconds = alternated({"shared": ours, "unshared": unshared}, num_rounds)
    num_tokens = {"shared": num_computed(trainer, rows), "unshared": num_computed(trainer, alone)}
    speedup, token_ratio = seconds["unshared"] / seconds["shared"], num_tokens["unshared"] / num_tokens["shared"]
    return {
        "group_size": group_size,
        "branches": num_branches,
        "prompt_tokens": num_prompt,
        "completion_tokens": COMPLETION_LENGTH,
        "computed_tokens": num_tokens,
        "speedup": speedup,
        "token_ratio": token_ratio,
        "over_token_ratio": speedup / token_ratio,
        "oracle": oracle,
    }


def our_pass(trainer: PolicyTrainer, rows: list[BatchRow]) -> float:
    """Run batch, forward, loss and backward. Return the loss."""
    batches = my_batches(trainer.accelerator, trainer.policy, rows, trainer.config, "the step")
    return float(forward_backward(trainer, batches, VERSION, is_first_update=True)["loss"])


def plain_pass(trainer: PolicyTrainer, rows: list[BatchRow], token_ids_BS: torch.Tensor) -> float:
    """Run the same with transformers and one line of torch, on rows of one shape."""
    num_prompt, num_predicted = len(rows[0].prompt_token_ids), len(rows) * len(rows[0].branch.token_ids)
    with ordinary(trainer.policy):
        logits_BTV = trainer.policy(token_ids_BS, use_cache=False).logits[:, num_prompt - 1 : -1]
        targets_BT1 = token_ids_BS[:, num_prompt:].unsqueeze(-1)
        loss = -logits_BTV.log_softmax(-1).gather(-1, targets_BT1).sum() / num_predicted
        loss.backward()
    return float(loss.detach())


def differences(trainer: PolicyTrainer, ours: Callable[[], float], oracle: Callable[[], float]) -> dict[str, float]:
    """Return the relative differences of the losses and of the gradients' norms."""
    losses, gradients = [], []
    for one in (ours, oracle):
        trainer.optimizer.zero_grad()
        losses.append(one())
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.policy.parameters() if p.grad is not None]))
    return {
        "loss": abs(losses[0] - losses[1]) / abs(losses[1]),
        "gradient": float((gradients[0] - gradients[1]).norm() / gradients[1].norm()),
    }


def alternated(runs: dict[str, Callable[[], object]], num_rounds: int) -> dict[str, float]:
    """Return the median seconds of each, run in turns after a warm-up round."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(num_rounds + 1):
        for name, one in runs.items():
            started = time.perf_counter()
            one()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(taken[1:]) for name, taken in seconds.items()}


def num_computed(trainer: PolicyTrainer, rows: list[BatchRow]) -> int:
    batches = my_batches(trainer.accelerator, trainer.policy, rows, trainer.config, "the step")
    return sum(batch.pack.num_tokens for batch in batches)


def head_peak(vocab_size: int, num_rows: int = 2048, hidden_size: int = 896) -> dict[str, Any]:
    """Return the memory of the head alone, forward and backward, with an entropy that requires a gradient."""
    torch.manual_seed(0)
    hidden_ME = torch.randn(num_rows, hidden_size, requires_grad=True)
    weight_VE = (0.05 * torch.randn(vocab_size, hidden_size)).requires_grad_()
    targets_M = torch.randint(0, vocab_size, (num_rows,))
    with LiveBytes() as live:
        logprobs_M, entropy_M = HeadLogprobs.apply(
            hidden_ME, weight_VE, None, targets_M, LogprobSettings(LogitMap(), 0.7, "gradient")
        )
        (logprobs_M.sum() + entropy_M.sum()).backward()
    assert hidden_ME.grad is not None and weight_VE.grad is not None
    results = hidden_ME.grad.nbytes + weight_VE.grad.nbytes
    tile_rows = TILE_LOGITS["cpu"] // TILE_COLUMNS
    chunk = 4 * tile_rows * TILE_COLUMNS
    return {
        "vocab_size": vocab_size,
        "rows": num_rows,
        "peak_mib": (live.peak - results) / 2**20,
        "chunk_mib": chunk / 2**20,
        "peak_over_chunk": (live.peak - results) / chunk,
        "whole_logits_mib": 4 * num_rows * vocab_size / 2**20,
    }


def half_b_in_process(num_threads: int) -> dict[str, Any]:
    say("half a billion parameters: minutes")
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as directory:
        command = [sys.executable, "-m", "tests.bench.step", "--half-b-step", directory, "--threads", str(num_threads)]
        answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(answer.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def half_b_step(directory: Path) -> dict[str, Any]:
    """Run one update on TOKENS tokens in one micro-batch: groups of 8 with prompts of 512 tokens."""
    make_model(HALF_B, directory)
    trainer = load_trainer(directory, micro_batch_tokens=TOKENS, gradient_checkpointing=True)
    rows = make_rows(4, 8, 512, 448, HALF_B["vocab_size"])
    batches = my_batches(trainer.accelerator, trainer.policy, rows, trainer.config, "the step")
    started = time.perf_counter()
    loss = float(forward_backward(trainer, batches, VERSION, is_first_update=True)["loss"])
    metrics = optimizer_step(trainer, VERSION)
    return {
        "parameters": sum(parameter.numel() for parameter in trainer.policy.parameters()),
        "tokens": sum(row.num_tokens for row in rows) - (len(rows) - 4) * 512,
        "micro_batches": len(batches),
        "seconds": time.perf_counter() - started,
        "peak_gb": peak_bytes() / 1e9,
        "loss": loss,
        "grad_norm": metrics["optim/grad_norm"],
    }


def peak_bytes() -> int:
    """Return the peak memory of this process as counted by the kernel."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def _sequence(row: BatchRow) -> torch.Tensor:
    return torch.tensor([*row.prompt_token_ids.tolist(), *row.branch.token_ids.tolist()])


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
