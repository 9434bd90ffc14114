"""What each of two ranks does that might decide something else than the other, for `test_disagreement.py`."""

import itertools
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig

import learner.forward.compile
import learner.training.policy_trainer
from learner.config import LearnerRun
from learner.forward.compile import describe_fused
from learner.rank_agreement import first_problem
from learner.rollouts.rollout_group import RolloutGroup
from learner.run_inputs import RunInputs
from learner.training import distributed
from learner.training.batch import BatchRow, trained_rows
from learner.training.distributed import my_batches
from learner.training.metrics import StepTimer
from learner.training.packing import Layout, Piece, share_out, split_into_micro_batches
from learner.training.policy_trainer import PolicyTrainer, make_trainer
from learner.training.step import advantages, train_on
from protocol.errors import RanksDisagree
from protocol.model_files import resolve_model
from tests.learner.training.fixed_groups import VERSION, make_groups, make_run
from tests.zoo.families import LM

METRICS = ("loss/policy", "policy/entropy", "optim/grad_norm")


def falcon_h1() -> PreTrainedConfig:
    """Attention and Mamba side by side: its state leaks from one sequence of a pack to the next, so it must not go packed."""
    mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 2, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 16}
    return transformers.FalconH1Config(**LM | mamba)


def deepseek_v3() -> PreTrainedConfig:
    """The biases of its routers are buffers, and in its checkpoints."""
    attention = {
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
    }
    experts = {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
    }
    lm = {key: value for key, value in LM.items() if key != "head_dim"} | {"num_key_value_heads": 2}
    return transformers.DeepseekV3Config(**lm | attention | experts, first_k_dense_replace=1)


def save_random(config: PreTrainedConfig, path: Path) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(0.1 * torch.randn_like(tensor))
    model.save_pretrained(path)
    AutoTokenizer.from_pretrained(resolve_model("tiny:digits")).save_pretrained(path)


def a_run(model: Path | str = "tiny:digits", **learner: Any) -> LearnerRun:
    settings = {"micro_batch_tokens": 20, "optimizer": {"learning_rate": 1e-3}} | learner
    return msgspec.structs.replace(make_run(**settings), model=str(model))


def a_trainer(accelerator: Accelerator, run: LearnerRun) -> PolicyTrainer:
    return make_trainer(RunInputs(run), accelerator, is_new=True)


def everyones(accelerator: Accelerator, name: str) -> list[str]:
    """What the ranks call something, of at most 64 characters."""
    mine = torch.frombuffer(bytearray(name.encode().ljust(64)), dtype=torch.uint8)
    return [bytes(row).decode().strip() for row in accelerator.gather(mine[None]).tolist()]


def attention_of(accelerator: Accelerator, trainer: PolicyTrainer) -> list[str]:
    return everyones(accelerator, accelerator.unwrap_model(trainer.policy).config._attn_implementation)


def train_a_step(accelerator: Accelerator, model: Path, into: Path) -> None:
    """The attention of both ranks, and the metrics of a step, in a file."""
    trainer = a_trainer(accelerator, a_run(model))
    attention = attention_of(accelerator, trainer)
    assert len(set(attention)) == 1, attention
    metrics = train_on(trainer, make_groups(trainer.policy), VERSION, StepTimer())
    if accelerator.is_main_process:
        into.write_bytes(msgspec.json.encode({"attention": attention[0]} | {name: metrics[name] for name in METRICS}))


def settle_on_one(accelerator: Accelerator) -> None:
    """Each rank would settle on another attention, and rank 1 finds another map of the logits."""

    def settle(model: Any, *_: Any) -> None:
        assert accelerator.is_main_process, "only rank 0 is sure to have weights"
        model.set_attn_implementation("eager")

    learner.training.policy_trainer.choose_attention = settle
    assert attention_of(accelerator, a_trainer(accelerator, a_run())) == ["eager", "eager"]


def compile_on_one(accelerator: Accelerator) -> None:
    """Rank 1 has no compiler."""
    problem = None if accelerator.is_main_process else "no compiler"
    learner.forward.compile._pieces = lambda model: [model.transformer.h[0].mlp]
    learner.forward.compile._problem = lambda *_: problem
    policy = accelerator.unwrap_model(a_trainer(accelerator, a_run(compile=True)).policy)
    assert everyones(accelerator, describe_fused(policy)) == ["0 layers, 0 pieces, 0 heads"] * 2
    assert first_problem(accelerator, problem) == "on rank 1: no compiler"


def keep_buffers(accelerator: Accelerator, model: Path) -> None:
    """Those of the checkpoint are on every rank as they are in it, and would be pushed."""
    trainer = a_trainer(accelerator, a_run(model))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    expected = AutoModelForCausalLM.from_pretrained(model).state_dict() if accelerator.is_main_process else {}
    found = trainer.published.model.state_dict()[name]
    assert found.abs().max() > 0.01 and not isinstance(found, DTensor)
    if accelerator.is_main_process:
        assert torch.equal(found, expected[name])
    assert len(set(accelerator.gather(found.double().sum()[None]).tolist())) == 1
    train_on(trainer, make_groups(trainer.policy), VERSION, StepTimer())
    assert torch.equal(trainer.published.model.state_dict()[name], found)


