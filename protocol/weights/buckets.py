"""Layout of a weight sync: tensors in flat buckets, buckets in spans.

    named tensors ─▶ manifest ─▶ buckets (memory: one buffer each) ─▶ spans (transfer: one broadcast each)

Both sides cut the same manifest by the same rules, so the bytes need no framing. A bucket holds whole tensors
in the manifest's order, and a larger tensor is a bucket of its own. A span lies inside one large tensor,
which can then be sent in place, or it is a run of small tensors.

`BucketMemory` lends the same memory from one weight sync to the next. Fresh pages, which the kernel zeroes
one by one, slow a 1 GiB broadcast over loopback to a third of its speed. `Checksum` is computed where the
bytes are, in host memory or on a GPU. All buckets of a weight sync are on one kind of device.
Invariant: memory is lent again only when no tensor refers to it.
"""

import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
import torch
import xxhash
from torch import nn

from protocol.messages import AdapterSpec, Manifest, TensorSpec

ALIGNMENT_BYTES = 16
"""Alignment of the start of every tensor, so that a view of any dtype is legal."""
SPAN_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}
"""Maximum size of a span, by device type. On a CPU, a span fits in the cache while it is checked, and is
large enough to hide the cost of a call. On a GPU, a call takes 0.35 ms, the time of some 25 MiB."""
LARGE_PART = 4
"""Divisor of the span size that gives the size from which a tensor has its own spans. Copying a smaller
tensor costs less than another broadcast."""
NamedTensors = Iterable[tuple[str, torch.Tensor]]
MOST_BUCKETS = 2.25
"""Size of the kept memory, in full buckets: one bucket arrives while one is loaded. A tensor larger than a
bucket may take all of it."""
_WORD_BYTES = 8


class BucketSlot(msgspec.Struct, frozen=True):
    """Position of a tensor in its bucket."""

    spec: TensorSpec
    start: int
    """Offset of the first byte."""
    num_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.num_bytes


class TensorRun(msgspec.Struct, frozen=True):
    """Neighbors that travel together: one large tensor, or small ones with their gaps."""

    slots: tuple[BucketSlot, ...]
    is_large: bool

    @property
    def start(self) -> int:
        return self.slots[0].start

    @property
    def end(self) -> int:
        return self.slots[-1].end


