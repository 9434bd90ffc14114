"""Trimming returns free pages between used blocks to the system, again and again."""

import psutil
import pytest

from inference_server.engine import memory
from inference_server.engine.memory import trim


def test_a_trim_releases_the_holes_between_used_blocks():
    blocks = [
        bytearray(b"x" * 100_000) for _ in range(400)
    ]  # small enough for the heap, with or without other settings
    del blocks[::2]
    before = psutil.Process().memory_info().rss
    trim()
    assert before - psutil.Process().memory_info().rss > 0.9 * 200 * 96_000  # the full pages of each hole
    assert all(block == b"x" * 100_000 for block in blocks)


def test_the_trimmer_trims_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "TRIM_INTERVAL_S", 0.0)
    monkeypatch.setattr(memory, "trim", iter([None, None]).__next__)  # the third raises
    with pytest.raises(StopIteration):
        memory._trim_forever()
