"""Measure pushes into real vLLM during generation and training: how long each of them stops.

    Trainer (AdamW) ─▶ WeightSync.send / WeightSync.begin ═▶ server process ─▶ PushDone(stall) ─▶ shares of the push

Two servers, without and with server.overlap_weight_loading; for each, pushes without and with
learner.weight_sync.overlap_with_training. Results are medians over pushes.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from learner.config import WeightSyncConfig
from learner.policy.model import load_policy
from learner.servers.weight_sync import WeightSync
from learner.servers.weight_transfer import SyncReport
from protocol.messages import Sampling
from protocol.model_files import resolve_model
from protocol.weights.buckets import make_manifest, split_into_buckets
from tests.bench.push_server import BusyLink, ServedModel, peak_memory
from tests.inference_server import tiny_gpt2

CPU = torch.device("cpu")
TINY = "tiny:digits"
BUCKET_MIB = 64
SETTLE_S = 1.0
"""Time after the requests until all prompts are prefilled and every sequence decodes."""


def save_gpt2_small(directory: Path) -> str:
    """Write a randomly initialised model of GPT-2's published config, 124M parameters; return its path."""
    if not (directory / "config.json").exists():
        torch.manual_seed(0)
        tiny_gpt2.save(GPT2LMHeadModel(GPT2Config()), directory)
    return str(directory)


class Trainer:
    """A model with real optimizer steps on random tokens."""

    wire_dtype, device, copy_device = torch.float32, CPU, None
    adapter = why_merged = None

    def __init__(self, model: PreTrainedModel, num_tokens: int) -> None:
        self.model, self._num_tokens = model, num_tokens
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, parameter.detach()) for name, parameter in self.model.named_parameters()]

    def step(self) -> None:
        token_ids = torch.randint(self.model.config.vocab_size, (1, self._num_tokens))
        self.model(token_ids, labels=token_ids).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)


def measure(model: str, directory: Path, num_pushes: int, num_groups: int, sampling: Sampling) -> dict[str, Any]:
    """Return the results of one model for each combination of overlaps."""
    result: dict[str, Any] = {}
    for overlap_weight_loading in (False, True):
        server = ServedModel(
            model, directory / f"overlap-{overlap_weight_loading}", overlap_weight_loading=overlap_weight_loading
        )
        try:
            link = BusyLink(server, num_groups, sampling)
            trainer = Trainer(load_policy(resolve_model(model), gradient_checkpointing=False), num_tokens=64)
            pusher = WeightSync(link.fleet, trainer, WeightSyncConfig(bucket_mib=BUCKET_MIB))
            side = "server_overlap" if overlap_weight_loading else "no_overlap"
            memory = first_pushes(server, pusher, trainer)
            result |= {f"memory_{side}": memory}
            link.keep_busy()
            time.sleep(SETTLE_S)
            result[side] = blocking_pushes(pusher, trainer, num_pushes)
            result["both_overlap" if overlap_weight_loading else "learner_overlap"] = overlapped_pushes(
                pusher, trainer, num_pushes
            )
            pusher.close()
            link.close()
        finally:
            server.close()
    return result


def first_pushes(server: ServedModel, pusher: WeightSync, trainer: Trainer) -> dict[str, Any]:
    """Push three times without load. Return the memory use of each side, also in buckets of the configured size."""
    largest = max(
        bucket.num_bytes
        for bucket in split_into_buckets(make_manifest(trainer.tensors(), torch.float32, BUCKET_MIB << 20))
    )
    trainer.step()
    with peak_memory(server.processes) as server_peak, peak_memory([psutil.Process()]) as learner_peak:
        for version in range(3):
            pusher.send(version)
    memory: dict[str, Any] = {"bucket_bytes": BUCKET_MIB << 20, "largest_bucket_bytes": largest}
    for side, peak in (("server", server_peak), ("learner", learner_peak)):
        memory |= {
            f"{side}_bytes": peak.num_bytes,
            f"{side}_kept_bytes": peak.num_bytes_kept,
            f"{side}_buckets": peak.num_bytes / (BUCKET_MIB << 20),
            f"{side}_largest_buckets": peak.num_bytes / largest,
        }
    return memory


def blocking_pushes(pusher: WeightSync, trainer: Trainer, num_pushes: int) -> dict[str, float]:
    """Measure steps that are each followed by a push that training waits for."""
    costs = []
    for version in range(10, 10 + num_pushes):
        trainer.step()
        started = time.monotonic()
        report = pusher.send(version)
        assert report is not None
        costs.append(cost(report, time.monotonic() - started))
    return medians(costs)


def overlapped_pushes(pusher: WeightSync, trainer: Trainer, num_pushes: int) -> dict[str, float]:
    """Measure steps during pushes. Training waits only for the copy of the weights."""
    costs = []
    for version in range(100, 101 + num_pushes):
        trainer.step()
        started = time.monotonic()
        pusher.begin(version, lambda: None)
        blocked_s = time.monotonic() - started
        while pusher.is_syncing:
            trainer.step()
        pusher.wait()
        report = pusher.pop_report()
        assert report is not None
        costs.append(cost(report, blocked_s, blocked_s))
    return medians(costs[1:])  # the first copy uses fresh memory


def cost(report: SyncReport, blocked_s: float, before_s: float = 0.0) -> dict[str, float]:
    """Return the cost of one push. `before_s`: time before the report's clock started."""
    total_s = before_s + report.total_s
    return {
        "push_seconds": total_s, "transfer_seconds": report.transfer_s, "apply_seconds": report.load_s,
        "pause_seconds": report.pause_s, "stall_seconds": report.stall_s,
        "stall_over_push": report.stall_s / total_s,
        "learner_blocked_seconds": blocked_s, "learner_blocked_over_push": blocked_s / total_s,
    }  # fmt: skip


def medians(costs: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in costs) for name in costs[0]} | {"num_pushes": len(costs)}


def run(directory: Path, num_pushes: int) -> dict[str, Any]:
    """Return the results of GPT-2 small and of the demo's model."""
    small = save_gpt2_small(directory / "gpt2-small")
    return {
        "gpt2_small": measure(small, directory, num_pushes, 4, Sampling(num_completions=4, max_tokens=64)),
        "tiny": measure(TINY, directory / "tiny", num_pushes, 16, Sampling(num_completions=16, max_tokens=9)),
    }
