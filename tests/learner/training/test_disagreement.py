"""Nothing that decides about the numbers is decided by each rank for itself; where ranks differ all the same, all
stop and say in what."""

import math
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

from learner.config import LearnerRun
from learner.forward.compile import describe_fused
from learner.run_inputs import RunInputs
from learner.training.batch import BatchRow, trained_rows
from learner.training.distributed import StepPlan, layout_of, plan_of
from learner.training.metrics import StepTimer
from learner.training.policy_trainer import PolicyTrainer, make_trainer
from learner.training.step import advantages, train_on
from protocol.errors import ConfigError, RanksDisagree
from protocol.model_files import resolve_model
from tests.learner.forward.spelt_kernel import like_a_gpu, trace_only
from tests.learner.ranks import on_two_ranks
from tests.learner.training.fixed_groups import VERSION, a_run, make_groups
from tests.zoo.families import LM

pytestmark = pytest.mark.system


def a_trainer(accelerator: Accelerator, run: LearnerRun) -> PolicyTrainer:
    return make_trainer(RunInputs(run), accelerator, is_new=True)


def save_random(config: PreTrainedConfig, path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(resolve_model("tiny:digits")).save_pretrained(path)


MAMBA = {"mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 16}


def train_a_step(accelerator: Accelerator, model: Path) -> tuple[str, list[float]]:
    """The attention and what was measured."""
    trainer = a_trainer(accelerator, a_run(model, sharding="full"))
    metrics = train_on(trainer, make_groups(trainer.policy), VERSION, StepTimer())
    attention: str = accelerator.unwrap_model(trainer.policy).config._attn_implementation
    return attention, [metrics[name] for name in ("loss/policy", "policy/entropy", "optim/grad_norm")]


def test_a_padded_policy_is_shared_by_two_ranks(accelerator: Accelerator, tmp_path: Path) -> None:
    """Attention and Mamba side by side: its state leaks from one sequence of a pack to the next, so it must not go
    packed."""
    save_random(transformers.FalconH1Config(**LM | MAMBA), tmp_path)
    attention, expected = train_a_step(accelerator, tmp_path)
    for of_rank, found in on_two_ranks(train_a_step, tmp_path):
        assert of_rank == attention != "slipstream_pack"
        assert found == pytest.approx(expected, rel=1e-4)


def compile_on_one(accelerator: Accelerator, model: Path) -> str:
    """Rank 1 has no compiler, which it notices in the middle of a pass that both make together."""
    with pytest.MonkeyPatch.context() as patch:
        like_a_gpu(patch), trace_only(patch, no_compiler if accelerator.process_index else "aot_eager")
        trainer = a_trainer(accelerator, a_run(model, compile=True, sharding="full"))
    return describe_fused(trainer.policy)


def no_compiler(*_: object) -> None:
    raise RuntimeError("no compiler")


def test_what_cannot_be_compiled_on_one_rank_is_compiled_on_none(tmp_path: Path) -> None:
    save_random(transformers.LlamaConfig(**LM), tmp_path)
    assert on_two_ranks(compile_on_one, tmp_path) == ["0 layers, 0 pieces, 0 heads"] * 2


def differ_in_a_step(accelerator: Accelerator) -> None:
    """Rank 1 has lost a group."""
    trainer = a_trainer(accelerator, a_run())
    groups = make_groups(trainer.policy)
    accelerator.unwrap_model(trainer.policy).register_forward_pre_hook(lambda *_: pytest.fail("a pass has begun"))
    with pytest.raises(
        RanksDisagree, match=r"num_rows is 12 on rank 0 and 8 on rank 1.* No rank has changed its weights"
    ):
        train_on(trainer, groups[accelerator.process_index :], VERSION, StepTimer())


def test_ranks_that_are_about_to_differ_in_a_step_stop_before_its_first_pass() -> None:
    on_two_ranks(differ_in_a_step)


def test_a_plan_tells_apart_whatever_changes_the_numbers_of_a_step(accelerator: Accelerator) -> None:
    trainer = a_trainer(accelerator, a_run())
    policy, groups = trainer.policy, make_groups(trainer.policy)
    layout = layout_of(accelerator, policy, trainer.config)
    rows = trained_rows(groups, advantages(groups, trainer.config), trainer.config)

    def plan(first: BatchRow = rows[0], num_others: int = 8, turned: bool = False, **changes: Any) -> StepPlan:
        planned = [first, *rows[1 : 1 + num_others]]
        shares = [[planned[:3]], [planned[3:]]]
        given = {"layout": layout, "step": "step 6"} | changes
        return plan_of(policy, planned, shares[::-1] if turned else shares, **given)

    plain = plan()
    assert plan(first=msgspec.structs.replace(rows[0])) == plain
    for change in (
        {"step": "step 7"},
        {"layout": layout_of(accelerator, policy, a_run(micro_batch_tokens=40).learner)},
        {"num_others": 7},
        {"turned": True},
        {"first": msgspec.structs.replace(rows[0], prompt_token_ids=rows[0].prompt_token_ids + 1)},
        {"first": msgspec.structs.replace(rows[0], group=7)},
        {"first": msgspec.structs.replace(rows[0], episode=7)},
    ):
        assert plan(**change) != plain, change
    branch = msgspec.structs.replace(rows[0].branch, token_ids=rows[0].branch.token_ids + 1)
    assert plan(first=msgspec.structs.replace(rows[0], branch=branch)) != plain
    policy.transformer.h[0].mlp.compile()
    compiled = plan()
    policy.set_attn_implementation("eager")
    assert plain != compiled != plan()


def differ_at_the_start(accelerator: Accelerator, other_model: Path) -> None:
    """Rank 1 has read another config, or other files of the model."""
    run = a_run()
    cases = {
        "learner.loss.dual_clip is null on rank 0 and inf on rank 1": a_run(loss={"dual_clip": math.inf}),
        'dtype is "float32" on rank 0 and "bfloat16" on rank 1': msgspec.structs.replace(run, dtype="bfloat16"),
        'head_dtype is null on rank 0 and "float32" on rank 1': msgspec.structs.replace(run, head_dtype="float32"),
        "max_model_len is null on rank 0 and 64": msgspec.structs.replace(run, server={"max_model_len": 64}),
        "disagree: model is ": a_run(other_model),
    }
    for words, other_run in cases.items():
        with pytest.raises(RanksDisagree) as caught:
            a_trainer(accelerator, other_run if accelerator.process_index else run)
        assert words in str(caught.value) and "same config, model files" in str(caught.value), caught.value
    a_trainer(accelerator, a_run(cpu_cores=[accelerator.process_index]))


def test_ranks_with_another_config_or_model_stop_at_the_start(tmp_path: Path) -> None:
    shutil.copytree(resolve_model("tiny:digits"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file({name: tensor + 0.01 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    on_two_ranks(differ_at_the_start, tmp_path / "model")


def differ_in_nodes(accelerator: Accelerator) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = str(1 + accelerator.process_index)
    try:
        with pytest.raises(ConfigError, match="of 2 ranks one node has 2 and another fewer"):
            a_trainer(accelerator, a_run(sharding="hybrid"))
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = "2"


def test_ranks_that_count_other_nodes_stop_at_the_start() -> None:
    on_two_ranks(differ_in_nodes)
