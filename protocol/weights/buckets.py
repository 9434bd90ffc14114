"""How a push is cut: the manifest's tensors into flat buckets, a bucket into spans.

    named tensors ─▶ manifest ─▶ buckets (memory: one buffer each) ─▶ spans (transfer: one broadcast each)

Both sides cut the same manifest by the same rules, so the bytes need no framing. A bucket holds whole tensors in the
manifest's order, and one that is larger than a bucket is a bucket alone. Every span lies inside one large tensor, which can
then travel from where it is, or is a run of small ones.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
import torch

from protocol.messages import Manifest, TensorSpec

ALIGNMENT_BYTES = 16
"""Every tensor starts at a multiple, so that a view of any dtype is legal."""
SPAN_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}
"""By the kind of device. On a CPU small enough that a span is checked while it is in the cache; large enough that the calls do not
count: on a GPU one takes 0.35 ms, in which some 25 MiB could go."""
LARGE_PART = 4
"""A tensor of a span ÷ this and more gets spans of its own; to copy a smaller one costs less than a broadcast more."""

NamedTensors = Iterable[tuple[str, torch.Tensor]]


class Slot(msgspec.Struct, frozen=True):
    """Where a tensor lies in its bucket."""

    spec: TensorSpec
    start: int
    """First byte."""
    num_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


class Run(msgspec.Struct, frozen=True):
    """Neighbours that travel together: one large tensor, or small ones with the gaps between them."""

    slots: tuple[Slot, ...]
    is_large: bool

    @property
    def start(self) -> int:
        return self.slots[0].start

    @property
    def end(self) -> int:
        return self.slots[-1].end


class Bucket(msgspec.Struct, frozen=True):
    """Some tensors of a push, to be gathered, sent, checked and loaded together."""

    index: int
    slots: tuple[Slot, ...]
    num_bytes: int

    def runs(self, span_bytes: int) -> Iterator[Run]:
        small: list[Slot] = []
        for slot in self.slots:
            is_large = slot.num_bytes * LARGE_PART >= span_bytes
            if small and (is_large or slot.end - small[0].start > span_bytes):
                yield Run(tuple(small), is_large=False)
                small = []
            if is_large:
                yield Run((slot,), is_large=True)
            else:
                small.append(slot)
        if small:
            yield Run(tuple(small), is_large=False)

    def spans(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield what each broadcast carries, as views into the bucket's flat buffer."""
        span_bytes = span_bytes_on(buffer.device)
        for run in self.runs(span_bytes):
            if run.start < run.end:
                yield from buffer[run.start : run.end].split(span_bytes)

    def views(self, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return each tensor by its name, as a view into the bucket's flat buffer."""
        return [(slot.spec.name, view(slot, buffer, 0)) for slot in self.slots]


def make_manifest(
    tensors: NamedTensors, wire_dtype: torch.dtype, bucket_bytes: int, wire: Literal["dense", "delta"] = "dense"
) -> Manifest:
    """Describe tensors in their order."""
    specs = tuple(
        TensorSpec(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(dtype_on_wire(tensor, wire_dtype)).removeprefix("torch."),
        )
        for name, tensor in tensors
    )
    return Manifest(tensors=specs, bucket_bytes=bucket_bytes, wire=wire)


def dtype_on_wire(tensor: torch.Tensor, wire_dtype: torch.dtype) -> torch.dtype:
    """Floating-point tensors travel as `wire_dtype`, others as they are."""
    return wire_dtype if tensor.is_floating_point() else tensor.dtype


def cut(manifest: Manifest) -> list[Bucket]:
    """Return the buckets of a push."""
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    end = 0
    for spec in manifest.tensors:
        num_bytes = math.prod(spec.shape) * spec_dtype(spec).itemsize
        if slots and _aligned(end + num_bytes) > manifest.bucket_bytes:
            buckets.append(Bucket(len(buckets), tuple(slots), end))
            slots, end = [], 0
        slots.append(Slot(spec, end, num_bytes))
        end = _aligned(end + num_bytes)
    if slots:
        buckets.append(Bucket(len(buckets), tuple(slots), end))
    return buckets


def span_bytes_on(device: torch.device) -> int:
    """Return the most that a span has; the ranks of one collective have devices of one kind."""
    return SPAN_BYTES[device.type]


def view(slot: Slot, buffer: torch.Tensor, buffer_start: int) -> torch.Tensor:
    """Return the slot's tensor in a buffer that begins at a byte of the bucket."""
    start = slot.start - buffer_start
    return buffer[start : start + slot.num_bytes].view(spec_dtype(slot.spec)).view(slot.spec.shape)


def spec_dtype(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
