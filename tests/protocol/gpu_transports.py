"""Whether this machine can test a transport between GPUs; if not, the test is skipped with the reason."""

import pytest
import torch

from protocol.installation import install_command
from protocol.transports.nccl import SHARED_GPU_SWITCH, ranks_may_share_a_gpu, why_not_installed


def require_gpu_transport(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the test, or let the two ranks of processes started from now on share the GPU, if there is only one."""
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    if transport != "nccl":
        return
    if why_not_installed() is not None:
        pytest.skip(f"no cupy with a libnccl: {install_command('nccl')}")
    if torch.cuda.device_count() < 2:
        monkeypatch.setenv(SHARED_GPU_SWITCH, "1")
        if not ranks_may_share_a_gpu():
            pytest.skip("NCCL before 2.30.3 needs two GPUs")
