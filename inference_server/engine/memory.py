"""GPU memory of this process, for callers that run before vLLM."""

import torch


def gpu_memory_bytes() -> tuple[int, int] | None:
    """Return free and total memory of the first GPU in bytes, or None without a GPU."""
    return torch.cuda.mem_get_info() if torch.cuda.is_available() else None
