"""A push of weights, sender and receiver side by side: manifest, buckets, checksum.

    named tensors ─▶ manifest ─▶ buckets ─▶ collective ─▶ buckets ─▶ load(named tensors)

Both sides cut the same manifest into the same buckets, so the bytes need no framing. A bucket holds whole tensors, in
the manifest's order; one larger than a bucket travels alone. The checksum is over every byte sent, padding included.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator

import msgspec
import torch

from protocol.collective import Collective
from protocol.messages import Manifest, TensorSpec

ALIGNMENT_BYTES = 16
"""Every tensor starts at a multiple, so that a view of any dtype is legal."""

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def make_manifest(tensors: NamedTensors, wire_dtype: torch.dtype, bucket_bytes: int) -> Manifest:
    """Describe tensors in their order; floating-point ones travel as `wire_dtype`, others as they are."""
    specs = tuple(
        TensorSpec(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(wire_dtype if tensor.is_floating_point() else tensor.dtype).removeprefix("torch."),
        )
        for name, tensor in tensors
    )
    return Manifest(tensors=specs, bucket_bytes=bucket_bytes)


def send_weights(collective: Collective, manifest: Manifest, tensors: NamedTensors) -> str:
    """Broadcast tensors in the manifest's order; return the checksum of the bytes. Raises PushFailed."""
    digest = hashlib.sha256()
    source = iter(tensors)
    for bucket in _buckets(manifest):
        buffer = torch.zeros(_num_bytes(bucket), dtype=torch.uint8)
        for spec, view in _views(bucket, buffer):
            name, tensor = next(source)
            if name != spec.name:
                raise ValueError(f"the manifest expects {spec.name}, the model gave {name}")
            view.copy_(tensor)
        collective.broadcast(buffer)
        digest.update(buffer.numpy().data)
    return digest.hexdigest()[:16]


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says of a push that it has received whole."""

    checksum: str
    receive_s: float
    load_s: float


def receive_weights(
    collective: Collective, manifest: Manifest, load: Callable[[list[tuple[str, torch.Tensor]]], None]
) -> Received:
    """Receive every bucket and hand its tensors to `load`, which may keep them: each bucket has its own memory."""
    digest = hashlib.sha256()
    receive_s = load_s = 0.0
    for bucket in _buckets(manifest):
        started = time.monotonic()
        buffer = torch.empty(_num_bytes(bucket), dtype=torch.uint8)
        collective.broadcast(buffer)
        received = time.monotonic()
        digest.update(buffer.numpy().data)
        load([(spec.name, view) for spec, view in _views(bucket, buffer)])
        receive_s += received - started
        load_s += time.monotonic() - received
    return Received(checksum=digest.hexdigest()[:16], receive_s=receive_s, load_s=load_s)


def _buckets(manifest: Manifest) -> Iterator[list[TensorSpec]]:
    bucket: list[TensorSpec] = []
    for spec in manifest.tensors:
        if bucket and _num_bytes(bucket) + _num_bytes([spec]) > manifest.bucket_bytes:
            yield bucket
            bucket = []
        bucket.append(spec)
    if bucket:
        yield bucket


def _num_bytes(bucket: list[TensorSpec]) -> int:
    return sum(_padded_bytes(spec) for spec in bucket)


def _views(bucket: list[TensorSpec], buffer: torch.Tensor) -> Iterator[tuple[TensorSpec, torch.Tensor]]:
    """Yield each tensor of the bucket as a view into the flat buffer."""
    offset = 0
    for spec in bucket:
        end = offset + _tensor_bytes(spec)
        yield spec, buffer[offset:end].view(getattr(torch, spec.dtype)).view(spec.shape)
        offset += _padded_bytes(spec)


def _tensor_bytes(spec: TensorSpec) -> int:
    return math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize


def _padded_bytes(spec: TensorSpec) -> int:
    return -(-_tensor_bytes(spec) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
