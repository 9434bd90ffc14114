"""The optimizer against the formula of AdamW, and the learning rate against transformers' schedulers, stepped along."""

import sys
from pathlib import Path

import msgspec
import pytest
import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, get_scheduler

from learner.config import OptimizerConfig
from learner.policy.host_adamw import HostAdamW, keeps_on_host
from learner.policy.memory import learner_memory
from learner.policy.model_shape import shape_of
from learner.run_inputs import RunInputs
from learner.storage.checkpoint import load_checkpoint
from learner.training.metrics import StepTimer
from learner.training.optimizer import learning_rate, make_optimizer
from learner.training.policy_trainer import PolicyTrainer, make_trainer
from learner.training.step import train_on
from protocol.errors import ConfigError
from protocol.model_files import resolve_model
from tests.learner.checkpoints import save
from tests.learner.training.fixed_groups import VERSION, make_groups, make_run

STEPS = 4
NUM_STEPS = 11
SETTINGS = OptimizerConfig(learning_rate=3e-3, beta1=0.8, beta2=0.95, weight_decay=0.1)


def gradients_of(shape: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator) for _ in range(STEPS)]


def adamw(weights: torch.Tensor, gradients: list[torch.Tensor]) -> torch.Tensor:
    """Algorithm 2 of arXiv 1711.05101, in float64."""
    w, m, v = weights.double(), torch.zeros_like(weights.double()), torch.zeros_like(weights.double())
    for t, gradient in enumerate(gradients, 1):
        g = gradient.double()
        m = SETTINGS.beta1 * m + (1 - SETTINGS.beta1) * g
        v = SETTINGS.beta2 * v + (1 - SETTINGS.beta2) * g * g
        direction = (m / (1 - SETTINGS.beta1**t)) / ((v / (1 - SETTINGS.beta2**t)).sqrt() + 1e-8)
        w = w - SETTINGS.learning_rate * (direction + SETTINGS.weight_decay * w)
    return w


def stepped(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, gradients: list[torch.Tensor]) -> torch.Tensor:
    for gradient in gradients:
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach()


def holder(*parameters: nn.Parameter) -> nn.Module:
    return nn.ParameterList(parameters)


