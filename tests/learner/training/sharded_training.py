"""What each of two ranks does with a policy that FSDP2 shards between them, for `test_sharded_training.py`.

The same functions do it with a whole policy, where the test compares the two.
"""

import weakref
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel

import learner.policy.published
from learner.config import ReferenceConfig
from learner.forward.logprobs import token_logprobs
from learner.forward.pack import pack
from learner.policy.model import load_policy
from learner.policy.published import PublishedPolicy
from learner.policy.reference import Reference
from learner.policy.snapshot import trainable, whole
from learner.run_inputs import RunInputs
from learner.storage.checkpoint import load_checkpoint
from learner.training.batch import trained_rows
from learner.training.distributed import my_batches
from learner.training.metrics import StepTimer
from learner.training.policy_trainer import PolicyTrainer, make_trainer
from learner.training.precompute import precompute_logprobs
from learner.training.step import advantages, train_on
from protocol.errors import ParityError, RankFailed
from tests.learner.checkpoints import save
from tests.learner.training.fixed_groups import VERSION, make_groups, make_moved_trainer, make_run
from tests.learner.training.gradients import CONFIGS, gradient_of

OBJECTIVES = ("grpo", "decoupled", "top entropy and bonus", "kl in the loss", "kl in the reward")
STEPS = range(VERSION, VERSION + 4)
SAVED_AFTER = STEPS[2]
NUM_STEPS = 20


def gradients(accelerator: Accelerator, *, micro_batch_tokens: int) -> dict[str, torch.Tensor]:
    """The gradient of a step of nine rows: of two ranks one has one more than the other."""
    found = {}
    for name in OBJECTIVES:
        run = make_run(**CONFIGS[name], micro_batch_tokens=micro_batch_tokens)
        trainer = make_moved_trainer(run, accelerator)
        groups = make_groups(trainer.policy, num_completions=3)
        found[name] = gradient_of(trainer, groups)
    return found


def write_gradients(accelerator: Accelerator, path: Path) -> None:
    found = gradients(accelerator, micro_batch_tokens=1)
    if accelerator.is_main_process:
        save_file(found, path)


LORA = {
    "lora": {"rank": 4},
    "reference": {"kind": "mixture", "every_steps": 1, "num_snapshots": 2},
    "optimizer": {"learning_rate": 5e-3, "max_grad_norm": 0.1},
}


def a_trainer(accelerator: Accelerator, dtype: str = "float32", **learner: Any) -> PolicyTrainer:
    reference = {"reference": {"kind": "ema", "alpha": 0.5, "every_steps": 1}, "kl": {"coef": 0.3}}
    optimizer = {"optimizer": {"learning_rate": 1e-3, "max_grad_norm": 0.1}}
    settings = reference | optimizer | {"micro_batch_tokens": 20, "checkpoint": {"export_model": True}} | learner
    run = msgspec.structs.replace(make_run(**settings), dtype=dtype)
    torch.manual_seed(0)
    return make_trainer(RunInputs(run), accelerator, is_new=True)


