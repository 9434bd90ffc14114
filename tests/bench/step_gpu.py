"""Compare the learner's step on a GPU with TRL's on the same rows: `python -m tests.bench.step_gpu --help`.

    random weights ─▶ a checkpoint ─┬─▶ trl_step.py (if installed): gradient in float32, steps ─┬─▶ one JSON object
    rows, each of one length        └─▶ the learner's steps ────────────────────────────────────┘

A step is everything from rows to new weights: batches, forward, loss, backward, clipping, AdamW; in bfloat16 with
float32 weights.

    tokens_per_s    tokens of prompts and completions; a prompt counts once per completion, on both sides
    matrix_share    arithmetic of the rows (learner/training/metrics.py) ÷ seconds ÷ the card's rate for products of
                    8192 × 8192 in bfloat16; the same arithmetic for both sides
    peak_gb         peak of torch's allocator

The oracle is TRL's loss and gradient of a few rows in float32. The sides run one after the other, because both need
most of the memory. The card should be idle.
"""

import argparse
import json
import logging
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers
from safetensors.torch import load_file

from learner.forward.attention import compiled_layers
from learner.training.batch import BatchRow
from learner.training.distributed import layout_of, my_batches
from learner.training.metrics import TERA, train_flops
from learner.training.packing import pieces_of
from learner.training.policy_trainer import PolicyTrainer
from learner.training.step import forward_backward, optimizer_step
from protocol.errors import SlipstreamError
from tests.bench.machine import versions
from tests.bench.step_model import HALF_B, ONE_AND_A_HALF_B, VERSION, load_trainer, make_model, make_rows

SIZES = {"0.5b": HALF_B, "1.5b": ONE_AND_A_HALF_B}
LENGTHS = {2048: 2, 8192: 1}
"""Groups of a step by completion length in tokens."""
GROUP_SIZE, PROMPT = 8, 512
ORACLE_ROWS, ORACLE_LENGTH = 4, 1024
MATRIX, PRODUCTS = 8192, 20
CLIPS = {"clip_low": 0.9, "clip_high": 9.0}
"""Wide enough that no token is clipped with random weights. Otherwise rounding at a bound would change the gradient."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements of one side for one model size and completion length."""

    step_s: float
    peak_gb: float


def main() -> None:
    options = parse_options(sys.argv[1:])
    transformers.utils.logging.set_verbosity_error()
    if not torch.cuda.is_available():
        sys.exit("error: this measures a GPU, and torch sees none; python -m tests.bench.step measures CPUs")
    if options.our_side is not None:
        print(json.dumps(our_side(options.our_side, options)))
        return
    result = run(options)
    print(json.dumps(result) if options.json else json.dumps(result, indent=1))


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.step_gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one line")
    parser.add_argument("--rounds", type=int, default=3, help="measured steps, after one warm-up step")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES), help="sizes of the model")
    parser.add_argument("--lengths", nargs="+", type=int, choices=LENGTHS, default=list(LENGTHS), help="of completions")
    parser.add_argument("--our-side", type=Path, default=None, help=argparse.SUPPRESS)  # in a process of its own
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    result: dict[str, Any] = {"card": torch.cuda.get_device_name(), "versions": versions(Path(sys.executable))}
    result["matrix_tflops"] = matrix_rate() / TERA
    for size in options.sizes:
        with tempfile.TemporaryDirectory(prefix="slipstream-bench-", dir="/dev/shm") as directory:
            make_model(SIZES[size], Path(directory), torch.bfloat16)
            torch.cuda.empty_cache()
            more = ["--rounds", str(options.rounds), "--sizes", size, "--lengths", *map(str, options.lengths)]
            say(f"{size}: TRL")
            trl = run_in_process("tests.bench.trl_step", directory, *more)
            say(f"{size}: ours")
            ours = run_in_process("tests.bench.step_gpu", "--our-side", directory, *more)
        if "failed" in ours:
            sys.exit(f"error: our side of {size} failed ({ours['failed']}); why stands above")
        result[size] = {"trl": trl, "ours": ours}
    return result