def test_a_few_steps_are_those_of_the_formula_and_frozen_parameters_have_no_moments() -> None:
    weights, gradients = torch.randn(37, 29), gradients_of((37, 29))
    trained, frozen = nn.Parameter(weights.clone()), nn.Parameter(torch.ones(3, 1), requires_grad=False)
    optimizer = make_optimizer(holder(trained, frozen), SETTINGS, SETTINGS.learning_rate)
    found = stepped(optimizer, trained, gradients)
    torch.testing.assert_close(found.double(), adamw(weights, gradients), atol=1e-6, rtol=0)
    assert optimizer.param_groups[0]["fused"] and list(optimizer.state) == [trained]


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_only_matrices_decay(kind: str) -> None:
    if kind == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
            attention_bias=True, tie_word_embeddings=True,
        )
    )  # fmt: skip
    before = {name: parameter.detach().clone() + 1 for name, parameter in model.named_parameters()}
    model.load_state_dict(before, strict=False)
    optimizer = make_optimizer(model, msgspec.structs.replace(SETTINGS, kind=kind), 0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    decayed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    matrices = {name for name in before if name.endswith("_proj.weight")}
    assert decayed == matrices and len(matrices) == 7 and "model.embed_tokens.weight" in before
    for name in matrices:
        torch.testing.assert_close(model.get_parameter(name).detach(), before[name] * (1 - 0.1 * 0.1))


IN_8_BITS = make_run(optimizer={"kind": "adamw_8bit", "learning_rate": 1e-3})


def steps(trainer: PolicyTrainer, versions: range) -> None:
    groups = make_groups(trainer.policy)
    for version in versions:
        train_on(trainer, groups, version, StepTimer())


def test_moments_of_8_bits_take_a_quarter_and_resume_exactly(accelerator: Accelerator, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    whole = make_trainer(RunInputs(IN_8_BITS), accelerator, is_new=True)
    steps(whole, range(VERSION, VERSION + 2))
    save(whole, tmp_path, VERSION)
    state = whole.optimizer.state.values()
    shape = shape_of(AutoConfig.from_pretrained(resolve_model("tiny:digits")))
    size = sum(
        moments[key].nbytes for moments in state for key in moments.keys() & {"state1", "state2", "absmax1", "absmax2"}
    )
    assert size == pytest.approx(learner_memory(shape, IN_8_BITS).device["optimizer"], rel=0.2)
    steps(whole, range(VERSION + 2, VERSION + 4))
    accelerator.free_memory()
    resumed = make_trainer(RunInputs(IN_8_BITS), accelerator, is_new=False)
    load_checkpoint(resumed, tmp_path / f"step-{VERSION:06d}")
    steps(resumed, range(VERSION + 2, VERSION + 4))
    for (name, found), expected in zip(resumed.policy.named_parameters(), whole.policy.parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_moments_in_host_memory_give_the_same_bits_and_resume_in_either_place(
    accelerator: Accelerator, tmp_path: Path
) -> None:
    def a_trainer(*, offload: bool) -> PolicyTrainer:
        optimizer = {"offload": offload, "learning_rate": 1e-3, "weight_decay": 0.1}
        return make_trainer(RunInputs(make_run(optimizer=optimizer)), accelerator, is_new=True)

    ends = []
    for before, after in ((False, False), (True, True), (True, False), (False, True)):
        first = a_trainer(offload=before)
        steps(first, range(VERSION, VERSION + 2))
        save(first, directory := tmp_path / f"{before}{after}", VERSION)
        accelerator.free_memory()
        resumed = a_trainer(offload=after)
        load_checkpoint(resumed, directory / f"step-{VERSION:06d}")
        assert keeps_on_host(resumed.optimizer) == after
        steps(resumed, range(VERSION + 2, VERSION + 4))
        ends.append({name: parameter.detach().clone() for name, parameter in resumed.policy.named_parameters()})
        accelerator.free_memory()
    for end in ends[1:]:
        assert [name for name in end if not torch.equal(end[name], ends[0][name])] == []


def test_a_resume_with_moments_in_host_memory_counts_steps_on_the_device_as_the_fused_kernel_needs() -> None:
    parameter = nn.Parameter(torch.ones(3, device="meta"))
    optimizer = HostAdamW([parameter])
    read = {"step": torch.ones(()), "exp_avg": torch.zeros(3), "exp_avg_sq": torch.zeros(3)}
    optimizer.load_state_dict({"state": {0: read}, "param_groups": optimizer.state_dict()["param_groups"]})
    devices = {name: tensor.device.type for name, tensor in optimizer.state[parameter].items()}
    assert devices == {"step": "meta", "exp_avg": "cpu", "exp_avg_sq": "cpu"}


def test_without_its_library_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.delitem(sys.modules, "bitsandbytes.optim", raising=False)
    with pytest.raises(ConfigError, match=r"adamw_8bit. needs bitsandbytes .*pip install .*\[adamw-8bit\]'"):
        make_optimizer(holder(nn.Parameter(torch.ones(3))), IN_8_BITS.learner.optimizer, 1e-3)


@pytest.mark.parametrize("warmup_steps", [0, 4, NUM_STEPS])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_every_step_has_the_learning_rate_of_a_scheduler_but_none_is_0(schedule: str, warmup_steps: int) -> None:
    """transformers' own begins its warm-up with a step of 0; ours is one ahead of it until the peak."""
    config = OptimizerConfig(learning_rate=3e-4, schedule=schedule, warmup_steps=warmup_steps)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=config.learning_rate)
    name = "constant_with_warmup" if schedule == "constant" else schedule
    scheduler = get_scheduler(name, optimizer, warmup_steps, num_training_steps=NUM_STEPS)
    rates = []
    for _ in range(NUM_STEPS):
        rates.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    expected = [*rates[1:warmup_steps], *[config.learning_rate] * (warmup_steps > 0), *rates[warmup_steps:]]
    found = [learning_rate(config, version, NUM_STEPS) for version in range(NUM_STEPS)]
    assert found == pytest.approx(expected, abs=1e-12) and min(found) > 0
