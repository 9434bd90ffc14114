"""What the servers of a node take of the learner's GPU, for its memory plan.

    slipstream colocate ─▶ environment of each rank ─▶ learner/training/fit_memory.py

Both sides start at the same time, so a learner cannot measure it: its plan comes before the servers' allocations.
"""

import os
from typing import Self

import msgspec

VARIABLE = "SLIPSTREAM_SERVERS_ON_GPU"


class ServersOnGpu(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Servers that use the same GPU as a rank. All have the keys of [server]."""

    num_servers: int = 1
    num_shards: int = 1
    """Number of GPUs that share the weights of one server."""
    kv_cache_memory_mib: int | None = None
    """server.kv_cache_memory_mib. None: the server takes gpu_memory_utilization."""
    gpu_memory_utilization: float = 0.9

    def environment(self) -> dict[str, str]:
        """Return the environment from which a rank reads this."""
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def of_environment(cls) -> Self | None:
        """Return what `environment` has set, or None if no server is known to use the GPU."""
        found = os.environ.get(VARIABLE)
        return None if found is None else msgspec.json.decode(found, type=cls)
