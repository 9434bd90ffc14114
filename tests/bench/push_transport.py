"""The transport of a push against a bare broadcast of as many bytes, between two processes.

    weights ─▶ send_weights ═▶ receive_weights ─▶ checked buckets in memory      against      tensor ═▶ tensor

Raw and pushed transfers alternate; a ratio is of one push and the raw transfers before and after it, and the median is
reported, beside the ratio of the fastest two.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from protocol.weights.buckets import Checksum, make_manifest, split_into_buckets
from protocol.weights.dense import send_weights
from tests.bench.push_peer import Order, Peer, Variant, as_ordered

CPU = torch.device("cpu")
WIRE_DTYPE = torch.bfloat16
QWEN2_HALF_B = {
    "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
    "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
"""Qwen/Qwen2.5-0.5B, as published; the number of layers is what a size needs."""
SPARE_BYTES = 2 << 30
"""Of the machine's memory, left alone."""

NamedTensors = list[tuple[str, torch.Tensor]]
Shapes = list[tuple[str, torch.Size]]


def model_tensors(num_bytes: int, dtype: torch.dtype, device: torch.device) -> NamedTensors:
    """Return the weights of a Qwen2.5-0.5B that has about so many bytes on the wire; without the embedding if that
    is most."""
    layer, others = _layer_shapes()
    shapes = others if num_bytes > 2 * _wire_bytes(others) else []
    num_layers = max(1, round((num_bytes - _wire_bytes(shapes)) / _wire_bytes(layer)))
    for index in range(num_layers):
        shapes = shapes + [(name.replace(".0.", f".{index}."), shape) for name, shape in layer]
    return [
        (name, torch.full(shape, 1 + index / 100, dtype=dtype, device=device))
        for index, (name, shape) in enumerate(shapes)
    ]


def _layer_shapes() -> tuple[Shapes, Shapes]:
    """One layer's tensors, and those that are not in a layer."""
    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**QWEN2_HALF_B, num_hidden_layers=1))
    shapes = [(name, parameter.shape) for name, parameter in model.named_parameters()]
    return [item for item in shapes if ".layers.0." in item[0]], [item for item in shapes if ".layers." not in item[0]]


def _wire_bytes(shapes: Shapes) -> int:
    return sum(shape.numel() for _, shape in shapes) * WIRE_DTYPE.itemsize


class Transfers:
    """Times transfers to one peer."""

    def __init__(self, peer: Peer, tensors: NamedTensors, bucket_bytes: int) -> None:
        self._peer, self._tensors = peer, tensors
        self._manifest = make_manifest(tensors, WIRE_DTYPE, bucket_bytes)
        self._buckets = split_into_buckets(self._manifest)
        self.num_bytes = sum(bucket.num_bytes for bucket in self._buckets)
        self._raw = torch.ones(self.num_bytes, dtype=torch.uint8, device=peer.collective.device)

    def seconds(self, variant: Variant) -> float:
        """Run one transfer; return the seconds until the peer has said that it holds it. Raises AssertionError."""
        is_push = variant.startswith("push")
        order = Order(variant, self.num_bytes, self._manifest if is_push else None)
        self._peer.order(order)
        started = time.perf_counter()
        with as_ordered(order):
            if is_push:
                sent = send_weights(self._peer.collective, self._buckets, self._tensors).checksum
            else:
                self._peer.collective.broadcast(self._raw)
                sent = ""
        arrived = self._peer.answer()
        seconds = time.perf_counter() - started
        assert arrived == sent, f"{variant}: sent {sent}, arrived {arrived}"
        return seconds

    def over_raw(self, variant: Variant, num_rounds: int) -> "Rounds":
        """Alternate between raw and a variant."""
        for one in ("raw", variant):  # the first of each kind meets fresh memory and cold caches
            self.seconds(one)
        raw_s, variant_s = [self.seconds("raw")], []
        for _ in range(num_rounds):
            variant_s.append(self.seconds(variant))
            raw_s.append(self.seconds("raw"))
        return Rounds(self.num_bytes, raw_s, variant_s)


