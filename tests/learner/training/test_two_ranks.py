"""Two ranks, each with the whole policy or with FSDP2's half of it, and two nodes of two compute, push and save what
one does."""

import math
import weakref
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

import learner.policy.published
from learner.config import ReferenceConfig
from learner.forward.logprobs import token_logprobs
from learner.policy.model import load_policy
from learner.policy.published import PublishedPolicy
from learner.policy.reference import Reference
from learner.policy.sharding import shard
from learner.policy.snapshot import whole
from learner.run_inputs import RunInputs
from learner.storage.checkpoint import load_checkpoint
from learner.training.batch import trained_rows
from learner.training.distributed import my_batches
from learner.training.metrics import StepTimer
from learner.training.policy_trainer import PolicyTrainer, make_trainer
from learner.training.precompute import precompute_logprobs
from learner.training.step import advantages, train_on
from protocol.errors import ParityError, RankFailed
from protocol.weights.buckets import dtype_on_wire
from tests.learner.checkpoints import save
from tests.learner.ranks import on_four_ranks, on_two_ranks
from tests.learner.training.fixed_groups import VERSION, make_groups, make_moved_trainer, make_run
from tests.learner.training.gradients import gradients
from tests.zoo.families import save_model

pytestmark = pytest.mark.system

WHOLE_AND_SHARDED = pytest.mark.parametrize("sharding", ["none", "full"])
STEPS = range(VERSION, VERSION + 4)
SAVED_AFTER = STEPS[2]
LORA = {
    "lora": {"rank": 4},
    "reference": {"kind": "mixture", "every_steps": 1, "num_snapshots": 2},
    "optimizer": {"learning_rate": 5e-3, "max_grad_norm": 0.1},
}
TRAINED: dict[str, tuple[dict[str, Any], float]] = {
    "all weights": ({}, 1e-5),
    "all weights, warm at the start": ({"warm_start": {"steps": 3, "learning_rate": 3e-3, "rows_per_step": 5}}, 1e-4),
    "all weights in bfloat16": (
        {"dtype": "bfloat16", "gradient_checkpointing": True},
        1e-2,
    ),  # where ranks round elsewhere
    "adapter": (LORA, 1e-5),
    "adapter in bfloat16": (LORA | {"dtype": "bfloat16"}, 1e-2),
}
"""Settings, and how far two ranks may be from one."""


