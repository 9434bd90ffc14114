"""The learner's copies of the weights: whole, for a sync that overlaps with training, and samples of two versions."""

import torch

from protocol.weights.buckets import NamedTensors, dtype_on_wire

SAMPLED_ELEMENTS = 2048
"""Maximum number of elements sampled per tensor.

These are half a million in a model of 135M parameters, enough to measure a change of 1e-4.
"""


class WeightCopy:
    """Copy of the weights in wire format, for a sync that overlaps with training.

    The copy reuses its memory, because fresh pages would cost more than the copying. `update` is called only
    while no sync reads the copy.
    """

    def __init__(self, wire_dtype: torch.dtype, device: torch.device | None) -> None:
        """Create an empty copy on `device`; None keeps each tensor on its own device."""
        self._wire_dtype, self._device = wire_dtype, device
        self._tensors: dict[str, torch.Tensor] = {}

    def update(self, tensors: NamedTensors) -> None:
        """Copy all tensors, in the dtype of the wire."""
        for name, tensor in tensors:
            mine = self._tensors.get(name)
            if mine is None:
                mine = torch.empty_like(
                    tensor,
                    dtype=dtype_on_wire(tensor, self._wire_dtype),
                    device=self._device,
                    memory_format=torch.contiguous_format,
                )
                self._tensors[name] = mine
            mine.copy_(tensor.detach())

    @property
    def is_filled(self) -> bool:
        return bool(self._tensors)

    def tensors(self) -> NamedTensors:
        return self._tensors.items()


class WeightSample:
    """Sampled elements of every tensor in the last two versions.

    They show how much of the policy a version changed.
    """

    def __init__(self, wire_dtype: torch.dtype) -> None:
        self._wire_dtype = wire_dtype
        self._versions: dict[int, dict[str, tuple[int, torch.Tensor]]] = {}
        """Stride and sampled elements, by version and tensor."""

    def watch(self, version: int, tensors: NamedTensors) -> NamedTensors:
        """Yield the tensors of a version, and keep a sample of each."""
        sample: dict[str, tuple[int, torch.Tensor]] = {}
        self._versions = {kept: self._versions[kept] for kept in self._versions if kept == version - 1} | {
            version: sample
        }
        for name, tensor in tensors:
            # Odd, so that the samples are not all in one column.
            stride = -(-tensor.numel() // SAMPLED_ELEMENTS) | 1
            elements = tensor.detach().reshape(-1)[::stride]
            sample[name] = (stride, elements.to(dtype_on_wire(tensor, self._wire_dtype), copy=True))
            yield name, tensor

    def changed_frac(self, version: int, dtype: torch.dtype) -> float:
        """Estimate the share of weights that `version` changed; 0 if unknown.

        `dtype`: dtype of the weights on the server.
        """
        before, after = self._versions.get(version - 1, {}), self._versions.get(version, {})
        changed = total = 0
        for name in before.keys() & after.keys():
            stride, elements = after[name]
            changed += stride * int((elements.to(dtype) != before[name][1].to(dtype)).sum())
            total += stride * len(elements)
        return changed / max(total, 1)
