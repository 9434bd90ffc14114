"""Which transport carries a push: decided by the learner from where both sides compute and what both have installed."""

import logging
import os
import socket
from collections.abc import Sequence
from typing import Literal

import torch

from protocol.collective.ipc import has_expandable_segments
from protocol.collective.nccl import is_installed
from protocol.errors import ConfigError
from protocol.messages import Transport

log = logging.getLogger(__name__)

CPU = "cpu"
NEEDS: dict[Transport, str] = {
    "gloo": "slipstream-rl on both sides",
    "tcp": "slipstream-rl on both sides",
    "nccl": 'an NVIDIA GPU, and cupy with a libnccl, on both sides (pip install "slipstream-rl[nccl]")',
    "ipc": "an NVIDIA GPU, and expandable_segments not set in PYTORCH_ALLOC_CONF, on both sides",
}


def own_device_name(device: torch.device) -> str:
    """Return "<host>/<id of the GPU>", or "cpu" for everything whose tensors go by way of the CPU."""
    if device.type != "cuda":
        return CPU
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"


def offered_transports() -> list[Transport]:
    """What a push may travel by, seen from this process. Looks for a GPU, so not for a process that will fork."""
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
    """Return what a push travels by; "auto": ipc within one GPU, nccl between GPUs, else gloo.

    Devices are named as by `own_device_name`. Raises ConfigError if what is wanted is impossible.
    Example: choose_transport("auto", "a/1", ["a/1"], learner_transports=["gloo", "ipc"], ...) == "ipc"
    """
    devices = [learner_device, *worker_devices]
    where = f"The learner computes on {learner_device}, the server's workers on {', '.join(worker_devices)}"

    def obstacle(transport: Transport, may_share: bool = False) -> str | None:
        for side, offered in (("learner", learner_transports), ("server", server_transports)):
            if transport not in offered:
                return f"the {side} does not offer it, which takes {NEEDS[transport]}"
        return _obstacle_of_place(transport, devices, may_share)

    # Ranks that share a GPU spin on it in turns, so nccl does that only for those who ask for it by name.
    chosen: Transport = (
        wanted if wanted != "auto" else "ipc" if not obstacle("ipc") else "nccl" if not obstacle("nccl") else "gloo"
    )
    reason = obstacle(chosen, may_share=ranks_may_share_a_gpu)
    if reason:
        raise ConfigError(
            f'weights cannot travel by {chosen}: {reason}. {where}; see learner.push.transport ("auto" takes what fits)'
        )
    if wanted == "auto" and chosen == "gloo" and CPU not in devices:
        log.warning(
            "weights go by gloo, over the CPUs: not by ipc because %s, not by nccl because %s. %s (learner.push.transport)",
            obstacle("ipc"), obstacle("nccl"), where,
        )  # fmt: skip
    return chosen


def _obstacle_of_place(transport: Transport, devices: Sequence[str], may_share: bool) -> str | None:
    gpus = {device.rpartition("/")[2] for device in devices}  # two containers on one GPU have two host names
    if transport in ("nccl", "ipc") and CPU in devices:
        return "it goes between GPUs only"
    if transport == "ipc" and len(set(devices)) > 1:
        return "it needs learner and workers on one and the same GPU of one host"
    if transport == "nccl" and len(gpus) < len(devices) and not may_share:
        return "two ranks would share a GPU, which takes NCCL 2.30.3 or newer and NCCL_MULTI_RANK_GPU_ENABLE=1 on both sides"
    return None