def weights_of(accelerator: Accelerator, trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    """As they are pushed; on rank 0."""
    published, found = trainer.published, {}
    with published.led():
        if accelerator.is_main_process:
            found = {name: tensor.detach().clone() for name, tensor in published.tensors()}
    return found


def train_and_save(accelerator: Accelerator, directory: Path, settings: dict[str, Any]) -> None:
    """Four steps, a checkpoint before the last, and what was found in files."""
    trainer = a_trainer(accelerator, **settings)
    groups = make_groups(trainer.policy, num_completions=3)
    found, metrics = weights_of(accelerator, trainer), []
    tensors = {f"first/{name}": tensor for name, tensor in found.items()}
    for version in STEPS:
        metrics.append(train_on(trainer, groups, version, StepTimer()))
        metrics[-1] |= trainer.after_step(version + 1, metrics[-1])
        if version == SAVED_AFTER:
            save(trainer, directory, version)
    tensors |= {f"last/{name}": tensor for name, tensor in weights_of(accelerator, trainer).items()}
    if accelerator.is_main_process:
        save_file(tensors, directory / "found.safetensors")
        (directory / "metrics.json").write_bytes(msgspec.json.encode(metrics))


def resume(accelerator: Accelerator, directory: Path, into: Path, settings: dict[str, Any]) -> None:
    """Take the last step again, from the checkpoint of this or the other kind."""
    trainer = a_trainer(accelerator, **settings)
    groups = make_groups(trainer.policy, num_completions=3)
    load_checkpoint(trainer, directory / f"step-{SAVED_AFTER:06d}")
    tensors = {f"read/{name}": tensor for name, tensor in weights_of(accelerator, trainer).items()}
    train_on(trainer, groups, STEPS[-1], StepTimer())
    tensors |= {f"last/{name}": tensor for name, tensor in weights_of(accelerator, trainer).items()}
    if accelerator.is_main_process:
        save_file(tensors, into)


def train_long(accelerator: Accelerator, directory: Path, settings: dict[str, Any]) -> None:
    """Twenty steps, the losses in a file, a checkpoint in the end and what would be pushed then."""
    trainer = a_trainer(accelerator, **settings)
    groups = make_groups(trainer.policy, num_completions=3)
    metrics = []
    for version in range(VERSION, VERSION + NUM_STEPS):
        metrics.append(train_on(trainer, groups, version, StepTimer()))
        metrics[-1] |= trainer.after_step(version + 1, metrics[-1])
    save(trainer, directory, NUM_STEPS)
    pushed = weights_of(accelerator, trainer)
    if accelerator.is_main_process:
        (directory / "metrics.json").write_bytes(msgspec.json.encode(metrics))
        save_file(pushed, directory / "pushed.safetensors")


def push_again(accelerator: Accelerator, directory: Path, into: Path, settings: dict[str, Any]) -> None:
    """What would be pushed of that checkpoint."""
    trainer = a_trainer(accelerator, **settings)
    load_checkpoint(trainer, directory / f"step-{NUM_STEPS:06d}")
    pushed = weights_of(accelerator, trainer)
    if accelerator.is_main_process:
        save_file(pushed, into)


def lead_and_follow(accelerator: Accelerator) -> None:
    """A push that breaks off, a pass, a push; then an error of rank 0's, at which no rank may hang."""
    policy = a_trainer(accelerator).policy
    expected = {name: whole(parameter.detach()) for name, parameter in policy.named_parameters()}
    published = PublishedPolicy(accelerator, policy, torch.bfloat16)
    with published.led():
        if accelerator.is_main_process:
            broken_off = iter(published.tensors())
            next(broken_off), next(broken_off)
            assert published.logprobs([[1, 2, 3]]).shape == (2,)
            pushed = dict(published.tensors())
            assert list(pushed) == list(expected)
            assert all(torch.equal(pushed[name], tensor.bfloat16()) for name, tensor in expected.items())
    try:
        with published.led():
            if accelerator.is_main_process:
                raise ParityError("apart")
    except (ParityError, RankFailed) as error:
        assert isinstance(error, ParityError if accelerator.is_main_process else RankFailed)
    else:
        raise AssertionError("the others went on")


def push_experts(accelerator: Accelerator, path: Path) -> None:
    """A checkpoint with tensors that are joined in memory goes out as it came in."""
    policy = load_policy(path, gradient_checkpointing=False)
    policy, _ = accelerator.prepare(policy, torch.optim.SGD(policy.parameters()))
    assert any(isinstance(parameter, DTensor) for name, parameter in policy.named_parameters() if "experts" in name)
    published = PublishedPolicy(accelerator, policy, torch.float32)
    with published.led():
        if accelerator.is_main_process:
            pushed, expected = dict(published.tensors()), load_file(path / "model.safetensors")
            assert pushed.keys() == expected.keys() and any(".experts.3.w2." in name for name in pushed)
            assert all(torch.equal(pushed[name], tensor) for name, tensor in expected.items())


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


def count_bytes(accelerator: Accelerator) -> None:
    """What is gathered at a time while rank 0 reads a model of eight equal tensors."""
    model = EightTensors(PreTrainedConfig())
    model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
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


def compare_passes_in_bfloat16(accelerator: Accelerator) -> None:
    """A survey's pass, the reference's and a training pass must agree to the bit, or the first ratio is not 1, nor the KL 0."""
    settings = CONFIGS["decoupled"] | {"micro_batch_tokens": 20}
    run = msgspec.structs.replace(make_run(**settings), dtype="bfloat16")
    trainer = make_moved_trainer(run, accelerator)
    groups = make_groups(trainer.policy, num_completions=3)
    rows = trained_rows(groups, advantages(groups, run.learner), run.learner)
    batches = precompute_logprobs(
        trainer, my_batches(accelerator, trainer.policy, rows, trainer.config, "the step"), StepTimer()
    )
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


def pass_in_bfloat16(accelerator: Accelerator, model: Path, *, gradient_checkpointing: bool) -> dict[str, torch.Tensor]:
    """Logprobs and gradients of a run in bfloat16, by which each rank computes the same rows."""
    settings = {"gradient_checkpointing": gradient_checkpointing}
    run = msgspec.structs.replace(make_run(**settings), model=str(model), dtype="bfloat16")
    policy = make_trainer(RunInputs(run), accelerator, is_new=True).policy
    rows = torch.randint(1, 16, (3, 20), generator=torch.Generator().manual_seed(0)).numpy()
    logprobs_BT, _ = token_logprobs(policy, pack([(row[:1], [row[1:]]) for row in rows], accelerator.device), 1.0)
    accelerator.backward(logprobs_BT.sum())
    gradients = {name: whole(parameter.grad) for name, parameter in trainable(accelerator.unwrap_model(policy)).items()}
    return {"logprobs": logprobs_BT.detach()} | gradients


def write_pass_in_bfloat16(accelerator: Accelerator, model: Path, path: Path) -> None:
    found = pass_in_bfloat16(accelerator, model, gradient_checkpointing=False)
    again = pass_in_bfloat16(accelerator, model, gradient_checkpointing=True)
    assert all(torch.equal(again[name], tensor) for name, tensor in found.items())
    if accelerator.is_main_process:
        save_file(found, path)
