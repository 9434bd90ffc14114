"""The delta of a bucket: bit-exact for all values, small for few changes, and safe when malformed."""

import math
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import PushError
from protocol.weights.delta_codec import CHUNK_BYTES, DENSE, DIFFERENCE, OVERWRITE, decode, encode, max_encoded_bytes

HEADER = struct.Struct("<BIIII")
ELEMENT_BYTES = st.sampled_from([1, 2, 4, 8])


def bucket(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(words.view(np.uint8).copy())


def random_bucket(num_bytes: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8))


def assert_arrives(new: torch.Tensor, base: torch.Tensor, element_bytes: int) -> np.ndarray:
    """Encode `new` against `base`, which must not change. Return the message."""
    message = encode(new, base, element_bytes)
    arrived = base.clone()
    decode(torch.from_numpy(message).numpy(), arrived, element_bytes)
    assert torch.equal(arrived, new)
    assert len(message) <= max_encoded_bytes(len(new))
    return message


def one_chunk(kind: int, num_changed: int, gaps: bytes, values: bytes, num_gap_bytes: int | None = None) -> np.ndarray:
    """Return a message of one chunk, as the docstring of delta.py specifies, with two streams deflated by zlib."""
    deflated = zlib.compress(gaps), zlib.compress(values)
    num_gap_bytes = len(gaps) if num_gap_bytes is None else num_gap_bytes
    header = HEADER.pack(kind, num_changed, num_gap_bytes, len(deflated[0]), len(deflated[1]))
    return np.frombuffer(header + b"".join(deflated), np.uint8)


@given(st.integers(0, 2**32), st.integers(0, 200), st.floats(0, 1), ELEMENT_BYTES)
def test_any_bucket_arrives_bit_for_bit(seed: int, num_blocks: int, density: float, element_bytes: int) -> None:
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 256, 16 * num_blocks, np.uint8)
    new = np.where(rng.random(len(base)) < density, rng.integers(0, 256, len(base), np.uint8), base)
    assert_arrives(bucket(new), bucket(base), element_bytes)


@pytest.mark.parametrize("element_bytes", [1, 2, 4, 8])
def test_changes_arrive_at_any_distance(element_bytes: int) -> None:
    gaps = np.array([0, 1, 253, 254, 255, 256, 509, 510, 511, 65_535, 65_536, 100_003])
    base = np.zeros(1 << 18, f"<u{element_bytes}")
    new = base.copy()
    new[np.cumsum(gaps + 1) - 1] = new[-1] = 77
    message = assert_arrives(bucket(new), bucket(base), element_bytes)
    assert message[0] in (DIFFERENCE, OVERWRITE)


