"""What a step got done with the hardware it had. Pure: counts and seconds in, metrics out.

    arithmetic of N tokens and their (query, key) pairs = 6 · P · N + 12 · L · H · pairs

forward and backward; P: the parameters that a token goes through: all but the embedding and the experts that it is not sent to.
Counted, as everywhere, is what training the whole model needs: no second forward pass of gradient checkpointing, no pass of a
reference, nothing that LoRA or a cut last layer saves. A packed group needs its prompt once (packing.py), padded rows need it
once each; padding is needed nowhere.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from learner.policy.memory import ModelShape
from learner.rollouts.scored_group import ScoredGroup
from learner.training.packing import Piece, num_pairs, num_tokens

PEAK_TFLOPS = {
    "B200": 2250.0, "H200": 989.0, "H100 PCIe": 756.0, "H100": 989.0, "GH200": 989.0, "A100": 312.0, "L40S": 362.0, "A10": 125.0,
    "RTX 4090": 165.0,
}  # fmt: skip
"""Dense bfloat16, by a part of the device's name; the first that fits."""
TERA = 1e12


class Devices(NamedTuple):
    """What the learner computes on: one for each rank."""

    device: torch.device
    num: int

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type


def train_flops(shape: ModelShape, pieces: Sequence[Piece]) -> float:
    """Of one forward and backward pass over these pieces."""
    linear = 6 * (shape.num_active - shape.num_embedding) * sum(map(num_tokens, pieces))
    attention = 12 * shape.num_layers * shape.hidden_size * sum(map(num_pairs, pieces))
    return float(linear + attention)


def peak_tflops(device_name: str) -> float | None:
    """None: not known."""
    return next((peak for part, peak in PEAK_TFLOPS.items() if part in device_name), None)


def throughput(
    groups: Sequence[ScoredGroup], train_tflop: float | None, step_s: float, devices: Devices
) -> dict[str, float]:
    """Tokens and arithmetic per second and device, over the whole step, waits included."""
    tokens = sum(
        len(group.prompt_of(branch)) + len(branch.token_ids) for group in groups for branch in group.completions
    )
    device_s = step_s * devices.num
    found = {"perf/tokens_per_s_per_device": tokens / device_s}
    if train_tflop is None:
        return found
    found["perf/tflops_per_device"] = train_tflop / device_s
    peak = peak_tflops(devices.name)
    return found if peak is None else found | {"perf/mfu": train_tflop / device_s / peak}
