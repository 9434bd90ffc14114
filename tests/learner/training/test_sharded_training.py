"""Two ranks that share a policy by FSDP2 train, push and save what one with the whole of it does."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from tests.learner.checkpoints import weights_of
from tests.learner.ranks import on_two_ranks
from tests.learner.training.sharded_training import (
    LORA,
    NUM_STEPS,
    SAVED_AFTER,
    compare_passes_in_bfloat16,
    count_bytes,
    gradients,
    lead_and_follow,
    pass_in_bfloat16,
    push_again,
    push_experts,
    resume,
    train_and_save,
    train_long,
    write_gradients,
    write_pass_in_bfloat16,
)
from tests.zoo.families import save_model


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # Keys have no gradient from their bias, but rounding, of which Adam makes steps as large as any.
        if not name.endswith("c_attn.bias"):
            torch.testing.assert_close(found[name], tensor, atol=1e-5, rtol=0, msg=name)


@pytest.mark.slow
def test_ranks_with_different_numbers_of_micro_batches_have_the_gradient_of_one(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    on_two_ranks(write_gradients, tmp_path / "found.safetensors", is_sharded=True)
    assert_close(load_file(tmp_path / "found.safetensors"), gradients(accelerator, micro_batch_tokens=1000))


@pytest.mark.parametrize(
    "settings", [pytest.param({}, id="whole model"), pytest.param(LORA, id="adapter", marks=pytest.mark.slow)]
)
def test_steps_pushes_and_checkpoints_are_those_of_a_whole_policy(
    accelerator: Accelerator, tmp_path: Path, settings: dict[str, Any]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for directory in (one, two):
        directory.mkdir()
    train_and_save(accelerator, one, settings)
    on_two_ranks(train_and_save, two, settings, is_sharded=True)
    for of_one, of_two in zip(*(json.loads((path / "metrics.json").read_text()) for path in (one, two)), strict=True):
        assert of_two == pytest.approx(of_one, abs=1e-5, rel=1e-5)  # the largest ratio is near 10
    expected, found = load_file(one / "found.safetensors"), load_file(two / "found.safetensors")
    assert list(found) == list(expected) and not any("lm_head" in name for name in found)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items() if name.startswith("first"))
    last = {name: tensor for name, tensor in expected.items() if name.startswith("last/")}
    assert_close(found, expected)

    saved = {directory: directory / f"step-{SAVED_AFTER:06d}" for directory in (one, two)}
    exported = load_file(saved[two] / "model" / "model.safetensors")
    if settings:
        adapters = [load_file(saved[directory] / "adapter" / "adapter_model.safetensors") for directory in (one, two)]
        assert_close(*adapters)
    else:
        weights = weights_of(saved[two])
        assert weights.keys() == exported.keys()
        assert all(torch.equal(exported[name], tensor) for name, tensor in weights.items())
    on_two_ranks(resume, one, tmp_path / "one-by-two", settings, is_sharded=True)
    accelerator.free_memory()  # forgets the first run's policy
    resume(accelerator, two, tmp_path / "two-by-one", settings)
    for resumed in ("one-by-two", "two-by-one"):
        pushed = load_file(tmp_path / resumed)
        assert_close({name: tensor for name, tensor in pushed.items() if name.startswith("last/")}, last)
    read = {name.removeprefix("read/"): tensor for name, tensor in pushed.items() if name.startswith("read/")}
    assert read.keys() == exported.keys() and all(torch.equal(read[name], tensor) for name, tensor in exported.items())


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        pytest.param({}, 1e-5, id="whole model"),
        pytest.param(LORA, 1e-5, id="adapter", marks=pytest.mark.slow),
        pytest.param(LORA | {"dtype": "bfloat16"}, 1e-2, id="adapter in bfloat16"),  # where ranks round elsewhere
    ],
)
def test_twenty_steps_have_the_losses_of_one_rank_and_the_same_weights_are_pushed_in_the_same_bytes(
    accelerator: Accelerator, tmp_path: Path, settings: dict[str, Any], tolerance: float
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for directory in (one, two):
        directory.mkdir()
    train_long(accelerator, one, settings)
    on_two_ranks(train_long, two, settings, is_sharded=True)
    losses = [[line["loss/policy"] for line in json.loads((path / "metrics.json").read_text())] for path in (one, two)]
    assert len(losses[0]) == NUM_STEPS and max(map(abs, losses[0])) > 0.01
    assert losses[1] == pytest.approx(losses[0], abs=tolerance)
    on_two_ranks(push_again, one, one / "again", settings, is_sharded=True)
    accelerator.free_memory()  # forgets the first run's policy
    push_again(accelerator, two, two / "again", settings)
    for directory in (one, two):
        pushed, again = load_file(directory / "pushed.safetensors"), load_file(directory / "again")
        assert list(pushed) == list(again) and all(torch.equal(again[name], pushed[name]) for name in pushed)


def test_rank_0_leads_and_the_others_follow_until_it_stops() -> None:
    on_two_ranks(lead_and_follow, is_sharded=True)


def test_experts_leave_two_ranks_under_the_names_of_their_checkpoint(tmp_path: Path) -> None:
    save_model("mixtral", tmp_path)
    on_two_ranks(push_experts, tmp_path, is_sharded=True)


def test_a_push_gathers_one_tensor_at_a_time() -> None:
    on_two_ranks(count_bytes, is_sharded=True)


def test_every_pass_in_bfloat16_is_alike_and_weights_and_gradients_stay_float32() -> None:
    on_two_ranks(compare_passes_in_bfloat16, is_sharded=True)


@pytest.mark.parametrize(("family", "is_sharded"), [("qwen2", False), ("qwen2", True), ("llama", True)])
def test_in_bfloat16_ranks_compute_what_one_does(
    accelerator: Accelerator, tmp_path: Path, family: str, is_sharded: bool
) -> None:
    model, path = tmp_path / family, tmp_path / "found.safetensors"
    save_model(family, model)
    on_two_ranks(write_pass_in_bfloat16, model, path, is_sharded=is_sharded)
    found, expected = load_file(path), pass_in_bfloat16(accelerator, model, gradient_checkpointing=False)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # FSDP2 sums the gradients of Qwen2's tied weight in bfloat16; everything else is alike to the bit.
        rounding = 2**-7 if is_sharded and (family, name) == ("qwen2", "model.embed_tokens.weight") else 0.0
        torch.testing.assert_close(found[name], tensor, atol=rounding, rtol=rounding, msg=name)