WORDS = {
    "step": ["step 6", "step 7"],
    "attention": ['"slipstream_pack"', '"eager"', "layout.is_packed is true on rank 0 and false on rank 1"],
    "layout.max_tokens": ["20 on rank 0", "40 on rank 1"],
    "num_rows": ["12 on rank 0", "8 on rank 1"],
    "rows": [],
    "compiled": ["0 pieces", "1 pieces"],
    "micro_batches": [],
}
"""What ranks may be about to differ in, by the field that says so."""


def differ_in_a_step(accelerator: Accelerator) -> None:
    """Rank 1 is about to do something else, each time in another way; both must say so, before any pass."""
    for field, words in WORDS.items():
        trainer = a_trainer(accelerator, a_run())
        groups = make_groups(trainer.policy)
        accelerator.unwrap_model(trainer.policy).register_forward_pre_hook(lambda *_: pytest.fail("a pass has begun"))
        version = VERSION
        if accelerator.process_index == 1:
            trainer, groups, version = differing(field, trainer, groups)
        with pytest.raises(RanksDisagree) as caught:
            train_on(trainer, groups, version, StepTimer())
        said = str(caught.value)
        assert all(word in said for word in [f"{field} is ", "rank 0", "rank 1", "No rank has changed", *words]), said


def differing(
    field: str, trainer: PolicyTrainer, groups: list[RolloutGroup]
) -> tuple[PolicyTrainer, list[RolloutGroup], int]:
    model: Any = trainer.accelerator.unwrap_model(trainer.policy)
    match field:
        case "step":
            return trainer, groups, VERSION + 1
        case "attention":
            model.set_attn_implementation("eager")
        case "layout.max_tokens":
            trainer = msgspec.structs.replace(trainer, run=a_run(micro_batch_tokens=40))
        case "num_rows":
            groups = groups[:-1]
        case "rows":
            tokens = groups[0].completions[0].token_ids
            tokens[0] = 1 + tokens[0] % 15
        case "compiled":
            model.transformer.h[0].mlp.compile()
        case "micro_batches":
            distributed.share_out = share_out_otherwise
    return trainer, groups, VERSION


def share_out_otherwise(rows: list[BatchRow], num_ranks: int, layout: Layout) -> list[list[Piece]]:
    """As many micro-batches on each rank, of other rows."""
    (mine, other) = shares = share_out(rows, num_ranks, layout)
    sizes = [len(split_into_micro_batches(share, layout)) for share in shares]
    for i, j in itertools.product(range(len(mine)), range(len(other))):
        mine[i], other[j] = other[j], mine[i]
        if [len(split_into_micro_batches(share, layout)) for share in shares] == sizes:
            return shares
        mine[i], other[j] = other[j], mine[i]
    raise AssertionError("no two pieces can change places")


def agree_in_a_step(accelerator: Accelerator) -> None:
    """The same rows, made anew on each rank: nothing that differs between two processes may be in the plan."""
    trainer = a_trainer(accelerator, a_run(reference={"kind": "fixed"}, kl={"coef": 0.1}))
    rows = trained_rows(groups := make_groups(trainer.policy), advantages(groups, trainer.config), trainer.config)
    batches = my_batches(accelerator, trainer.policy, rows, trainer.config, trainer.position(VERSION))
    num_rows = accelerator.reduce(torch.tensor([sum(int(batch.mask_BT.any(1).sum()) for batch in batches)]), "sum")
    assert int(num_rows) == len(rows)
    assert np.isfinite(train_on(trainer, groups, VERSION, StepTimer())["loss/policy"])


def differ_at_the_start(accelerator: Accelerator, other_model: Path) -> None:
    """Rank 1 has read another config, or other files of the model."""
    cases = {
        "learner.optimizer.learning_rate is 0.001 on rank 0 and 0.002 on rank 1": a_run(
            optimizer={"learning_rate": 2e-3}
        ),
        "learner.loss.clip_high is null on rank 0 and 0.3 on rank 1": a_run(loss={"clip_high": 0.3}),
        "learner.loss.dual_clip is null on rank 0 and inf on rank 1": a_run(loss={"dual_clip": math.inf}),
        'dtype is "float32" on rank 0 and "bfloat16" on rank 1': msgspec.structs.replace(a_run(), dtype="bfloat16"),
        'head_dtype is null on rank 0 and "float32" on rank 1': msgspec.structs.replace(a_run(), head_dtype="float32"),
        "max_model_len is null on rank 0 and 64 on rank 1": msgspec.structs.replace(
            a_run(), server={"max_model_len": 64}
        ),
        "disagree: model is ": a_run(other_model),
    }
    for words, other_run in cases.items():
        with pytest.raises(RanksDisagree) as caught:
            a_trainer(accelerator, other_run if accelerator.process_index else a_run())
        assert words in str(caught.value) and "same config, model files" in str(caught.value), caught.value
    cores = {"cpu_cores": [accelerator.process_index]}
    a_trainer(accelerator, a_run(**cores))


def differ_in_sharding(accelerator: Accelerator) -> None:
    with pytest.raises(RanksDisagree, match=r'sharding is "FSDP2, .*" on rank 0 and "MULTI_CPU" on rank 1'):
        a_trainer(accelerator, a_run())
