"""Which settings are chosen for a room, and what is advised where none fit."""

import itertools
from typing import Any

import msgspec
import pytest
from transformers import PretrainedConfig

from learner.config import LearnerRun
from learner.config.shared_gpu import ServersOnGpu
from learner.policy.memory import learner_memory
from learner.policy.memory_plan import MARGIN, Room, fits, make_plan, room_beside
from learner.policy.model_shape import ModelShape, shape_of
from protocol.errors import ConfigError
from tests.learner.policy.shapes import MOE_30B, QWEN_1_5B, QWEN_7B, QWEN_32B, QWEN_HALF_B
from tests.learner.training.fixed_groups import make_run

SHAPES: dict[str, PretrainedConfig] = {"0.5B": QWEN_HALF_B, "7B": QWEN_7B, "30B-A3B": MOE_30B}
LONG = {"sampling": {"group_size": 16, "max_tokens": 2048}}
PLANNED: dict[str, list[Any]] = {
    "sharding": ["none", "full"],
    "gradient_checkpointing": [False, True],
    "micro_batch_tokens": [16384, 8192, 4096, 2048],
    "optimizer.offload": [False, True],
}
"""Each from the fastest value to the one that takes least memory."""


def run_of(dtype: str = "bfloat16", **learner: Any) -> LearnerRun:
    return msgspec.structs.replace(make_run(**LONG | learner), dtype=dtype)


def settings_of(run: LearnerRun) -> dict[str, Any]:
    config = run.learner
    values = (config.sharding, config.gradient_checkpointing, config.micro_batch_tokens, config.optimizer.offload)
    return dict(zip(PLANNED, values, strict=True))


def with_settings(run: LearnerRun, settings: dict[str, Any]) -> LearnerRun:
    optimizer = msgspec.structs.replace(run.learner.optimizer, offload=settings["optimizer.offload"])
    others = {key: value for key, value in settings.items() if "." not in key}
    return msgspec.structs.replace(run, learner=msgspec.structs.replace(run.learner, optimizer=optimizer, **others))


def needs(shape: ModelShape, run: LearnerRun, settings: dict[str, Any], room: Room) -> bool:
    num_shards = room.num_ranks if settings["sharding"] == "full" else 1
    memory = learner_memory(shape, with_settings(run, settings), num_ranks=room.num_ranks, num_shards=num_shards)
    return fits(memory, room)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("num_ranks", [1, 8])
def test_a_plan_fits_and_nothing_that_it_gives_up_could_be_had(name: str, num_ranks: int) -> None:
    shape, run, plans = shape_of(SHAPES[name]), run_of(), []
    for gib in (16, 24, 32, 48, 80, 141, 280, 400, 1024):
        room = Room(num_ranks=num_ranks, ranks_per_node=num_ranks, device_gib=gib, host_gib=4000)
        every = [dict(zip(PLANNED, values, strict=True)) for values in itertools.product(*PLANNED.values())]
        possible = [one for one in every if needs(shape, run, one, room)]
        try:
            plan = make_plan(shape, run, room)
        except ConfigError:
            assert not possible or (num_ranks == 1 and all(one["sharding"] == "full" for one in possible))
            continue
        found = settings_of(plan.run)
        assert found in possible
        plans.append(found)
        for key, value in found.items():
            for faster in PLANNED[key][: PLANNED[key].index(value)]:
                assert found | {key: faster} not in possible, (gib, key)
    assert plans[-1] == {key: values[0] for key, values in PLANNED.items()}, "all of the fastest where there is room"
    assert plans[0] != plans[-1]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("sharding", "full"),
        ("gradient_checkpointing", True),
        ("micro_batch_tokens", 300),
        ("optimizer", {"offload": True}),
    ],
)
def test_a_value_that_is_set_is_kept(key: str, value: Any) -> None:
    room = Room(num_ranks=2, ranks_per_node=2, device_gib=1000, host_gib=1000)
    plan = make_plan(shape_of(QWEN_HALF_B), run_of(**{key: value}), room)
    expected = {
        "sharding": "none",
        "gradient_checkpointing": False,
        "micro_batch_tokens": 16384,
        "optimizer.offload": False,
    }
    name, found = ("optimizer.offload", True) if key == "optimizer" else (key, value)
    assert settings_of(plan.run) == expected | {name: found}