@pytest.mark.parametrize("num_bytes", [CHUNK_BYTES, CHUNK_BYTES + 16, 2 * CHUNK_BYTES - 16])
def test_a_bucket_of_several_chunks_arrives(num_bytes: int) -> None:
    base = random_bucket(num_bytes)
    new = base.clone()
    new[-1] += 1
    new[:: CHUNK_BYTES // 3] += 1
    assert_arrives(new, base, 2)
    assert_arrives(random_bucket(num_bytes, seed=1), base, 4)


def test_an_unchanged_bucket_is_tiny() -> None:
    base = random_bucket(2 * CHUNK_BYTES)
    assert len(assert_arrives(base.clone(), base, 2)) < 100
    assert len(assert_arrives(torch.empty(0, dtype=torch.uint8), torch.empty(0, dtype=torch.uint8), 2)) == 0


@pytest.mark.parametrize("density", [0.003, 0.1])
def test_a_step_of_one_ulp_needs_little_more_than_its_entropy(density: float) -> None:
    rng = np.random.default_rng(0)
    num_words = 1 << 20
    base = torch.randn(num_words, generator=torch.Generator().manual_seed(0)).bfloat16().view(torch.uint8)
    steps = (rng.random(num_words) < density) * rng.choice([-1, 1], num_words)
    message = assert_arrives(bucket((base.numpy().view("<u2") + steps).astype("<u2")), base, 2)
    where_bits = -density * math.log2(density) - (1 - density) * math.log2(1 - density)
    assert len(message) < 1.15 * num_words * (where_bits + density) / 8


def test_each_chunk_uses_its_smallest_encoding() -> None:
    base = random_bucket(1 << 16)
    steps = np.tile(np.array([1, -1]).astype("<u2"), len(base) // 4)
    message = assert_arrives(bucket(base.numpy().view("<u2") + steps), base, 2)
    assert message[0] == DIFFERENCE and len(message) < len(base) / 10
    message = assert_arrives(torch.zeros_like(base), base, 2)
    assert message[0] == OVERWRITE and len(message) < len(base) / 50
    unrelated = random_bucket(1 << 16, seed=1)
    message = assert_arrives(unrelated, base, 2)
    assert bytes(message) == HEADER.pack(DENSE, 0, 0, 0, 1 << 16) + bytes(unrelated.numpy())
    assert max_encoded_bytes(CHUNK_BYTES + 16) == CHUNK_BYTES + 16 + 2 * HEADER.size


def test_the_wire_format_is_the_documented_one() -> None:
    base = np.zeros(1024, "<u2")
    base[300] = 0x0102
    expected = base.copy()
    expected[[7, 263, 300, 1023]] = 0x0301, 0xFFFF, 0x0100, 0x0005
    gaps = bytes([7, 255, 0, 36, 255, 255, 212])
    new_planes = bytes([0x01, 0xFF, 0x00, 0x05, 0x03, 0xFF, 0x01, 0x00])
    # The differences +0x0301, −1, −2 and +5 in zigzag: 0x0602, 1, 3 and 10.
    difference_planes = bytes([0x02, 1, 3, 10, 0x06, 0, 0, 0])
    for kind, planes in ((OVERWRITE, new_planes), (DIFFERENCE, difference_planes)):
        arrived = bucket(base)
        decode(one_chunk(kind, 4, gaps, planes), arrived, 2)
        assert np.array_equal(arrived.numpy().view("<u2"), expected)


def test_a_bucket_with_another_length_than_its_base_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"32 bytes .* base of 16"):
        encode(random_bucket(32), random_bucket(16), 2)


GUARD = b"\xa5" * 64


def decode_between_guards(message: bytes | np.ndarray, base: torch.Tensor, element_bytes: int) -> torch.Tensor | None:
    """Decode into a copy of `base` between guards. None: the message was rejected."""
    guards = torch.frombuffer(bytearray(GUARD), dtype=torch.uint8)
    memory = torch.cat([guards, base, guards])
    arrived = memory[len(GUARD) : len(GUARD) + len(base)]
    try:
        decode(np.frombuffer(message, np.uint8), arrived, element_bytes)
    except PushError as refusal:
        assert "the next weight sync must be dense" in str(refusal)
        return None
    finally:
        assert bytes(memory[: len(GUARD)].numpy()) == bytes(memory[-len(GUARD) :].numpy()) == GUARD
    return arrived


EDITS = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 255), st.sampled_from(["set", "insert", "cut"])))


@settings(max_examples=150)
@given(EDITS, ELEMENT_BYTES, st.sampled_from([0.0, 0.02, 1.0]), st.integers(0, 1))
def test_an_altered_message_is_rejected_or_decoded_within_the_base(
    edits: list[tuple[int, int, str]], element_bytes: int, density: float, is_long: int
) -> None:
    rng = np.random.default_rng(len(edits))
    base = rng.integers(0, 256, 4096 + is_long * CHUNK_BYTES, np.uint8)
    new = base + (rng.random(len(base)) < density).astype(np.uint8)
    message = bytearray(encode(bucket(new), bucket(base), element_bytes))
    for position, byte, edit in edits:
        # Half of the edits are in the first header, which random edits would rarely hit.
        position %= max(1, min(len(message), HEADER.size) if position % 2 else len(message))
        match edit:
            case "set":
                message[position : position + 1] = bytes([byte])
            case "insert":
                message[position:position] = bytes([byte]) * (byte + 1)
            case "cut":
                del message[position : position + byte]
    decode_between_guards(bytes(message), bucket(base), element_bytes)


