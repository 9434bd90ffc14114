"""Nothing that decides about the numbers is decided by each rank for itself; where ranks differ all the same, all stop and say in what."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from safetensors.torch import load_file, save_file

from learner.training.batch import BatchRow, trained_rows
from learner.training.distributed import layout_of, make_accelerator, plan_of
from learner.training.step import advantages
from protocol.model_files import resolve_model
from tests.learner.ranks import be_ranks, on_two_ranks, places_of
from tests.learner.training.disagreement import (
    METRICS,
    a_run,
    a_trainer,
    agree_in_a_step,
    compile_on_one,
    deepseek_v3,
    differ_at_the_start,
    differ_in_a_step,
    differ_in_sharding,
    falcon_h1,
    keep_buffers,
    save_random,
    settle_on_one,
    train_a_step,
)
from tests.learner.training.fixed_groups import make_groups
from tests.learner.training.sharding import FSDP2

WRITTEN_BY_ACCELERATE_CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_version: 2
machine_rank: 0
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""


@pytest.fixture
def accelerator() -> Iterator[Accelerator]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield make_accelerator(cpu=True)
    AcceleratorState._reset_state(reset_partial_state=True)


WAYS = {
    "accelerate launch": FSDP2,
    "accelerate launch, nothing wrapped": FSDP2[:3],
    "every rank loads": (*FSDP2, "--fsdp_cpu_ram_efficient_loading", "false"),
    "accelerate config": None,
}


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=pytest.mark.slow if way.endswith("nothing wrapped") else []) for way in WAYS]
)
def test_ranks_that_hold_zeros_go_the_way_of_rank_0(accelerator: Accelerator, tmp_path: Path, way: str) -> None:
    config = tmp_path / "accelerate.yaml"
    config.write_text(WRITTEN_BY_ACCELERATE_CONFIG)
    save_random(falcon_h1(), tmp_path / "model")
    train_a_step(accelerator, tmp_path / "model", tmp_path / "one")
    switches = WAYS[way] or ("--config_file", str(config))
    on_two_ranks(train_a_step, tmp_path / "model", tmp_path / "two", is_sharded=True, switches=switches)
    one, two = (json.loads((tmp_path / name).read_text()) for name in ("one", "two"))
    assert two["attention"] == one["attention"] != "slipstream_pack"
    assert [two[name] for name in METRICS] == pytest.approx([one[name] for name in METRICS], rel=1e-4)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_rank_0_alone_settles_the_attention(is_sharded: bool) -> None:
    on_two_ranks(settle_on_one, is_sharded=is_sharded)


def test_what_cannot_be_compiled_on_one_rank_is_compiled_on_none() -> None:
    on_two_ranks(compile_on_one)


def test_buffers_of_a_checkpoint_reach_ranks_that_have_not_loaded_it(tmp_path: Path) -> None:
    save_random(deepseek_v3(), tmp_path)
    on_two_ranks(keep_buffers, tmp_path, is_sharded=True)


def test_ranks_that_are_about_to_differ_in_a_step_stop_before_its_first_pass() -> None:
    on_two_ranks(differ_in_a_step)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_ranks_that_do_the_same_go_on(is_sharded: bool) -> None:
    on_two_ranks(agree_in_a_step, is_sharded=is_sharded)


def test_ranks_with_another_config_or_model_stop_at_the_start(tmp_path: Path) -> None:
    shutil.copytree(resolve_model("tiny:digits"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file({name: tensor + 0.01 for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    on_two_ranks(differ_at_the_start, tmp_path / "model")


def test_ranks_of_which_one_was_launched_without_fsdp_stop_at_the_start() -> None:
    sharded, plain = places_of(2, is_sharded=True)
    plain = msgspec.structs.replace(plain, is_sharded=False, launched={})
    be_ranks([sharded, plain], differ_in_sharding)


def test_a_plan_tells_rows_apart_by_their_prompt_group_and_episode(accelerator: Accelerator) -> None:
    trainer = a_trainer(accelerator, a_run())
    groups, layout = make_groups(trainer.policy), layout_of(accelerator, trainer.policy, trainer.config)
    first, *others = trained_rows(groups, advantages(groups, trainer.config), trainer.config)

    def digest(row: BatchRow) -> str:
        rows = [row, *others]
        return plan_of(trainer.policy, rows, [[rows]], layout, "step 6").rows

    changes = {"prompt_token_ids": first.prompt_token_ids + 1, "group": 7, "place": 7}
    changed = [msgspec.structs.replace(first, **{field: value}) for field, value in changes.items()]
    assert digest(msgspec.structs.replace(first)) == digest(first)
    assert len({digest(row) for row in (first, *changed)}) == 4
