"""Choice of the transport of a weight sync, made by the learner.

It depends on where both sides compute and on what both have installed.
"""

import logging
import os
import socket
from collections.abc import Sequence
from typing import Literal

import torch

from protocol.errors import ConfigError
from protocol.installation import install_command
from protocol.messages import Transport
from protocol.transports.cuda_ipc import has_expandable_segments
from protocol.transports.nccl import extra_for_nccl, is_installed

log = logging.getLogger(__name__)
CPU = "cpu"


def own_device_name(device: torch.device) -> str:
    """Return "<host>/<id of the GPU>", or "cpu" if tensors travel through the CPU."""
    if device.type != "cuda":
        return CPU
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"


def offered_transports() -> list[Transport]:
    """Return the transports that a weight sync may use, as seen from this process.

    A process that will fork must not call it, because it searches for a GPU.
    """
    offered: list[Transport] = ["gloo", "tcp"]
    if torch.cuda.is_available():
        if not has_expandable_segments(os.environ):
            offered.append("ipc")
        if is_installed():
            offered.append("nccl")
    return offered


def choose_transport(
    wanted: Literal["auto", "gloo", "tcp", "nccl", "ipc"],
    learner_device: str,
    worker_devices: Sequence[str],
    *,
    learner_transports: Sequence[str],
    server_transports: Sequence[str],
    ranks_may_share_a_gpu: bool = False,
) -> Transport:
    """Return the transport of a weight sync.

    "auto" chooses ipc within one GPU, nccl between GPUs, and gloo otherwise. Devices have the names that
    `own_device_name` returns.
    Example: choose_transport("auto", "a/1", ["a/1"], learner_transports=["gloo", "ipc"], ...) == "ipc"

    Raises:
        ConfigError: If the wanted transport is impossible.
    """
    devices = [learner_device, *worker_devices]
    where = f"The learner computes on {learner_device}, the server's workers on {', '.join(worker_devices)}"

    def obstacle(transport: Transport, may_share: bool = False) -> str | None:
        return _obstacle(transport, devices, learner_transports, server_transports, may_share=may_share)

    # Ranks that share a GPU spin on it in turns, so nccl shares a GPU only if it is set explicitly.
    chosen: Transport = (
        wanted if wanted != "auto" else "ipc" if not obstacle("ipc") else "nccl" if not obstacle("nccl") else "gloo"
    )
    reason = obstacle(chosen, may_share=ranks_may_share_a_gpu)
    if reason:
        remedy = 'set learner.weight_sync.transport = "auto" to use a transport that works'
        if wanted == "auto":
            remedy = "no transport fits both sides. Install the same slipstream-rl on both"
        raise ConfigError(f"weights cannot be sent over {chosen}: {reason}. {where}; {remedy}")
    if wanted == "auto" and chosen == "gloo":
        detour = why_over_cpus(
            learner_device, worker_devices, learner_transports=learner_transports, server_transports=server_transports
        )
        if detour is not None:
            log.warning(
                "sending weights over gloo through the CPUs: %s. %s (learner.weight_sync.transport)", detour, where
            )
    return chosen


def why_over_cpus(
    learner_device: str,
    worker_devices: Sequence[str],
    *,
    learner_transports: Sequence[str],
    server_transports: Sequence[str],
) -> str | None:
    """Return why weights between GPUs have to go through the CPUs, which is slow.

    Return None if they need not, or if a side has no GPU.
    """
    devices = [learner_device, *worker_devices]
    if CPU in devices:
        return None
    ipc, nccl = (_obstacle(transport, devices, learner_transports, server_transports) for transport in ("ipc", "nccl"))
    return f"ipc is not possible because {ipc}, and nccl is not possible because {nccl}" if ipc and nccl else None


def _obstacle(
    transport: Transport,
    devices: Sequence[str],
    learner_transports: Sequence[str],
    server_transports: Sequence[str],
    *,
    may_share: bool = False,
) -> str | None:
    for side, offered in (("learner", learner_transports), ("server", server_transports)):
        if transport not in offered:
            return f"the {side} does not offer {transport}, which needs {_needs(transport)}"
    return _obstacle_of_place(transport, devices, may_share)


def _needs(transport: Transport) -> str:
    if transport == "nccl":
        return f"an NVIDIA GPU and cupy with libnccl on both sides ({install_command(extra_for_nccl())})"
    if transport == "ipc":
        return "an NVIDIA GPU on both sides, without expandable_segments in PYTORCH_ALLOC_CONF"
    return "slipstream-rl on both sides"


def _obstacle_of_place(transport: Transport, devices: Sequence[str], may_share: bool) -> str | None:
    gpus = {device.rpartition("/")[2] for device in devices}  # two containers on one GPU have two host names
    if transport in ("nccl", "ipc") and CPU in devices:
        return "it works only between GPUs"
    if transport == "ipc" and len(set(devices)) > 1:
        return "it needs the learner and all workers on the same GPU of one host"
    if transport == "nccl" and len(gpus) < len(devices) and not may_share:
        return (
            "two ranks would share a GPU, which needs NCCL 2.30.3 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1 on both "
            "sides"
        )
    return None
