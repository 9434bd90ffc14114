"""Metrics of a step about speed, lengths, ratios and memory, compared with values computed by hand."""

import math
import mmap
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedConfig, Qwen2MoeConfig

from learner.policy.model_shape import shape_of
from learner.report.run_log import unhealthy
from learner.rewards.workers import Latencies
from learner.train import train
from learner.training.metrics import (
    Devices,
    RatioRange,
    StepTimer,
    group_metrics,
    memory_metrics,
    peak_tflops,
    throughput,
    train_flops,
)
from tests.learner.model_engine import tiny_server
from tests.learner.runs import make_run as make_whole_run
from tests.learner.runs import metrics_of
from tests.learner.training.batch_rows import rows_of
from tests.learner.training.fixed_groups import VERSION, make_groups, make_moved_trainer, make_run

PAGE = Path(__file__).parents[3] / "docs/metrics.md"
CPU = Devices(torch.device("cpu"), 2)
DENSE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000, "attn_implementation": "eager",
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "experts_implementation": "eager"}
SHAPES = {
    "llama": lambda: LlamaConfig(**DENSE),
    "qwen2_moe, with a shared expert": lambda: Qwen2MoeConfig(
        **DENSE, **EXPERTS, num_experts=16, moe_intermediate_size=192, shared_expert_intermediate_size=384
    ),
    "mixtral": lambda: MixtralConfig(**DENSE, **EXPERTS, num_local_experts=8),
}


@pytest.mark.parametrize("make_config", SHAPES.values(), ids=SHAPES)
def test_the_arithmetic_of_a_step_equals_torchs_count(make_config: Callable[[], PreTrainedConfig]) -> None:
    """Two rows of 64 tokens. Only the experts that a token uses count."""
    model, ids = AutoModelForCausalLM.from_config(make_config()), torch.randint(0, 1000, (2, 64))
    with FlopCounterMode(display=False) as counter:
        model(ids).logits.sum().backward()
    # Eager attention also computes the half above the diagonal, which a causal kernel and the formula skip.
    found = train_flops(shape_of(make_config()), [[row] for row in rows_of([(40, [24]), (63, [1])])])
    assert found == pytest.approx(counter.get_total_flops(), rel=0.05)


def test_a_shared_prompt_counts_once_if_computed_once() -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=50
    )
    shape = shape_of(config)
    rows = rows_of([(30, [5, 9])])
    shared, apart = train_flops(shape, [rows]), train_flops(shape, [[row] for row in rows])
    parameters = shape.num_parameters - shape.num_embedding
    assert apart - shared == 6 * parameters * 30 + 12 * 2 * 64 * 30**2 / 2


class TwoH100(Devices):
    name = "NVIDIA H100 80GB HBM3"


def test_throughput_counts_prompts_per_device_and_uses_a_known_peak(
    accelerator: Accelerator,
) -> None:
    groups = make_groups(make_moved_trainer(make_run(), accelerator).policy)
    tokens = sum(len(g.prompt_token_ids) + len(c.token_ids) for g in groups for c in g.completions)
    assert throughput(groups, 3.0, 0.5, CPU) == {
        "perf/tokens_per_s_per_device": pytest.approx(tokens), "perf/tflops_per_device": 3.0
    }  # fmt: skip
    assert throughput(groups, None, 0.5, CPU).keys() == {"perf/tokens_per_s_per_device"}
    found = throughput(groups, 989.0, 2.0, TwoH100(torch.device("cpu"), 2))
    assert found["perf/tflops_per_device"] == 989 / 4 and found["perf/mfu"] == 0.25


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H100 NVL", 835), ("NVIDIA H200", 989),
        ("NVIDIA GH200 480GB", 989), ("NVIDIA B200", 2250), ("NVIDIA GB200", None), ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-PCIE-40GB", 312), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None), ("NVIDIA RTX A1000", None),
        ("NVIDIA A10", 125), ("NVIDIA A10G", None), ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None), ("NVIDIA GeForce RTX 4090 D", None), ("cpu", None),
    ],
)  # fmt: skip
def test_only_a_device_of_exactly_this_name_has_its_peak(device: str, peak: float | None) -> None:
    assert peak_tflops(device) == peak


def test_no_time_is_between_two_steps() -> None:
    timer, started = StepTimer(), time.monotonic()
    with timer("forward_backward"):
        time.sleep(0.02)
    first = timer.pop_metrics()
    with timer("checkpoint"):
        time.sleep(0.05)
    second, ended = timer.pop_metrics(), time.monotonic()
    assert first["time/step"] + second["time/step"] == pytest.approx(ended - started, abs=0.01)
    assert second.keys() == {"time/checkpoint", "time/other", "time/step"} and second["time/checkpoint"] >= 0.05


