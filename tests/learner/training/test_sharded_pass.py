"""Ranks that share a policy compute as one that has all of it, in every way that a pass goes: cut, computed again,
compiled."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.distributed.tensor import Replicate, Shard
from transformers.models.llama import modeling_llama

from learner.config.learner import Sharding
from learner.forward.attention import compiled_layers, layers_of
from learner.forward.compile import ROTARY, describe_fused
from learner.forward.logprobs import token_logprobs
from learner.policy.model import load_policy
from learner.policy.sharding import mesh_shape, shard
from learner.policy.snapshot import trainable, whole
from learner.run_inputs import RunInputs
from learner.training.batch import micro_batch, trained_rows
from learner.training.metrics import StepTimer
from learner.training.policy_trainer import PolicyTrainer, make_trainer
from learner.training.step import advantages, train_on
from protocol.errors import ConfigError
from protocol.model_files import resolve_model
from tests.learner.forward.spelt_kernel import like_a_gpu, trace_only
from tests.learner.ranks import on_four_ranks, on_two_ranks
from tests.learner.training.fixed_groups import VERSION, a_run, make_groups
from tests.learner.training.gradients import gradient_of
from tests.zoo.families import save_model

pytestmark = pytest.mark.system

LONG_PROMPTS = (30, 50)
"""Most rows of a pack predict nothing, so the last layer is cut."""
NUM_STEPS = 2


def a_trainer(accelerator: Accelerator, model: Path, settings: dict[str, Any]) -> PolicyTrainer:
    torch.manual_seed(0)
    run = a_run(model, micro_batch_tokens=120, **settings)
    return make_trainer(RunInputs(run), accelerator, is_new=True)


def two_steps(trainer: PolicyTrainer) -> dict[str, Any]:
    """Gradient, metrics, logprobs and weights."""
    policy: Any = trainer.accelerator.unwrap_model(trainer.policy)
    groups = make_groups(policy, prompt_tokens=LONG_PROMPTS)
    found: dict[str, Any] = {"gradient": gradient_of(trainer, groups)}
    for version in range(VERSION, VERSION + NUM_STEPS):
        metrics = train_on(trainer, groups, version, StepTimer())
        found |= {
            f"{name} of {version}": metrics[name] for name in ("loss/policy", "optim/grad_norm", "policy/entropy")
        }
    rows = trained_rows(groups, advantages(groups, trainer.config), trainer.config)
    with torch.no_grad():
        found["logprobs"], _ = token_logprobs(trainer.policy, micro_batch(rows, trainer.accelerator.device).pack, 1.0)
    return found | {name: whole(parameter.detach()) for name, parameter in trainable(policy).items()}


def steps_of(accelerator: Accelerator, model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    return two_steps(a_trainer(accelerator, model, settings))


def assert_alike(of_ranks: list[dict[str, Any]], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert expected["gradient"].norm() > 0.01
    for found in of_ranks:
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, atol=tolerance, rtol=tolerance, msg=name)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("family", ["qwen2", "llama"], ids=["tied head", "own head"])
def test_two_and_four_ranks_and_nodes_compute_what_one_rank_does(
    accelerator: Accelerator, tmp_path: Path, family: str, checkpointing: bool
) -> None:
    save_model(family, tmp_path)
    expected = steps_of(accelerator, tmp_path, {})
    ways: list[tuple[Callable[..., Any], str]] = [
        (on_two_ranks, "full"),
        (on_four_ranks, "full"),
        (on_four_ranks, "hybrid"),
    ]
    for on_ranks, sharding in ways:
        settings = {"sharding": sharding, "gradient_checkpointing": checkpointing}
        assert_alike(on_ranks(steps_of, tmp_path, settings), expected)


def share_over_nodes(accelerator: Accelerator) -> None:
    policy: Any = load_policy(resolve_model("tiny:digits"), gradient_checkpointing=False)
    names, weight = [name for name, _ in policy.named_parameters()], policy.transformer.h[0].mlp.c_fc.weight
    weight._no_weight_decay = True
    shard(policy, mesh_shape("hybrid", accelerator.num_processes), "cpu", torch.float32)
    shared = policy.transformer.h[0].mlp.c_fc.weight
    assert shared.device_mesh.mesh.tolist() == [[0, 1], [2, 3]] and shared.placements == (Replicate(), Shard(0))
    assert [name for name, _ in policy.named_parameters()] == names and shared._no_weight_decay
    assert torch.equal(whole(shared.detach()), weight.detach())


def test_nodes_hold_copies_of_the_shards_that_their_ranks_divide() -> None:
    on_four_ranks(share_over_nodes)


@pytest.mark.parametrize(
    ("kind", "num_ranks", "on_node", "shape"),
    [
        ("none", 4, "2", ()),
        ("full", 1, "1", ()),
        ("full", 4, "2", (4,)),
        ("hybrid", 4, "2", (2, 2)),
        ("hybrid", 4, "4", (4,)),
    ],
)
def test_the_mesh_follows_from_the_ranks_of_a_node(
    monkeypatch: pytest.MonkeyPatch, kind: Sharding, num_ranks: int, on_node: str, shape: tuple[int, ...]
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", on_node)
    assert mesh_shape(kind, num_ranks) == shape


@pytest.mark.parametrize("on_node", ["", "3"])
def test_nodes_of_unknown_or_unlike_size_are_refused(monkeypatch: pytest.MonkeyPatch, on_node: str) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", on_node)
    with pytest.raises(ConfigError, match=f"LOCAL_WORLD_SIZE = '{on_node}' and 4 ranks: .*with as many on each node"):
        mesh_shape("hybrid", 4)


def keep_rotary(patch: pytest.MonkeyPatch) -> None:
    """Put back the function that compiling replaces in transformers."""
    patch.setattr(modeling_llama, ROTARY, getattr(modeling_llama, ROTARY))


def compiled(accelerator: Accelerator, model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The same with whole layers, as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        keep_rotary(patch), like_a_gpu(patch), trace_only(patch)
        trainer = a_trainer(accelerator, model, settings | {"compile": True})
        assert [layer in compiled_layers for layer in layers_of(trainer.policy)] == [True, False]
        return two_steps(trainer)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own, while it traces
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "computed again"])
def test_compiled_layers_do_too(accelerator: Accelerator, tmp_path: Path, checkpointing: bool) -> None:
    save_model("llama", tmp_path)
    expected = steps_of(accelerator, tmp_path, {})
    settings = {"sharding": "full", "gradient_checkpointing": checkpointing}
    assert_alike(on_two_ranks(compiled, tmp_path, settings), expected)


def compiled_on_a_cpu(accelerator: Accelerator, model: Path, settings: dict[str, Any]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        keep_rotary(patch)
        trainer = a_trainer(accelerator, model, settings | {"compile": True})
        assert describe_fused(trainer.policy) == "0 layers, 7 pieces, 0 heads"
        return two_steps(trainer)


@pytest.mark.timeout(900)  # a C++ compiler on a busy machine
def test_what_a_cpu_compiles_does_too(accelerator: Accelerator, tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    expected = steps_of(accelerator, tmp_path, {})
    settings = {"sharding": "full", "gradient_checkpointing": True}
    assert_alike(on_two_ranks(compiled_on_a_cpu, tmp_path, settings), expected)
