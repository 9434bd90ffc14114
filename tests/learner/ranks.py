"""Ranks of a learner as torchrun would start them, forked from a process that has imported everything."""

import os
from collections.abc import Callable
from typing import Any

import msgspec

from learner.training.distributed import make_accelerator
from tests.learner.training.sharding import FSDP2, launched_environment, shard_on_cpu
from tests.peer import PROCESSES
from tests.ports import free_port

TIMEOUT_S = 120.0
Work = Callable[..., Any]


class Place(msgspec.Struct, frozen=True):
    """A rank among others, as torchrun tells it."""

    rank: int
    num_ranks: int
    port: int
    is_sharded: bool = False
    launched: dict[str, str] = msgspec.field(default_factory=dict)
    """What `accelerate launch` sets besides."""

    def enter(self) -> None:
        if self.num_ranks == 1:
            return
        os.environ |= {"RANK": str(self.rank), "LOCAL_RANK": str(self.rank)}
        os.environ |= {"WORLD_SIZE": str(self.num_ranks), "LOCAL_WORLD_SIZE": str(self.num_ranks)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "ACCELERATE_USE_CPU": "true"}
        os.environ |= self.launched
        if self.is_sharded:
            shard_on_cpu()


ALONE = Place(rank=0, num_ranks=1, port=0)


def places_of(num_ranks: int, *, is_sharded: bool = False, switches: tuple[str, ...] = FSDP2) -> list[Place]:
    """Of ranks that will find each other; sharded ones as `accelerate launch` with these switches would start them."""
    if num_ranks == 1:
        return [ALONE]
    port = free_port()
    launched = launched_environment(*switches) if is_sharded else {}
    return [
        Place(rank=rank, num_ranks=num_ranks, port=port, is_sharded=is_sharded, launched=launched)
        for rank in range(num_ranks)
    ]


def on_two_ranks(work: Work, *args: Any, is_sharded: bool = False, switches: tuple[str, ...] = FSDP2) -> None:
    """Call `work(accelerator, *args)` on both."""
    be_ranks(places_of(2, is_sharded=is_sharded, switches=switches), work, *args)


def be_ranks(places: list[Place], work: Work, *args: Any) -> None:
    """Call `work(accelerator, *args)` on each."""
    ranks = [PROCESSES.Process(target=_be, args=(place, work, args)) for place in places]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(TIMEOUT_S)
        if rank.exitcode is None:
            rank.kill()
    assert [rank.exitcode for rank in ranks] == [0] * len(ranks), "their tracebacks are in the captured output"


def _be(place: Place, work: Work, args: tuple[Any, ...]) -> None:
    place.enter()
    accelerator = make_accelerator()
    assert accelerator.is_fsdp2 == place.is_sharded and accelerator.num_processes == place.num_ranks
    work(accelerator, *args)
    accelerator.free_memory()  # the model first, see learner/training/distributed.py
    accelerator.end_training()