def test_a_truncated_or_extended_message_leaves_the_base_unchanged() -> None:
    base = random_bucket(CHUNK_BYTES + 64)
    message = encode(base + 1, base, 2)
    for malformed in (message[:0], message[:1], message[:40], message[:-1], np.append(message, np.uint8(0))):
        arrived = base.clone()
        with pytest.raises(PushError, match="the next weight sync must be dense"):
            decode(malformed, arrived, 2)
        assert torch.equal(arrived, base)


STREAM = zlib.compress(b"1")
GAPS = zlib.compress(b"\x7f")


@pytest.mark.parametrize(
    ("kind", "num_changed", "gaps", "values"),
    [
        (OVERWRITE, 1, zlib.compress(b"\x80"), STREAM),
        (OVERWRITE, 1, GAPS, STREAM[:-1]),
        (OVERWRITE, 1, GAPS, STREAM + b"\0"),
        (OVERWRITE, 1, GAPS, zlib.compress(b"12")),
        (OVERWRITE, 1, GAPS, b""),
        (OVERWRITE, 2, GAPS, STREAM),
        (OVERWRITE + 1, 1, GAPS, STREAM),
        (DENSE, 1, GAPS, STREAM),
    ],
)
def test_an_invalid_chunk_changes_nothing(kind: int, num_changed: int, gaps: bytes, values: bytes) -> None:
    base = random_bucket(128)
    arrived = base.clone()
    message = HEADER.pack(kind, num_changed, 1, len(gaps), len(values)) + gaps + values
    with pytest.raises(PushError):
        decode(np.frombuffer(message, np.uint8), arrived, 1)
    assert torch.equal(arrived, base)
    decode(one_chunk(OVERWRITE, 1, b"\x7f", b"1"), arrived, 1)  # must not crash
    assert (arrived != base).nonzero().tolist() == [[127]]


@settings(max_examples=300)
@given(st.lists(st.integers(0, 255) | st.just(255), max_size=12), st.integers(0, 12), st.integers(-1, 1))
def test_gaps_are_decoded_as_by_a_slow_reference_decoder(gaps: list[int], num_changed: int, excess: int) -> None:
    num_words = 1024
    values = list(range(1, 1 + max(0, num_changed + excess)))
    base = torch.zeros(num_words, dtype=torch.uint8)
    arrived = decode_between_guards(one_chunk(OVERWRITE, num_changed, bytes(gaps), bytes(values)), base, 1)

    changed, word, is_open = [], 0, False
    for byte in gaps:
        word += byte
        is_open = byte == 255
        if not is_open:
            changed.append(word)
            word += 1
    fits = len(gaps) <= num_changed + num_words // 255 and all(word < num_words for word in changed)
    if is_open or len(changed) != num_changed or len(values) != num_changed or not fits:
        assert arrived is None
    else:
        assert arrived is not None and bytes(arrived[changed].tolist()) == bytes(values)
        assert arrived.count_nonzero() == num_changed


@pytest.mark.parametrize(
    ("num_changed", "num_gap_bytes", "gaps", "values"),
    [
        (0, 0, b"", bytes(1 << 26)),
        (1, 1, bytes(1 << 26), b"1"),
        (1, 1, b"\0", bytes(1 << 26)),
        (2**32 - 1, 2**32 - 1, bytes(1 << 26), bytes(1 << 26)),
    ],
)
def test_a_decompression_bomb_uses_little_memory(
    num_changed: int, num_gap_bytes: int, gaps: bytes, values: bytes
) -> None:
    base = random_bucket(4096)
    arrived = base.clone()
    message = one_chunk(DIFFERENCE, num_changed, gaps, values, num_gap_bytes)
    tracemalloc.start()
    try:
        with pytest.raises(PushError):
            decode(message, arrived, 1)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert torch.equal(arrived, base)


def test_the_temporary_memory_does_not_grow_with_the_bucket() -> None:
    base = random_bucket(8 * CHUNK_BYTES)
    new = base + 1
    tracemalloc.start()
    try:
        message = encode(new, base, 8)
        decode(message, base, 8)
        assert tracemalloc.get_traced_memory()[1] < 8 * CHUNK_BYTES
    finally:
        tracemalloc.stop()
    assert torch.equal(base, new)
