"""The transport benchmark between two processes on GPUs, compared with a copy between two tensors on one GPU.

ipc: both processes on one GPU        nccl: one GPU each
"""

import statistics
import time
from typing import Any

import torch

from protocol.errors import SlipstreamError
from tests.bench.push_peer import Peer
from tests.bench.push_transport import WIRE_DTYPE, Transfers, model_tensors


def measure(size_mib: int, num_rounds: int, bucket_bytes: int) -> dict[str, Any] | str:
    """Return the results of each available transport, and why others were skipped."""
    if not torch.cuda.is_available():
        return "skipped: no GPU"
    own = torch.device("cuda", 0)
    copy = statistics.median(copy_gib_per_s(size_mib << 20, own) for _ in range(num_rounds))
    result: dict[str, Any] = {"size_mib": size_mib, "copy_gib_per_s": copy}
    for transport, peer_device in (("ipc", own), ("nccl", torch.device("cuda", 1))):
        if (peer_device.index or 0) >= torch.cuda.device_count():
            result[transport] = "skipped: one GPU"
            continue
        try:
            result[transport] = _measure(transport, own, peer_device, size_mib << 20, num_rounds, bucket_bytes, copy)
        except SlipstreamError as error:
            result[transport] = f"skipped: {error}"
    return result


def copy_gib_per_s(num_bytes: int, device: torch.device) -> float:
    source, target = (torch.ones(num_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    torch.cuda.synchronize(device)
    started = time.perf_counter()
    target.copy_(source)
    torch.cuda.synchronize(device)
    return num_bytes / 2**30 / (time.perf_counter() - started)


def _measure(
    transport: str,
    own: torch.device,
    other: torch.device,
    num_bytes: int,
    num_rounds: int,
    bucket_bytes: int,
    copy: float,
) -> dict[str, float]:
    peer = Peer(transport, own, other)
    try:
        transfers = Transfers(peer, model_tensors(num_bytes, WIRE_DTYPE, own), bucket_bytes)
        push = transfers.over_raw("push", num_rounds)
        unchecked = transfers.over_raw("push without checksums", num_rounds)
    finally:
        peer.close()
    return {
        "raw_gib_per_s": push.raw_gib_per_s,
        "dense_over_raw": push.median,
        "over_raw_without_checksums": unchecked.median,
        "dense_over_copy": push.median * push.raw_gib_per_s / copy,
    }