class Rounds(NamedTuple):
    """raw, variant, raw, variant, …, raw: how long each took."""

    num_bytes: int
    raw_s: list[float]
    variant_s: list[float]

    @property
    def ratios(self) -> list[float]:
        """Bytes/s of each transfer over those of the raw ones before and after it."""
        return [
            (before + after) / 2 / between
            for before, between, after in zip(self.raw_s, self.variant_s, self.raw_s[1:], strict=False)
        ]

    @property
    def median(self) -> float:
        return statistics.median(self.ratios)

    @property
    def best(self) -> float:
        """The fastest over the fastest raw: on a machine that does other work too, the ones that were least
        disturbed."""
        return min(self.raw_s) / min(self.variant_s)

    @property
    def raw_gib_per_s(self) -> float:
        return self.num_bytes / 2**30 / statistics.median(self.raw_s)


def measure(size_mib: int, num_rounds: int, bucket_bytes: int) -> dict[str, Any]:
    """Return one size's numbers; a word where the machine has not enough memory for it."""
    num_bytes = size_mib << 20
    if lacking := lacks_memory(3 * num_bytes):  # weights, and the raw tensor on both sides
        return {"size_mib": size_mib, "skipped": lacking}
    peer = Peer("tcp", CPU, CPU)
    try:
        tensors = model_tensors(num_bytes, WIRE_DTYPE, CPU)
        transfers = Transfers(peer, tensors, bucket_bytes)
        push = transfers.over_raw("push", num_rounds)
        unchecked = transfers.over_raw("push without checksums", num_rounds)
        fresh = transfers.over_raw("raw into fresh memory", num_rounds)
        result: dict[str, Any] = {
            "size_mib": size_mib, "num_bytes": transfers.num_bytes, "num_tensors": len(tensors),
            "num_rounds": num_rounds,
            "raw_gib_per_s": push.raw_gib_per_s,
            "raw_gib_per_s_best": transfers.num_bytes / 2**30 / min(push.raw_s),
            "dense_over_raw": push.median,
            "dense_over_raw_best": push.best,
            "dense_over_raw_by_round": push.ratios,
            "over_raw_without_checksums": unchecked.median,
            "over_raw_without_checksums_best": unchecked.best,
            "raw_into_fresh_memory_over_raw": fresh.median,
        }  # fmt: skip
        del tensors, transfers
        return result | {"cast_over_raw": cast_over_raw(peer, num_bytes, num_rounds, bucket_bytes)}
    finally:
        peer.close()


def cast_over_raw(peer: Peer, num_bytes: int, num_rounds: int, bucket_bytes: int) -> float | str:
    """The same with float32 weights that are cast on their way."""
    if lacking := lacks_memory(3 * num_bytes):  # the peer holds its raw tensor by now, the weights take twice as much
        return f"skipped: {lacking}"
    transfers = Transfers(peer, model_tensors(num_bytes, torch.float32, CPU), bucket_bytes)
    return transfers.over_raw("push", num_rounds).median


def lacks_memory(num_bytes: int) -> str:
    """Say what is missing, or nothing."""
    needed, free = (num_bytes + SPARE_BYTES) / 2**30, psutil.virtual_memory().available / 2**30
    return f"needs {needed:.1f} GiB of free memory, there are {free:.1f}" if needed > free else ""


def measure_memory(num_bytes: int = 256 << 20) -> dict[str, float]:
    """What one core of this machine does alone, in GiB/s: most of a push is such passes over memory."""
    bytes_N, other_N = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    masters_N = torch.ones(num_bytes // 2, dtype=torch.float32)
    passes: dict[str, Callable[[], object]] = {
        "checksum": lambda: Checksum().update(bytes_N),
        "copy": lambda: other_N.copy_(bytes_N),
        "cast": lambda: other_N.view(WIRE_DTYPE).copy_(masters_N),
        "copy_into_fresh_memory": lambda: bytes_N.clone(),
    }
    return {name: num_bytes / 2**30 / min(_seconds(one) for _ in range(5)) for name, one in passes.items()}


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