class Bucket(msgspec.Struct, frozen=True):
    """Tensors of a weight sync that are gathered, sent, checked and loaded together."""

    index: int
    slots: tuple[BucketSlot, ...]
    num_bytes: int

    def runs(self, span_bytes: int) -> Iterator[TensorRun]:
        small: list[BucketSlot] = []
        for slot in self.slots:
            is_large = slot.num_bytes * LARGE_PART >= span_bytes
            if small and (is_large or slot.end - small[0].start > span_bytes):
                yield TensorRun(tuple(small), is_large=False)
                small = []
            if is_large:
                yield TensorRun((slot,), is_large=True)
            else:
                small.append(slot)
        if small:
            yield TensorRun(tuple(small), is_large=False)

    def spans(self, buffer: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield what each broadcast carries, as views into the bucket's flat buffer."""
        span_bytes = span_bytes_on(buffer.device)
        for run in self.runs(span_bytes):
            if run.start < run.end:
                yield from buffer[run.start : run.end].split(span_bytes)

    def views(self, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return each tensor with its name, as a view into the bucket's flat buffer."""
        return [(slot.spec.name, view(slot, buffer, 0)) for slot in self.slots]


def make_manifest(
    tensors: NamedTensors,
    wire_dtype: torch.dtype,
    bucket_bytes: int,
    wire: Literal["dense", "delta"] = "dense",
    adapter: AdapterSpec | None = None,
) -> Manifest:
    """Return the manifest of tensors, in their order. The last ones are those of `adapter`."""
    specs = tuple(
        TensorSpec(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(dtype_on_wire(tensor, wire_dtype)).removeprefix("torch."),
        )
        for name, tensor in tensors
    )
    return Manifest(tensors=specs, bucket_bytes=bucket_bytes, wire=wire, adapter=adapter)


def dtype_on_wire(tensor: torch.Tensor, wire_dtype: torch.dtype) -> torch.dtype:
    """Return `wire_dtype` for a floating-point tensor, but the tensor's own dtype for integers and a `nn.Buffer`.

    No pass casts the buffers of a policy, such as the biases that choose a token's experts.
    """
    return wire_dtype if tensor.is_floating_point() and not isinstance(tensor, nn.Buffer) else tensor.dtype


def split_into_buckets(manifest: Manifest) -> list[Bucket]:
    """Return the buckets of a manifest."""
    buckets: list[Bucket] = []
    slots: list[BucketSlot] = []
    end = 0
    for spec in manifest.tensors:
        num_bytes = math.prod(spec.shape) * spec_dtype(spec).itemsize
        if slots and aligned(end + num_bytes) > manifest.bucket_bytes:
            buckets.append(Bucket(len(buckets), tuple(slots), end))
            slots, end = [], 0
        slots.append(BucketSlot(spec, end, num_bytes))
        end = aligned(end + num_bytes)
    if slots:
        buckets.append(Bucket(len(buckets), tuple(slots), end))
    return buckets


def span_bytes_on(device: torch.device) -> int:
    """Return the maximum size of a span on a device.

    The ranks of one collective have devices of one kind.
    """
    return SPAN_BYTES[device.type]


def view(slot: BucketSlot, buffer: torch.Tensor, buffer_start: int) -> torch.Tensor:
    """Return the slot's tensor in a buffer.

    `buffer_start` is the position of the buffer's first byte in the bucket.
    """
    start = slot.start - buffer_start
    return buffer[start : start + slot.num_bytes].view(spec_dtype(slot.spec)).view(slot.spec.shape)


def spec_dtype(spec: TensorSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    return dtype


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class BucketMemory:
    """Memory that is lent as buffers for the buckets of one manifest."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self._device = device
        sizes = [aligned(bucket.num_bytes) for bucket in split_into_buckets(manifest)]
        self._num_bytes = min(sum(sizes), max(int(MOST_BUCKETS * manifest.bucket_bytes), max(sizes, default=0)))
        # Pages that no bucket has used yet take no memory.
        self._whole = torch.empty(self._num_bytes if device.type == "cpu" else 0, dtype=torch.uint8).numpy().data
        self._loans: dict[int, int] = {}
        """First byte and end of each loan."""

    def has_room(self, num_bytes: int) -> bool:
        """Return whether a buffer can be lent without allocating fresh memory."""
        return self._device.type != "cpu" or self._gap(num_bytes) is not None

    def lend(self, num_bytes: int) -> torch.Tensor:
        """Return a flat uint8 buffer.

        The loan ends automatically with the last tensor that refers to it.
        """
        start = self._gap(num_bytes)
        if self._device.type != "cpu" or num_bytes == 0 or start is None:  # torch caches freed GPU memory
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        loan = self._whole[start : start + num_bytes]
        self._loans[start] = start + aligned(num_bytes)
        # The loan lives as long as the storage of the tensor below, which all views of it share.
        weakref.finalize(loan, self._loans.pop, start).atexit = False
        return torch.frombuffer(loan, dtype=torch.uint8)

    def _gap(self, num_bytes: int) -> int | None:
        """Return the start of that many free bytes, or None if there are not enough."""
        start = 0
        for taken, end in sorted(self._loans.copy().items()):  # a copy: a loan may end meanwhile
            if taken - start >= num_bytes:
                break
            start = end
        return start if start + num_bytes <= self._num_bytes else None


class Checksum:
    """Checksum of spans of bytes, which are added in order.

    On a GPU, the same bytes in different spans give a different checksum.
    """

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self._sums: list[torch.Tensor] = []

    def update(self, bytes_N: torch.Tensor) -> None:
        """Add the next bytes, a contiguous uint8 tensor. On a GPU, this only queues work."""
        if bytes_N.device.type == "cpu":
            self._hash.update(bytes_N.numpy().data)
        else:
            self._sums.append(device_sums(bytes_N))

    def value(self) -> int:
        """Return the checksum, of 64 bits. On a GPU, this waits for the queued work."""
        for sums in self._sums:
            self._hash.update(sums.cpu().numpy().data)
        self._sums.clear()
        return self._hash.intdigest()


def device_sums(bytes_N: torch.Tensor) -> torch.Tensor:
    """Return two sums of the 64-bit words modulo 2^64, and one of the remaining bytes.

    The word sums are plain and weighted by position, as Fletcher's. The remaining bytes are weighted too.
    """
    num_whole = len(bytes_N) // _WORD_BYTES * _WORD_BYTES
    words_W = bytes_N[:num_whole].view(torch.int64)
    weights_W = torch.arange(1, len(words_W) + 1, device=bytes_N.device)
    rest = bytes_N[num_whole:].to(torch.int64)
    weighted_rest = rest * torch.arange(1, len(rest) + 1, device=bytes_N.device)
    return torch.stack([words_W.sum(), (words_W * weights_W).sum(), weighted_rest.sum()])


def checksum_of(checksums: list[int]) -> str:
    """Return one checksum of a version, from the checksums of its buckets in order."""
    return xxhash.xxh3_64_hexdigest(b"".join(checksum.to_bytes(8, "little") for checksum in checksums))