def test_ranks_of_a_node_share_its_host_memory_and_on_a_cpu_hold_everything_in_it() -> None:
    shape, run = shape_of(QWEN_HALF_B), run_of("float32", sharding="none")
    one = make_plan(shape, run, Room(device_type="cpu", host_gib=1000)).memory
    enough = (4 * one.device_gib + one.host_gib) / MARGIN
    for gib, is_enough in ((enough + 0.01, True), (enough - 0.01, False)):
        room = Room(device_type="cpu", host_gib=gib, num_ranks=8, ranks_per_node=4)
        assert (
            fits(
                learner_memory(
                    shape, make_plan(shape, run, Room(device_type="cpu", host_gib=1000)).run, device_type="cpu"
                ),
                room,
            )
            == is_enough
        )
    sharded = make_plan(
        shape, run_of("float32", sharding="auto"), Room(device_type="cpu", host_gib=30, num_ranks=4, ranks_per_node=4)
    )
    assert sharded.sharding == "full"


def test_copies_on_every_node_are_tried_before_shards_over_all() -> None:
    room = Room(num_ranks=16, ranks_per_node=8, device_gib=79, host_gib=1800)
    assert make_plan(shape_of(QWEN_7B), run_of(), room).sharding == "hybrid"
    assert make_plan(shape_of(QWEN_32B), run_of(), room).sharding == "full"


def test_nodes_with_different_numbers_of_ranks_hold_no_copies_of_the_shards() -> None:
    room = Room(num_ranks=15, ranks_per_node=8, nodes_are_alike=False, device_gib=79, host_gib=1800)
    assert make_plan(shape_of(QWEN_7B), run_of(), room).sharding == "full"


def test_passes_are_not_shortened_below_the_longest_row() -> None:
    shape, room = shape_of(QWEN_1_5B), Room(device_gib=22, host_gib=200)
    for max_tokens, least in ((2048, 2048), (6000, 4096)):
        run = run_of(sampling={"group_size": 4, "max_tokens": max_tokens}, gradient_checkpointing=False)
        with pytest.raises(ConfigError, match=f"micro_batch_tokens = {least}, gradient_checkpointing = false"):
            make_plan(shape, run, msgspec.structs.replace(room, device_gib=8))


def refusal(run: LearnerRun, room: Room, config: PretrainedConfig) -> str:
    with pytest.raises(ConfigError) as caught:
        make_plan(shape_of(config), run, room)
    return str(caught.value)


ONE_GPU = Room(device_gib=79, device_total_gib=80, host_gib=200)
SMALL = {"device_gib": 21.5, "device_total_gib": 80.0}
OVERLONG = {"functions": ["share_right"], "overlong_buffer_tokens": 3000}
FIXED = {"reference": {"kind": "fixed"}, "kl": {"coef": 0.1}}


