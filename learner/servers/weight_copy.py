"""A copy of the weights as they must travel, so that a push may go on while the next step changes the originals."""

import torch

from protocol.weights.buckets import NamedTensors, dtype_on_wire


class WeightCopy:
    """Keeps its memory from copy to copy: fresh pages would cost more than the copying. `take` is only called while no push
    reads the copy.
    """

    def __init__(self, wire_dtype: torch.dtype, device: torch.device | None) -> None:
        """`device`: where the copy is kept; None: where each tensor lies."""
        self._wire_dtype, self._device = wire_dtype, device
        self._tensors: dict[str, torch.Tensor] = {}

    def take(self, tensors: NamedTensors) -> None:
        """Copy all tensors, in the wire's dtype."""
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

    def tensors(self) -> NamedTensors:
        return self._tensors.items()
