"""How a run is fitted to the nodes of its ranks."""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from learner.config.shared_gpu import ServersOnGpu
from learner.policy.memory_plan import Room
from learner.policy.model_shape import shape_of
from learner.training.fit_memory import fit_memory, measure_room
from protocol.errors import ConfigError
from tests.learner.policy.shapes import QWEN_HALF_B
from tests.learner.training.fixed_groups import make_run


def rank_of(*ranks_per_node: int) -> Any:
    """An accelerator of a rank, among one rank of each node."""

    def gather(mine: torch.Tensor) -> torch.Tensor:
        rows = mine.repeat(len(ranks_per_node), 1)
        rows[:, 3] = torch.tensor(ranks_per_node)
        return rows

    num_ranks = sum(ranks_per_node)
    return SimpleNamespace(device=torch.device("cpu"), num_processes=num_ranks, gather=gather, is_main_process=False)


@pytest.mark.parametrize(
    ("nodes", "most", "are_alike"), [((8, 8), 8, True), ((8, 7), 8, False), ((4, 2), 4, False), ((2,), 2, True)]
)
def test_the_node_with_most_ranks_counts_and_every_rank_knows_whether_the_nodes_are_alike(
    nodes: tuple[int, ...], most: int, are_alike: bool
) -> None:
    room = measure_room(rank_of(*nodes))
    assert (room.num_ranks, room.ranks_per_node, room.nodes_are_alike) == (sum(nodes), most, are_alike)


def test_copies_on_nodes_with_different_numbers_of_ranks_are_refused_on_every_rank() -> None:
    inputs: Any = SimpleNamespace(run=make_run(sharding="hybrid"), shape=None)
    with pytest.raises(ConfigError, match=r"of 6 ranks one node has 4 and another fewer\. Start as many on each"):
        fit_memory(inputs, rank_of(4, 2))
    assert fit_memory(inputs, rank_of(4, 4)).learner.sharding == "hybrid"


def test_a_rank_on_a_gpu_plans_beside_the_servers_that_colocate_names(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(device_gib=23.5, device_total_gib=24.0, host_gib=60.0)
    monkeypatch.setattr("learner.training.fit_memory.measure_room", lambda accelerator: room)
    inputs: Any = SimpleNamespace(run=make_run(), shape=shape_of(QWEN_HALF_B))
    assert fit_memory(inputs, rank_of(1)).learner.micro_batch_tokens != "auto"
    for name, value in ServersOnGpu(kv_cache_memory_mib=20480).environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"next to its servers' 24\.6 GiB .* Set server\.kv_cache_memory_mib = 10240"):
        fit_memory(inputs, rank_of(1))
    room = msgspec.structs.replace(room, device_type="cpu")
    assert fit_memory(inputs, rank_of(1)).learner.micro_batch_tokens != "auto"
