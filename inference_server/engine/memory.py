"""The memory of this process's GPU, for whoever asks before vLLM does."""

import torch


def gpu_memory_bytes() -> tuple[int, int] | None:
    """Free and total; None without a GPU."""
    return torch.cuda.mem_get_info() if torch.cuda.is_available() else None
