"""`python -m tests.rank_on_cpu train run.toml …`: a rank that torchrun starts, on a CPU, sharded if the environment says so."""

import os
import sys

from learner.__main__ import main
from tests.learner.training.sharding import shard_on_cpu

if __name__ == "__main__":
    if os.environ.get("ACCELERATE_USE_FSDP"):
        shard_on_cpu()
    main(sys.argv[1:])