def assert_close(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        # Keys have no gradient from their bias, but rounding, of which Adam makes steps as large as any.
        if not name.endswith("c_attn.bias"):
            torch.testing.assert_close(found[name], value, atol=tolerance, rtol=tolerance, msg=name)


def assert_same_bytes(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert expected and [name for name in expected if not torch.equal(found[name], expected[name])] == []


@WHOLE_AND_SHARDED
def test_gradients_are_those_of_one_rank_whatever_the_config_and_the_micro_batches(
    accelerator: Accelerator, sharding: str
) -> None:
    expected = gradients(accelerator, micro_batch_tokens=1000)
    num_tokens = 20 if sharding == "none" else 1
    for found in on_two_ranks(partial(gradients, micro_batch_tokens=num_tokens, sharding=sharding)):
        assert_close(found, expected)


def a_trainer(accelerator: Accelerator, dtype: str = "float32", **learner: Any) -> PolicyTrainer:
    reference = {"reference": {"kind": "ema", "alpha": 0.5, "every_steps": 1}, "kl": {"coef": 0.3}}
    optimizer = {"optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.1}}
    settings = reference | optimizer | {"micro_batch_tokens": 20, "checkpoint": {"export_model": True}} | learner
    run = msgspec.structs.replace(make_run(**settings), dtype=dtype)
    torch.manual_seed(0)
    return make_trainer(RunInputs(run), accelerator, is_new=True)


def pushed(trainer: PolicyTrainer, when: str) -> dict[str, torch.Tensor]:
    """The weights that would be pushed, merged and apart from their adapter; on rank 0."""
    published = trainer.published
    with published.led():
        if not trainer.accelerator.is_main_process:
            return {}
        found = {f"{when}/{name}": tensor for name, tensor in published.tensors()}
        if published.adapter is not None:
            apart = chain(published.frozen_tensors(), published.adapter_tensors())
            found |= {f"{when}/apart/{name}": tensor for name, tensor in apart}
        wire_dtype = published.wire_dtype
        return {name: one.detach().to(dtype_on_wire(one, wire_dtype), copy=True) for name, one in found.items()}


def train(accelerator: Accelerator, settings: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Metrics and weights of four steps, with a checkpoint before the last."""
    trainer = a_trainer(accelerator, **settings)
    groups = make_groups(accelerator.unwrap_model(trainer.policy), num_completions=3)
    found: dict[str, Any] = pushed(trainer, "first")
    for version in STEPS:
        found |= step(trainer, groups, version)
        if version == SAVED_AFTER:
            save(trainer, directory, version)
            found |= pushed(trainer, "saved")
    return found | pushed(trainer, "last")


def step(trainer: PolicyTrainer, groups: list, version: int) -> dict[str, Any]:
    metrics = train_on(trainer, groups, version, StepTimer())
    metrics |= trainer.after_step(version + 1, metrics)
    return {f"{name} of step {version}": value for name, value in metrics.items()}


def resume(accelerator: Accelerator, settings: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Take the last step again."""
    trainer = a_trainer(accelerator, **settings)
    groups = make_groups(accelerator.unwrap_model(trainer.policy), num_completions=3)
    load_checkpoint(trainer, checkpoint)
    return pushed(trainer, "saved") | step(trainer, groups, STEPS[-1]) | pushed(trainer, "last")


SHARED_BY = {"none": on_two_ranks, "full": on_two_ranks, "hybrid": on_four_ranks}


@pytest.mark.parametrize(
    ("trained", "sharding"),
    [*product(TRAINED, ["none", "full"]), ("all weights", "hybrid"), ("adapter", "hybrid")],
)
def test_steps_pushes_and_checkpoints_are_those_of_one_rank(
    accelerator: Accelerator, tmp_path: Path, trained: str, sharding: str
) -> None:
    settings, tolerance = TRAINED[trained]
    settings, on_ranks = settings | {"sharding": sharding}, SHARED_BY[sharding]
    paths = [tmp_path / ranks / f"step-{SAVED_AFTER:06d}" for ranks in ("one", "several")]
    for path in paths:
        path.parent.mkdir()
    one = train(accelerator, settings, paths[0].parent)
    several, *_ = on_ranks(train, settings, paths[1].parent)
    assert_close(several, one, tolerance)
    assert max(abs(one[f"loss/policy of step {version}"]) for version in STEPS) > 0.01
    if "lora" in settings:
        assert_close(*(load_file(path / "adapter" / "adapter_model.safetensors") for path in paths), tolerance)

    resumed_by_several, *_ = on_ranks(resume, settings, paths[0])
    accelerator.free_memory()  # forgets the first run's policy
    resumed_by_one = resume(accelerator, settings, paths[1])
    for resumed, saver in ((resumed_by_several, one), (resumed_by_one, several)):
        assert_close(resumed, {name: one[name] for name in resumed}, tolerance)
        assert_same_bytes(resumed, {name: tensor for name, tensor in saver.items() if name.startswith("saved/")})
    exported = load_file(paths[1] / "model" / "model.safetensors")
    assert_same_bytes(exported, {name: several[f"saved/{name}"].to(tensor.dtype) for name, tensor in exported.items()})


def compare_passes_in_bfloat16(accelerator: Accelerator) -> None:
    """The pass before a step, the reference's and a training pass must agree to the bit, or the first ratio is not
    1, nor the KL 0."""
    decoupled = {"off_policy_correction": {"anchor": "proximal", "weight": "truncate"}, "updates_per_batch": 2}
    run = msgspec.structs.replace(make_run(**decoupled, micro_batch_tokens=20, sharding="full"), dtype="bfloat16")
    trainer = make_moved_trainer(run, accelerator)
    groups = make_groups(trainer.policy, num_completions=3)
    rows = trained_rows(groups, advantages(groups, run.learner), run.learner)
    batches = my_batches(accelerator, trainer.policy, rows, trainer.config, "the step")
    batches = precompute_logprobs(trainer, batches, VERSION, StepTimer())
    temperature = run.learner.sampling.temperature
    reference = Reference(ReferenceConfig(kind="fixed"), trainer.policy, accelerator, temperature)
    references = reference.logprobs(trainer.policy, [batch.pack for batch in batches])
    for batch, reference_BT in zip(batches, references, strict=True):
        logprobs_BT, _ = token_logprobs(trainer.policy, batch.pack, temperature)
        assert torch.equal(logprobs_BT, batch.proximal_logprobs_BT)
        assert torch.equal(logprobs_BT, reference_BT)
    logprobs_BT.sum().backward()
    for parameter in trainer.policy.parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32
    gradient = trainer.policy.transformer.h[0].mlp.c_fc.weight.grad
    assert not torch.equal(gradient, gradient.bfloat16().float()), "it was reduced in bfloat16"


def lead_and_follow(accelerator: Accelerator) -> None:
    """A push that breaks off, a pass, a push; then an error of rank 0's, at which no rank may hang."""
    policy = a_trainer(accelerator, sharding="full").policy
    expected = {name: whole(parameter.detach()) for name, parameter in policy.named_parameters()}
    published = PublishedPolicy(accelerator, policy, torch.bfloat16)
    with published.led():
        if accelerator.is_main_process:
            broken_off = iter(published.tensors())
            next(broken_off), next(broken_off)
            assert published.logprobs([[1, 2, 3]]).shape == (2,)
            found = dict(published.tensors())
            assert list(found) == list(expected)
            assert all(torch.equal(found[name], tensor.bfloat16()) for name, tensor in expected.items())
    with pytest.raises(ParityError if accelerator.is_main_process else RankFailed), published.led():
        if accelerator.is_main_process:
            raise ParityError("apart")


class EightTensors(PreTrainedModel):
    """Of the same size."""

    config_class = PreTrainedConfig
    _no_split_modules = ()

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
        self.post_init()

    def get_input_embeddings(self) -> None:
        return None


def gather_one_tensor_at_a_time(accelerator: Accelerator) -> None:
    """While rank 0 reads a model of eight equal tensors."""
    model = EightTensors(PreTrainedConfig())
    fully_shard(model)
    held, most = 0, 0

    def counted(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal held, most
        gathered = whole(tensor)
        held += gathered.nbytes
        most = max(most, held)
        weakref.finalize(gathered, release, gathered.nbytes)
        return gathered

    def release(num_bytes: int) -> None:
        nonlocal held
        held -= num_bytes

    learner.policy.published.whole = counted
    published = PublishedPolicy(accelerator, model, torch.float32)
    with published.led():
        if accelerator.is_main_process:
            assert sum(1 for _ in published.tensors()) == 8
    # Rank 0 holds one tensor while it asks for the next.
    assert (held, most) == (0, (2 if accelerator.is_main_process else 1) * 64 * 64 * 4)


@pytest.mark.parametrize("work", [compare_passes_in_bfloat16, lead_and_follow, gather_one_tensor_at_a_time])
def test_ranks_that_share_a_policy_act_as_one(work: Any) -> None:
    on_two_ranks(work)


def push_experts(accelerator: Accelerator, path: Path) -> None:
    """A checkpoint with tensors that are joined in memory goes out as it came in."""
    policy = load_policy(path, gradient_checkpointing=False)
    shard(policy, (2,), "cpu", torch.float32)
    assert any(isinstance(parameter, DTensor) for name, parameter in policy.named_parameters() if "experts" in name)
    published = PublishedPolicy(accelerator, policy, torch.float32)
    with published.led():
        if accelerator.is_main_process:
            found, expected = dict(published.tensors()), load_file(path / "model.safetensors")
            assert found.keys() == expected.keys() and any(".experts.3.w2." in name for name in found)
            assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_experts_leave_two_ranks_under_the_names_of_their_checkpoint(tmp_path: Path) -> None:
    save_model("mixtral", tmp_path)
    on_two_ranks(push_experts, tmp_path)


def hold_each_gradient_once(accelerator: Accelerator, settings: dict[str, Any]) -> None:
    """In DDP's buckets, before the first of several micro-batches and after a step."""
    trainer = a_trainer(accelerator, sharding="none", **settings)
    groups = make_groups(accelerator.unwrap_model(trainer.policy), num_completions=3)
    places = [parameter.grad.data_ptr() for parameter in trainer.policy.parameters()]
    for version in STEPS[:2]:
        train_on(trainer, groups, version, StepTimer())
        found = [parameter.grad for parameter in trainer.policy.parameters()]
        assert [gradient.data_ptr() for gradient in found] == places
        assert not any(gradient.any() for gradient in found)
    assert len({gradient.untyped_storage().data_ptr() for gradient in found}) < len(found), "not in buckets"


@pytest.mark.parametrize("settings", [{}, {"warm_start": {"steps": 2, "learning_rate": 1e-3}}])
def test_unsharded_ranks_hold_each_gradient_once(settings: dict[str, Any]) -> None:
    on_two_ranks(hold_each_gradient_once, settings)


def skip_where_one_rank_is_poisoned(accelerator: Accelerator, sharding: str) -> None:
    trainer = make_moved_trainer(make_run(sharding=sharding), accelerator)
    policy = accelerator.unwrap_model(trainer.policy)
    groups, before = make_groups(policy), [whole(parameter).clone() for parameter in policy.parameters()]

    def num_changed() -> int:
        pairs = zip(policy.parameters(), before, strict=True)
        return sum(not torch.equal(whole(parameter), tensor) for parameter, tensor in pairs)

    if accelerator.process_index == 1:
        poisoned = policy.transformer.ln_f.register_forward_hook(lambda module, inputs, output: output * math.nan)
    metrics = train_on(trainer, groups, VERSION, StepTimer())
    assert metrics["optim/skipped_updates"] == 1 and num_changed() == 0
    if accelerator.process_index == 1:
        poisoned.remove()
    assert train_on(trainer, groups, VERSION, StepTimer())["optim/skipped_updates"] == 0
    assert num_changed() > 0


@WHOLE_AND_SHARDED
def test_all_ranks_skip_an_update_when_the_gradient_of_one_is_no_number(sharding: str) -> None:
    on_two_ranks(skip_where_one_rank_is_poisoned, sharding)