def our_side(directory: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all lengths of one model size."""
    logging.basicConfig(level=logging.INFO)
    (size,) = options.sizes
    trainer = load_trainer(directory, dtype="bfloat16", on_cpu=False, loss={"objective": "grpo"} | CLIPS)
    answer: dict[str, Any] = {"num_compiled_layers": len(compiled_layers)}
    answer |= {"attention": trainer.accelerator.unwrap_model(trainer.policy).config._attn_implementation}
    oracle = directory / "oracle.safetensors"
    if oracle.exists():
        loss = our_gradient(trainer, oracle_rows(size))
        gradients = {name: one.grad for name, one in trainer.policy.named_parameters() if one.grad is not None}
        answer["off_trl_float32"] = differences(loss, gradients, oracle)
        trainer.optimizer.zero_grad()
    for length in options.lengths:
        rows = rows_of(size, length)
        measured = measure(lambda rows=rows: our_step(trainer, rows), options.rounds)
        flops = train_flops(
            trainer.shape, pieces_of(rows, layout_of(trainer.accelerator, trainer.policy, trainer.config))
        )
        answer[str(length)] = summarize(measured, rows, flops)
    return answer


def our_step(trainer: PolicyTrainer, rows: list[BatchRow]) -> None:
    our_gradient(trainer, rows)
    optimizer_step(trainer, VERSION)


def our_gradient(trainer: PolicyTrainer, rows: list[BatchRow]) -> float:
    batches = my_batches(trainer.accelerator, trainer.policy, rows, trainer.config, "the step")
    return float(forward_backward(trainer, batches, VERSION, is_first_update=True)["loss"])


def rows_of(size: str, length: int) -> list[BatchRow]:
    return with_advantages(make_rows(LENGTHS[length], GROUP_SIZE, PROMPT, length, SIZES[size]["vocab_size"]))


def oracle_rows(size: str) -> list[BatchRow]:
    return with_advantages(make_rows(1, ORACLE_ROWS, PROMPT, ORACLE_LENGTH, SIZES[size]["vocab_size"]))


def with_advantages(rows: list[BatchRow]) -> list[BatchRow]:
    """Return rows with advantages of both signs and different sizes."""
    return [msgspec.structs.replace(row, advantage=(-1) ** i * (0.5 + i % 3)) for i, row in enumerate(rows)]


def measure(step: Callable[[], None], num_rounds: int) -> Measured | None:
    """Measure steps. None: out of memory."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    seconds = []
    try:
        for _ in range(num_rounds + 1):
            torch.cuda.synchronize()
            started = time.perf_counter()
            step()
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
    except torch.OutOfMemoryError:
        return None
    return Measured(step_s=statistics.median(seconds[1:]), peak_gb=torch.cuda.max_memory_allocated() / 1e9)


def summarize(measured: Measured | None, rows: list[BatchRow], flops: float) -> dict[str, Any] | str:
    if measured is None:
        return "out of memory"
    return {
        "step_s": measured.step_s,
        "tokens_per_s": sum(row.num_tokens for row in rows) / measured.step_s,
        "matrix_share": flops / measured.step_s / matrix_rate(),
        "peak_gb": measured.peak_gb,
    }


def matrix_rate() -> float:
    """Return operations per second: the median of several products."""
    left, right = torch.randn(2, MATRIX, MATRIX, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(left)
    seconds = []
    for _ in range(PRODUCTS):
        start, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        torch.mm(left, right, out=product)
        ended.record()
        ended.synchronize()
        seconds.append(start.elapsed_time(ended) / 1e3)
    return 2 * MATRIX**3 / statistics.median(seconds)


def differences(loss: float, gradients: dict[str, torch.Tensor], oracle: Path) -> dict[str, float]:
    """Return the relative differences of the losses and of the gradients' norms."""
    right = load_file(oracle, device="cuda")
    right_loss = float(right.pop("loss"))
    if right.keys() != gradients.keys():
        raise SlipstreamError(f"gradients of other tensors than the oracle's: {right.keys() ^ gradients.keys()}")
    off = sum(float((gradients[name].float() - one).square().sum()) for name, one in right.items())
    norm = sum(float(one.square().sum()) for one in right.values())
    return {"loss": abs(loss - right_loss) / abs(right_loss), "gradient": (off / norm) ** 0.5}


def run_in_process(module: str, *arguments: str) -> dict[str, Any]:
    """Run a module in a process. Return the last line of its output as JSON. Errors are on stderr."""
    command = [sys.executable, "-m", module, *arguments]
    answer = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if answer.returncode:
        return {"failed": f"exit code {answer.returncode}"}
    return json.loads(answer.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
