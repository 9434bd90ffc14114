"""Pushes that carry only what changed: how many bytes real consecutive optimizer steps leave, and when that is faster.

float32 masters ─▶ AdamW at a learning rate of RL ─▶ bfloat16 on the wire ─▶ delta against the version before
"""

import statistics
import time
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from protocol.weights.buckets import make_manifest, split_into_buckets
from protocol.weights.delta import Baseline, send_changes
from protocol.weights.dense import send_weights
from tests.bench.push_peer import Order, Peer

LEARNING_RATE = 1e-6
WIRE_DTYPE = torch.bfloat16
NUM_TOKENS = 128
"""Per step: the size of an AdamW step does not depend on how many there are."""


def measure(num_steps: int, bucket_bytes: int, config: GPT2Config | None = None) -> dict[str, Any]:
    """Train, and push each version both ways over the loopback. By default GPT-2 small, 124M parameters."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config or GPT2Config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, foreach=False)
    tensors = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    peer = Peer("tcp", torch.device("cpu"), torch.device("cpu"))
    try:
        pushes = Versions(peer, tensors, bucket_bytes)
        pushes.push()
        versions = []
        for _ in range(num_steps):
            step(model, optimizer)
            versions.append(pushes.push())
    finally:
        peer.close()
    result = {name: statistics.median(version[name] for version in versions) for name in versions[0]}
    return {
        "num_parameters": sum(tensor.numel() for _, tensor in tensors),
        "learning_rate": LEARNING_RATE,
        "num_steps": num_steps,
        "delta_bytes_over_dense": result["delta_bytes"] / result["dense_bytes"],
        "delta_bytes_over_dense_by_step": [version["delta_bytes"] / version["dense_bytes"] for version in versions],
        **result,
        # A slower link than this takes longer for all bytes than both sides need to find and apply the changes.
        "delta_wins_below_gbit_per_s": result["dense_bytes"] * 8 / result["delta_seconds"] / 1e9,
    }


def step(model: GPT2LMHeadModel, optimizer: torch.optim.Optimizer) -> None:
    token_ids = torch.randint(model.config.vocab_size, (1, min(NUM_TOKENS, model.config.n_positions)))
    model(token_ids, labels=token_ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


class Versions:
    """Pushes each version as changes, then whole."""

    def __init__(self, peer: Peer, tensors: list[tuple[str, torch.Tensor]], bucket_bytes: int) -> None:
        self._peer, self._tensors = peer, tensors
        self._dense = make_manifest(tensors, WIRE_DTYPE, bucket_bytes)
        self._delta = make_manifest(tensors, WIRE_DTYPE, bucket_bytes, "delta")
        self._buckets, self._baseline = split_into_buckets(self._dense), Baseline()

    def push(self) -> dict[str, float]:
        """Return the bytes and seconds of both ways. Raises AssertionError if what arrives is not what was sent."""
        numbers = {}
        for wire, manifest in (("delta", self._delta), ("dense", self._dense)):
            self._peer.order(Order("push", 0, manifest))
            started = time.perf_counter()
            if wire == "delta":
                sent = send_changes(self._peer.collective, self._buckets, self._tensors, self._baseline)
            else:
                sent = send_weights(self._peer.collective, self._buckets, self._tensors)
            arrived = self._peer.answer()
            numbers |= {f"{wire}_seconds": time.perf_counter() - started, f"{wire}_bytes": sent.num_bytes}
            assert arrived == sent.checksum, f"{wire}: sent {sent.checksum}, arrived {arrived}"
        return numbers
