"""Trimming returns free pages between used blocks to the system."""

import psutil

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
