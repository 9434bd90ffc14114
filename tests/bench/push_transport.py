"""The transport of a push against a bare broadcast of as many bytes, between two processes.

    weights ─▶ send_weights ═▶ receive_weights ─▶ checked buckets in memory      against      tensor ═▶ tensor

A ratio is taken within a round, of transfers that follow each other; what is reported is the median over the rounds.
"""

import statistics
import time
from collections import defaultdict
from typing import Any

import psutil
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from protocol.buckets import cut, make_manifest
from protocol.weights import send_weights
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


def model_tensors(num_bytes: int, dtype: torch.dtype, device: torch.device) -> NamedTensors:
    """Return the weights of a Qwen2.5-0.5B that has about so many bytes on the wire; without the embedding if that is most."""
    layer, others = _layer_shapes()
    shapes = others if num_bytes > 2 * _wire_bytes(others) else []
    num_layers = max(1, round((num_bytes - _wire_bytes(shapes)) / _wire_bytes(layer)))
    for index in range(num_layers):
        shapes = shapes + [(name.replace(".0.", f".{index}."), shape) for name, shape in layer]
    return [
        (name, torch.full(shape, 1 + index / 100, dtype=dtype, device=device))
        for index, (name, shape) in enumerate(shapes)
    ]


Shapes = list[tuple[str, torch.Size]]


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
        self._buckets = cut(self._manifest)
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
                sent = send_weights(self._peer.collective, self._buckets, self._tensors).fingerprint
            else:
                self._peer.collective.broadcast(self._raw)
                sent = ""
        arrived = self._peer.answer()
        seconds = time.perf_counter() - started
        assert arrived == sent, f"{variant}: sent {sent}, arrived {arrived}"
        return seconds

    def ratios(self, variants: list[Variant], num_rounds: int) -> tuple[dict[str, float], float]:
        """Return each variant's bytes/s over those of raw, and raw's GiB/s."""
        for variant in variants:  # the first of each kind meets fresh memory and cold caches
            self.seconds(variant)
        over_raw = defaultdict(list)
        raw_seconds = []
        for _ in range(num_rounds):
            raw_seconds.append(self.seconds("raw"))
            for variant in variants:
                over_raw[variant].append(raw_seconds[-1] / self.seconds(variant))
        return {variant: statistics.median(values) for variant, values in over_raw.items()}, (
            self.num_bytes / statistics.median(raw_seconds) / 2**30
        )


def measure(size_mib: int, num_rounds: int, bucket_bytes: int, transport: str = "gloo") -> dict[str, Any]:
    """Return one size's numbers."""
    peer = Peer(transport, CPU, CPU)
    try:
        tensors = model_tensors(size_mib << 20, WIRE_DTYPE, CPU)
        transfers = Transfers(peer, tensors, bucket_bytes)
        ratios, raw = transfers.ratios(
            ["push", "push without checksums", "raw into fresh memory"], num_rounds
        )
        result = {
            "size_mib": size_mib, "num_bytes": transfers.num_bytes, "num_tensors": len(tensors), "num_rounds": num_rounds,
            "raw_gib_per_s": raw, "dense_over_raw": ratios["push"],
            "over_raw_without_checksums": ratios["push without checksums"],
            "raw_fresh_over_raw": ratios["raw into fresh memory"],
        }  # fmt: skip
        del tensors, transfers
        if psutil.virtual_memory().available - SPARE_BYTES < 3 * (size_mib << 20):
            return result | {"cast_over_raw": None}
        transfers = Transfers(peer, model_tensors(size_mib << 20, torch.float32, CPU), bucket_bytes)
        return result | {"cast_over_raw": transfers.ratios(["push"], num_rounds)[0]["push"]}
    finally:
        peer.close()

if __name__ == "__main__":
    import sys
    torch.set_num_threads(1)
    for s in sys.argv[1:]:
        t=time.time()
        print(measure(int(s), 7, 256<<20), round(time.time()-t,1),flush=True)
