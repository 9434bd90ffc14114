"""Shared decisions of a learner's ranks, and detection of ranks that disagree.

    decide_on_rank_0   rank 0 decides ─▶ broadcast ─▶ every rank has the decision
    any_rank           each rank's bool ─▶ gather ─▶ every rank knows whether any is true
    first_problem      each rank's problem ─▶ gather ─▶ every rank has the first one
    require_agreement  each rank's view ─▶ 8-byte digest ─▶ gather ─▶ equal, or an error on every rank

Ranks that decide from their own weights, files, devices or environments may differ. The run would then
continue, with some rows trained twice and others never. Invariant: all ranks call these functions in the same
order. Nothing is pickled.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import torch
from accelerate import Accelerator
from accelerate.utils import broadcast

from protocol.config_keys import flatten
from protocol.errors import RankFailed, RanksDisagree

T = TypeVar("T")

MAX_DIFFERENCES = 5
"""Maximum number of fields that an error names; further ones are counted."""
ABSENT = "absent"
"""Placeholder for a field that only some ranks have."""


def decide_on_rank_0(accelerator: Accelerator, decide: Callable[[], T], kind: Any) -> T:
    """Return rank 0's result of `decide` on every rank; `kind` is its type.

    Raises:
        RankFailed: On the other ranks, if `decide` raised an error on rank 0.
    """
    if accelerator.num_processes == 1:
        return decide()
    if not accelerator.is_main_process:
        if not (sent := broadcast_bytes(accelerator, b"")):
            raise RankFailed("rank 0 of this learner has stopped with an error; see its log")
        return msgspec.msgpack.decode(sent, type=kind)
    encoded = b""
    try:
        decision = decide()
        encoded = msgspec.msgpack.encode(decision)
    finally:
        broadcast_bytes(accelerator, encoded)
    return decision


def any_rank(accelerator: Accelerator, is_so: bool) -> bool:
    """Return on every rank whether it is so on any of them."""
    if accelerator.num_processes == 1:
        return is_so
    return bool(accelerator.gather(torch.tensor([is_so], device=accelerator.device)).any())


def first_problem(accelerator: Accelerator, problem: str | None) -> str | None:
    """Return the problem of the first rank that has one, on every rank."""
    if accelerator.num_processes == 1:
        return problem
    problems = _gather_bytes(accelerator, (problem or "").encode())
    return next((f"on rank {rank}: {text.decode()}" for rank, text in enumerate(problems) if text), None)


def require_agreement(accelerator: Accelerator, view: msgspec.Struct, remedy: str) -> None:
    """Compare the views of all ranks, with one collective of 8 bytes per rank.

    Raises:
        RanksDisagree: On every rank. Names the differing fields, the ranks and their values, then `remedy`.
    """
    if accelerator.num_processes == 1:
        return
    mine = msgspec.msgpack.encode(view, order="deterministic")  # JSON encodes inf as null, like None
    digest = int.from_bytes(hashlib.blake2b(mine, digest_size=8).digest(), "little", signed=True)
    digests = accelerator.gather(torch.tensor([digest], device=accelerator.device)).tolist()
    if len(set(digests)) == 1:
        return
    views = [msgspec.msgpack.decode(each) for each in _gather_bytes(accelerator, mine)]
    raise RanksDisagree(f"the ranks of this learner disagree: {describe_differences(views)}. {remedy}")


def describe_differences(views: Sequence[dict[str, Any]]) -> str:
    """Return a description of the fields that differ, with the value of each rank."""
    flat = [flatten(view) for view in views]
    keys = [
        key
        for key in dict.fromkeys(key for view in flat for key in view)
        if any(view.get(key, ABSENT) != flat[0].get(key, ABSENT) for view in flat)
    ]
    more = f"; and {len(keys) - MAX_DIFFERENCES} more fields" if len(keys) > MAX_DIFFERENCES else ""
    return "; ".join(_describe(key, flat) for key in keys[:MAX_DIFFERENCES]) + more


def broadcast_bytes(accelerator: Accelerator, data: bytes) -> bytes:
    """Return rank 0's bytes on every rank; the `data` of other ranks is ignored."""
    num_bytes = int(broadcast(torch.tensor([len(data)], device=accelerator.device)))
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=accelerator.device)
    if accelerator.is_main_process and data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return broadcast(buffer).cpu().numpy().tobytes() if num_bytes else b""


def _gather_bytes(accelerator: Accelerator, data: bytes) -> list[bytes]:
    """Return the bytes of every rank, on every rank."""
    sizes = accelerator.gather(torch.tensor([len(data)], device=accelerator.device)).tolist()
    if not max(sizes):
        return [b""] * len(sizes)
    padded = torch.frombuffer(bytearray(data.ljust(max(sizes), b"\0")), dtype=torch.uint8).to(accelerator.device)
    rows = accelerator.gather(padded[None]).cpu().numpy()
    return [row[:size].tobytes() for row, size in zip(rows, sizes, strict=True)]


def _describe(key: str, flat: Sequence[dict[str, Any]]) -> str:
    ranks_of: dict[str, list[str]] = defaultdict(list)
    for rank, view in enumerate(flat):
        value = _format(view[key]) if key in view else ABSENT
        ranks_of[value].append(str(rank))
    return f"{key} is " + " and ".join(
        f"{value} on rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}" for value, ranks in ranks_of.items()
    )


def _format(value: Any) -> str:
    is_infinite = isinstance(value, float) and not math.isfinite(value)
    return str(value) if is_infinite else msgspec.json.encode(value).decode()