@pytest.mark.parametrize(
    ("config", "learner", "changed", "advice"),
    [
        (QWEN_7B, {"gradient_checkpointing": False, "micro_batch_tokens": 16384}, {},
         'Set learner.micro_batch_tokens = "auto" and learner.gradient_checkpointing = "auto"'),
        (QWEN_1_5B, {"optimizer": {"offload": False}}, SMALL,
         'Set learner.optimizer.offload = "auto", or server.gpu_memory_utilization = 0.6, if a server uses the same '
         'GPU, or learner.optimizer.kind = "adamw_8bit", or 2 ranks at the start'),
        (QWEN_1_5B, FIXED, {"device_gib": 20.0, "device_total_gib": 20.5},
         'Set learner.reference.device = "cpu", or 2 ranks at the start, or learner.lora.rank = 16'),
        (QWEN_1_5B, {"sampling": {"group_size": 4, "max_tokens": 32768}},
            {"device_gib": 20.0, "device_total_gib": 20.5},
         "Set 2 ranks at the start, or learner.sampling.max_tokens = 8192, or learner.lora.rank = 16"),
        (QWEN_7B, {}, {"device_gib": 23.0, "device_total_gib": 24.0},
            "Set 8 ranks at the start, or learner.lora.rank = 16"),
        (QWEN_7B, {"weight_sync": {"compression": "delta"}}, {"host_gib": 175.0},
         'Set learner.weight_sync.compression = "none", or'),
        (QWEN_7B, {"sharding": "none"}, {"num_ranks": 8, "ranks_per_node": 8, "device_gib": 48.0, "host_gib": 1800.0},
         'Set learner.sharding = "auto", or'),
        *(
            (QWEN_7B, learner, {"device_gib": 1.0, "device_total_gib": 1.0},
             "No single change would fit: use a smaller model")
            for learner in ({}, {"reference": {"kind": "ema", "alpha": 0.9, "every_steps": 1}, "kl": {"coef": 0.1}},
                            {"sampling": {"max_tokens": 4096}, "reward": OVERLONG})
        ),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_the_smallest_changes_that_would(
    config: PretrainedConfig, learner: dict[str, Any], changed: dict[str, Any], advice: str
) -> None:
    room = msgspec.structs.replace(ONE_GPU, **changed)
    message = refusal(run_of(**learner), room, config)
    assert advice in message
    assert f"{room.device_gib:.1f} GiB on the GPU and {room.host_gib:.1f} GiB of host memory are free" in message


@pytest.mark.parametrize(
    ("servers", "free", "left"),
    [
        # 0.92 GiB of weights, 0.75 of buckets, 2 for CUDA and a step
        (ServersOnGpu(kv_cache_memory_mib=12288), 23.5, 24 - 12 - 3.67),
        (ServersOnGpu(kv_cache_memory_mib=12288), 6.0, 6.0),  # the server has started before
        (ServersOnGpu(kv_cache_memory_mib=4096, num_servers=2), 23.5, 24 - 2 * (4 + 3.67)),
        (ServersOnGpu(kv_cache_memory_mib=12288, num_shards=2), 23.5, 24 - 12 - 3.67 + 0.46),
        (ServersOnGpu(gpu_memory_utilization=0.6), 23.5, 24 * 0.4),
        (ServersOnGpu(kv_cache_memory_mib=40960), 23.5, 0.0),
    ],
)
def test_servers_on_the_same_gpu_take_their_part_before_they_have_allocated_it(
    servers: ServersOnGpu, free: float, left: float
) -> None:
    shape, room = shape_of(QWEN_HALF_B), Room(device_gib=free, device_total_gib=24.0, host_gib=60.0)
    beside = room_beside(servers, shape, run_of(), room)
    assert beside.device_gib == pytest.approx(left, abs=0.02)
    if left > 8:
        assert make_plan(shape, run_of(), beside).memory.device_gib <= MARGIN * left
        assert make_plan(shape, run_of(), room).memory.device_gib > left


def test_a_smaller_kv_cache_is_advised_where_the_server_leaves_too_little() -> None:
    shape, room = shape_of(QWEN_1_5B), Room(device_gib=31.5, device_total_gib=32.0, host_gib=60.0)
    message = refusal(run_of(), room_beside(ServersOnGpu(kv_cache_memory_mib=12288), shape, run_of(), room), QWEN_1_5B)
    assert "next to its servers' 17.6 GiB" in message and "Set server.kv_cache_memory_mib = 6144, or" in message
    smaller = room_beside(ServersOnGpu(kv_cache_memory_mib=6144), shape, run_of(), room)
    assert make_plan(shape, run_of(), smaller).memory.device_gib <= MARGIN * smaller.device_gib
