"""The checksum of a bucket, taken on both sides where its bytes lie: in host memory or on a GPU.

Both sides of one push have their buckets on the same kind of device, so the two ways need not agree with each other.
"""

import torch
import xxhash

_WORD_BYTES = 8


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
