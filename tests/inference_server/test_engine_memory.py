"""The pages between blocks that stay go back to the system."""

import psutil

from inference_server.engine.memory import trim


def test_a_trim_gives_back_the_holes_between_blocks_that_stay():
    blocks = [
        bytearray(b"x" * 100_000) for _ in range(400)
    ]  # small enough for the heap, with or without other settings
    del blocks[::2]
    before = psutil.Process().memory_info().rss
    trim()
    assert before - psutil.Process().memory_info().rss > 0.9 * 200 * 96_000  # the whole pages of each hole
    assert all(block == b"x" * 100_000 for block in blocks)
