"""TRL's side of the comparison: Slipstream's settings in TRL's terms, and the process of TRL.

config ─▶ job.json ─▶ trl_job.py in TRL's virtual environment ─▶ steps.json ─▶ TrlRun
"""

import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from learner.config import LearnerRun
from protocol.errors import SlipstreamError
from tests.bench.steps import Step

ROOT = Path(__file__).parent.parent.parent
TIMEOUT_S = 4 * 3600.0


class HeldOut(msgspec.Struct, frozen=True, kw_only=True):
    """The mean reward of greedy answers to held-out prompts."""

    step: int
    elapsed_s: float
    """Training time until the evaluated weights."""
    reward: float


class TrlRun(msgspec.Struct, frozen=True):
    """The results of trl_job.py."""

    processes: int
    threads: int
    """Threads of each process."""
    steps: list[Step]
    evaluations: list[HeldOut] = []
    peak_gib: float | None = None
    """The most GPU memory that its torch has held."""


def trl_job(
    config: LearnerRun, rows: int, cache: str | None = None, *, is_compiled: bool = False, device: str = "cpu"
) -> dict[str, Any]:
    """Return the settings in TRL's terms.

    `cache`: for generation; None: the default. With device "cuda", vLLM generates in the trainer's process.
    """
    learner = config.learner
    optimizer = learner.optimizer
    return {
        "model": config.model, "prompts": learner.data.path, "steps": learner.steps, "seed": config.seed,
        "groups_per_step": learner.groups_per_step, "num_completions": learner.sampling.group_size,
        "max_tokens": learner.sampling.max_tokens, "micro_batch_rows": rows, "clip_low": learner.loss.value("clip_low"),
        "clip_high": learner.loss.value("clip_high"), "learning_rate": optimizer.learning_rate,
        "max_grad_norm": optimizer.max_grad_norm, "beta1": optimizer.beta1, "beta2": optimizer.beta2,
        "weight_decay": optimizer.weight_decay, "cache": cache, "compile": is_compiled,
        "bf16": config.dtype == "bfloat16",
        "reward": learner.reward.functions[0].rpartition(":")[2], "device": device,
        "vllm_share": config.server.get("gpu_memory_utilization"), "max_model_len": config.server.get("max_model_len"),
    }  # fmt: skip


def run_trl(job: dict[str, Any], directory: Path, python: Path, num_processes: int) -> TrlRun:
    """Run TRL. Raises SlipstreamError if it fails."""
    directory.mkdir()
    steps_file, job_file, console = directory / "steps.json", directory / "job.json", directory / "console.log"
    job_file.write_text(json.dumps(job | {"steps_file": str(steps_file)}))
    with console.open("w") as output:
        done = subprocess.run(
            [
                str(python), "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}",
                "-m", "tests.bench.trl_job", str(job_file),
            ],
            cwd=ROOT, stdout=output, stderr=output, timeout=TIMEOUT_S,
        )  # fmt: skip
    if done.returncode:
        raise SlipstreamError(f"TRL ended with exit code {done.returncode}:\n{console.read_text()[-3000:]}")
    return msgspec.json.decode(steps_file.read_bytes(), type=TrlRun)