def test_lengths_and_the_deviation_within_groups_are_those_of_the_completions(accelerator: Accelerator) -> None:
    trainer = make_moved_trainer(make_run(), accelerator)
    first, second, _ = make_groups(trainer.policy)
    first = msgspec.structs.replace(first, rewards_G=[0.0, 1.0, None, None])
    second = msgspec.structs.replace(second, rewards_G=[1.0, None, None, None])
    metrics = group_metrics([first, second], VERSION)
    assert metrics["batch/group_reward_std"] == 0.5, "a single reward has no deviation"
    lengths = sorted(len(c.token_ids) for g in (first, second) for c in g.completions)
    p10, p50, p90, longest = (metrics[f"rollout/completion_length_{name}"] for name in ("p10", "p50", "p90", "max"))
    assert (p50, longest) == ((lengths[3] + lengths[4]) / 2, lengths[-1]) and lengths[0] <= p10 <= p90 <= longest


def test_extremes_are_reported_once_and_bounded(accelerator: Accelerator) -> None:
    extremes = RatioRange()
    ratios = torch.tensor([[0.0, 50.0], [-1.0, math.nan]])
    extremes.update(ratios, torch.tensor([[0.0, 1.0], [2.0, math.nan]]), torch.tensor([[1.0], [0.5]]).expand(2, 2))
    extremes.update(torch.zeros(1, 2), torch.tensor([[0.5, 0.5]]), torch.full((1, 2), 0.5))
    assert extremes.pop_metrics(accelerator, 1) == {
        "policy/ratio_min": pytest.approx(math.exp(-1)),
        "policy/ratio_max": pytest.approx(math.exp(20)),
        "loss/max_token_share": pytest.approx(0.5),
        "loss/max_token_multiplier": pytest.approx(4.0),
    }
    assert extremes.pop_metrics(accelerator, 1) == {"policy/ratio_min": 1.0, "policy/ratio_max": 1.0}
    for pulls in ([1.0, 1.0], [9.0, 1.0]):  # two updates of one micro-batch each: the larger share counts
        extremes.update(torch.zeros(1, 2), torch.tensor([pulls]), torch.ones(1, 2))
    metrics = extremes.pop_metrics(accelerator, 2)
    assert (metrics["loss/max_token_share"], metrics["loss/max_token_multiplier"]) == pytest.approx((0.9, 9.0))


def test_a_dominant_token_is_reported_only_beyond_its_share_by_advantage(
    accelerator: Accelerator,
) -> None:
    """One wrong completion of 3 tokens among 15 correct ones, in a step whose other groups have no signal."""
    advantages_BT = torch.tensor([-3.75] + [0.25] * 15).unsqueeze(1)
    for ratio, expected in ((1.0, set()), (1000.0, {"loss/max_token_share"})):
        ratio_BT = torch.ones(16, 3)
        ratio_BT[0, 1] = ratio
        extremes = RatioRange()
        extremes.update(ratio_BT.log(), ratio_BT * advantages_BT.abs(), advantages_BT.abs().expand_as(ratio_BT))
        assert unhealthy(extremes.pop_metrics(accelerator, 1)).keys() == expected


def test_times_of_reward_functions_accumulate_until_read() -> None:
    latencies = Latencies()
    for seconds in (1.0, 3.0):
        latencies.record("exact_match", seconds)
    assert latencies.pop_metrics() == {"reward_seconds/exact_match": 2.0, "reward_seconds_max/exact_match": 3.0}
    assert latencies.pop_metrics() == {}


def test_memory_is_that_of_the_process() -> None:
    before = memory_metrics(torch.device("cpu"))["memory/host_gib"]
    kept = mmap.mmap(-1, 1 << 28)  # 256 MiB that the allocator cannot have from an earlier test
    for _ in range(256):
        kept.write(bytes(1 << 20))
    assert memory_metrics(torch.device("cpu"))["memory/host_gib"] - before == pytest.approx(0.25, abs=0.1)
    kept.close()


def names_in_the_page() -> list[re.Pattern[str]]:
    """Return the first cells of the table. `_p10` continues the previous name."""
    patterns = []
    for line in PAGE.read_text().splitlines():
        if line.startswith("| `"):
            first, *more = re.findall(r"`([^`]+)`", line.split("|")[1])
            names = [first] + [first.removesuffix("_mean") + name if name[0] == "_" else name for name in more]
            patterns += [re.compile(re.sub(r"<\w+>", r"[^/]+", name)) for name in names]
    return patterns


def test_every_metric_of_a_run_is_in_the_table(tmp_path: Path) -> None:
    with tiny_server() as server, tiny_server() as on_server:
        run = make_whole_run(
            tmp_path, server.endpoint, steps=3, checkpoint={"every_steps": 1},
            reference={"kind": "every", "every_steps": 2, "endpoint": on_server.endpoint},
            kl={"coef": 0.1}, dynamic_sampling=True, curriculum={"kind": "pass_rate"}, max_staleness=1,
            off_policy_correction={"weight": "mask"},
        )  # fmt: skip
        train(run, resume=False)
    patterns, lines = names_in_the_page(), metrics_of(run)
    found = set().union(*lines) - {"step", "time", "elapsed_s"}
    assert sorted(name for name in found if not any(pattern.fullmatch(name) for pattern in patterns)) == []
    assert {"checkpoint/seconds", "perf/tflops_per_device", "memory/host_gib", "reward_seconds/share_right"} <= found
    assert "perf/train_tflop" not in found and "checkpoint/seconds" not in lines[0]
