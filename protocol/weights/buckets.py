"""How a push is cut: the manifest's tensors into flat buckets, a bucket into spans.

    named tensors ─▶ manifest ─▶ buckets (memory: one buffer each) ─▶ spans (transfer: one broadcast each)

Both sides cut the same manifest by the same rules, so the bytes need no framing. A bucket holds whole tensors in the
manifest's order, and one that is larger than a bucket is a bucket alone. Every span lies inside one large tensor, which can
then travel from where it is, or is a run of small ones.

`BucketMemory` lends the same memory from push to push, because the kernel hands out fresh pages one by one and zeroed: a broadcast of
1 GiB over the loopback would run at a third of its speed. `Checksum` is taken on both sides where the bytes lie, in host memory or on
a GPU; one push has its buckets on one kind of device. Invariant: memory is lent again only when no tensor refers to it.
"""

import math
import weakref
from collections.abc import Iterable, Iterator
from typing import Literal

import msgspec
import torch
import xxhash

from protocol.messages import Manifest, TensorSpec

ALIGNMENT_BYTES = 16
"""Every tensor starts at a multiple, so that a view of any dtype is legal."""
SPAN_BYTES = {"cpu": 16 << 20, "cuda": 64 << 20}
"""By the kind of device. On a CPU small enough that a span is checked while it is in the cache; large enough that the calls do not
count: on a GPU one takes 0.35 ms, in which some 25 MiB could go."""
LARGE_PART = 4
"""A tensor of a span ÷ this and more gets spans of its own; to copy a smaller one costs less than a broadcast more."""
NamedTensors = Iterable[tuple[str, torch.Tensor]]
MOST_BUCKETS = 2.25
"""What is kept, in full buckets: one arrives while one is loaded. A tensor larger than a bucket may have all of it."""
_WORD_BYTES = 8


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
        if slots and aligned(end + num_bytes) > manifest.bucket_bytes:
            buckets.append(Bucket(len(buckets), tuple(slots), end))
            slots, end = [], 0
        slots.append(Slot(spec, end, num_bytes))
        end = aligned(end + num_bytes)
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


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class BucketMemory:
    """Lends buffers for the buckets of one manifest out of one piece of memory."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self._device = device
        sizes = [aligned(bucket.num_bytes) for bucket in cut(manifest)]
        self._num_bytes = min(sum(sizes), max(int(MOST_BUCKETS * manifest.bucket_bytes), max(sizes, default=0)))
        # What no bucket has used yet takes no memory.
        self._whole = torch.empty(self._num_bytes if device.type == "cpu" else 0, dtype=torch.uint8).numpy().data
        self._loans: dict[int, int] = {}
        """First byte and end of each."""

    def has_room(self, num_bytes: int) -> bool:
        """Whether a buffer can be lent without taking fresh memory."""
        return self._device.type != "cpu" or self._gap(num_bytes) is not None

    def lend(self, num_bytes: int) -> torch.Tensor:
        """Return a flat uint8 buffer; it comes back by itself with the last tensor that refers to it."""
        start = self._gap(num_bytes)
        if self._device.type != "cpu" or num_bytes == 0 or start is None:  # torch itself keeps what was freed on a GPU
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        loan = self._whole[start : start + num_bytes]
        self._loans[start] = start + aligned(num_bytes)
        # The loan lives as long as the storage of the tensor below, which all views of it share.
        weakref.finalize(loan, self._loans.pop, start).atexit = False
        return torch.frombuffer(loan, dtype=torch.uint8)

    def _gap(self, num_bytes: int) -> int | None:
        """Return where that many bytes are free."""
        start = 0
        for taken, end in sorted(self._loans.copy().items()):  # a copy, for any may come back meanwhile
            if taken - start >= num_bytes:
                break
            start = end
        return start if start + num_bytes <= self._num_bytes else None


class Checksum:
    """Takes spans of bytes in their order; the same bytes in other spans give another checksum on a GPU."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_64()
        self._sums: list[torch.Tensor] = []

    def update(self, bytes_N: torch.Tensor) -> None:
        """Take the next bytes: a contiguous uint8 tensor. On a GPU it only queues the work."""
        if bytes_N.device.type == "cpu":
            self._hash.update(bytes_N.numpy().data)
        else:
            self._sums.append(device_sums(bytes_N))

    def value(self) -> int:
        """Return 64 bits; waits for the GPU."""
        for sums in self._sums:
            self._hash.update(sums.cpu().numpy().data)
        self._sums.clear()
        return self._hash.intdigest()


def device_sums(bytes_N: torch.Tensor) -> torch.Tensor:
    """Return two sums of 64-bit words modulo 2^64, plain and weighted by position (as Fletcher's), and of the bytes left."""
    num_whole = len(bytes_N) // _WORD_BYTES * _WORD_BYTES
    words_W = bytes_N[:num_whole].view(torch.int64)
    weights_W = torch.arange(1, len(words_W) + 1, device=bytes_N.device)
    rest = bytes_N[num_whole:].to(torch.int64)
    weighted_rest = rest * torch.arange(1, len(rest) + 1, device=bytes_N.device)
    return torch.stack([words_W.sum(), (words_W * weights_W).sum(), weighted_rest.sum()])


def checksum_of(checksums: list[int]) -> str:
    """Return one name for all bytes of a version, from the checksums of its buckets in order."""
    return xxhash.xxh3_64_hexdigest(b"".join(checksum.to_bytes(8, "little") for checksum in checksums))
