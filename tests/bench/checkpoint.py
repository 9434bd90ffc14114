"""Measure how much a checkpoint slows concurrent steps: `python -m tests.bench.checkpoint --help`.

Each round has three parts: steps alone, a checkpoint alone, and steps during the write of a checkpoint. Results are
medians of the rounds' ratios. Every checkpoint is read back and compared bit for bit with the weights and moments. The
machine should be idle.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate import Accelerator
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from learner.policy.shards import trained
from learner.run_inputs import RunInputs
from learner.storage.checkpoint import RunProgress, checkpoint_of
from learner.storage.writer import CheckpointWriter
from learner.training.metrics import StepTimer
from learner.training.policy_trainer import PolicyTrainer, make_trainer
from learner.training.step import train_on
from protocol.model_files import resolve_model
from tests.learner.checkpoints import whole_tensors
from tests.learner.training.fixed_groups import VERSION, make_groups, make_run

STEPS_ALONE = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.checkpoint", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--layers", type=int, default=8, help="layers of the random model, 3.2M parameters each")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(sys.argv[1:])
    if os.environ.get("THP_MEM_ALLOC_ENABLE") is None:  # set before torch is imported, as `learner train` does
        as_the_learner = os.environ | {"THP_MEM_ALLOC_ENABLE": "1", "OMP_NUM_THREADS": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "tests.bench.checkpoint", *sys.argv[1:]], as_the_learner)
    with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as directory:
        result = measure(Path(directory), options.layers, options.rounds)
    print(json.dumps(result) if options.json else "\n".join(f"{name}: {value}" for name, value in result.items()))


def measure(directory: Path, num_layers: int, num_rounds: int) -> dict[str, Any]:
    trainer = a_trainer(directory / "model", num_layers)
    groups = make_groups(trainer.policy)

    def train() -> float:
        started = time.monotonic()
        train_on(trainer, groups, VERSION, StepTimer())
        return time.monotonic() - started

    train()
    rounds = []
    with CheckpointWriter(trainer, directory / "checkpoints") as writer:
        for step in range(1, 2 * num_rounds, 2):
            rounds.append(one_round(trainer, directory / "checkpoints", writer, train, step))
            shutil.rmtree(directory / "checkpoints")
    num_parameters = sum(parameter.numel() for parameter in trainer.policy.parameters())
    return {
        name: statistics.median(one[name] for one in rounds) for name in rounds[0] if name != "is_exact"
    } | {
        "is_exact": all(one["is_exact"] for one in rounds),
        "num_parameters": num_parameters,
        "num_rounds": num_rounds,
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
    }  # fmt: skip


def one_round(
    trainer: PolicyTrainer, directory: Path, writer: CheckpointWriter, train: Callable[[], float], step: int
) -> dict[str, float]:
    alone_s = statistics.median(train() for _ in range(STEPS_ALONE))
    started = time.monotonic()
    writer.begin(step, RunProgress(), None, lambda: None)
    writer.wait()
    waited_s = time.monotonic() - started
    writer.pop_metrics()
    before = {name: tensor.clone() for name, tensor in trained(trainer.policy, trainer.optimizer).items()}
    complete: list[bool] = []
    writer.begin(step + 1, RunProgress(), None, lambda: complete.append(True))
    beside_s = [train()]
    while not complete:
        beside_s.append(train())
    writer.wait()
    metrics = writer.pop_metrics()
    found = whole_tensors(checkpoint_of(directory, step + 1) / "trained")
    return {
        "step_beside_over_alone": statistics.median(beside_s[:-1] or beside_s) / alone_s,
        "stall_over_waiting": metrics["checkpoint/stall_seconds"] / waited_s,
        "stall_s": metrics["checkpoint/stall_seconds"],
        "waited_s": waited_s,
        "beside_s": metrics["checkpoint/seconds"],
        "step_alone_s": alone_s,
        "steps_beside": len(beside_s),
        "mib": metrics["checkpoint/bytes"] / (1 << 20),
        "is_exact": all(torch.equal(tensor, before[name]) for name,
            tensor in found.items()) and found.keys() == before.keys(),
    }  # fmt: skip


def a_trainer(path: Path, num_layers: int) -> PolicyTrainer:
    config = Qwen2Config(
        vocab_size=16, hidden_size=512, intermediate_size=1408, num_hidden_layers=num_layers, num_attention_heads=8,
        num_key_value_heads=8, tie_word_embeddings=False, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).save_pretrained(path)
    AutoTokenizer.from_pretrained(resolve_model("tiny:digits")).save_pretrained(path)
    run = msgspec.structs.replace(make_run(optimizer={"learning_rate": 1e-5}), model=str(path))
    return make_trainer(RunInputs(run), Accelerator(cpu=True), is_new=True)


if __name__ == "__main__":
    main()
