"""Choice of the transport of a weight sync, made by the learner.

It depends on where both sides compute and on what both have installed.
"""

import logging
import socket
from collections.abc import Mapping, Sequence

import torch

from protocol.errors import ConfigError
from protocol.transports.collective import load_transport
from protocol.transports.registry import TRANSPORTS

log = logging.getLogger(__name__)
CPU = "cpu"


def own_device_name(device: torch.device) -> str:
    """Return "<host>/<id of the GPU>", or "cpu" if tensors travel through the CPU."""
    if device.type != "cuda":
        return CPU
    return f"{socket.gethostname()}/{torch.cuda.get_device_properties(device).uuid}"


def offered_transports() -> list[str]:
    """Return the transports that a weight sync may use, as seen from this process.

    The version follows where only equal ones connect: "nccl 2.29.7". A process that will fork must not call it,
    because it searches for a GPU.
    """
    has_gpu, transports = torch.cuda.is_available(), {name: load_transport(name) for name in TRANSPORTS}
    return [
        f"{name} {transport.version()}".rstrip()
        for name, transport in transports.items()
        if (has_gpu or not transport.between_gpus) and transport.why_not_here() is None
    ]


def find_offer(name: str, offered: Sequence[str]) -> str | None:
    """Return the entry of `offered_transports` for a transport, or None if it is not offered."""
    return next((entry for entry in offered if entry.partition(" ")[0] == name), None)


def choose_transport(
    wanted: str,
    learner_device: str,
    worker_devices: Sequence[str],
    *,
    learner_transports: Sequence[str],
    server_transports: Sequence[str],
) -> str:
    """Return the transport of a weight sync.

    "auto" chooses the first possible one of the registry: ipc within one GPU, nccl between GPUs, and tcp
    otherwise. Devices have the names that `own_device_name` returns.
    Example: choose_transport("auto", "a/1", ["a/1"], learner_transports=["tcp", "ipc"], ...) == "ipc"

    Raises:
        ConfigError: The wanted transport is impossible.
    """
    devices, is_explicit = [learner_device, *worker_devices], wanted != "auto"
    offers = {"learner": learner_transports, "server": server_transports}
    names = [wanted] if is_explicit else [name for name, entry in TRANSPORTS.items() if entry.is_automatic]
    obstacles = {name: _obstacle(name, devices, offers, is_explicit=is_explicit) for name in names}
    chosen = next((name for name, obstacle in obstacles.items() if obstacle is None), None)
    where = f"The learner computes on {learner_device}, the server's workers on {', '.join(worker_devices)}"
    if chosen is None:
        name, reason = obstacles.popitem()
        remedy = "no transport fits both sides. Install the same slipstream-rl on both"
        if is_explicit:
            remedy = 'set learner.weight_sync.transport = "auto" to use a transport that works'
        raise ConfigError(f"weights cannot be sent over {name}: {reason}. {where}; {remedy}")
    if not is_explicit and (detour := why_over_cpus(devices, offers)) is not None:
        log.warning(
            "sending weights over %s through the CPUs: %s. %s (learner.weight_sync.transport)", chosen, detour, where
        )
    return chosen


def why_over_cpus(devices: Sequence[str], offers: Mapping[str, Sequence[str]]) -> str | None:
    """Return why "auto" sends weights between GPUs through the CPUs, which is slow.

    Return None if it does not, or if a side has no GPU. `offers` are the transports of learner and server.
    """
    direct = [name for name, entry in TRANSPORTS.items() if entry.is_automatic and load_transport(name).between_gpus]
    obstacles = {name: _obstacle(name, devices, offers) for name in direct}
    if CPU in devices or None in obstacles.values():
        return None
    return ", and ".join(f"{name} is not possible because {obstacle}" for name, obstacle in obstacles.items())


def _obstacle(
    name: str, devices: Sequence[str], offers: Mapping[str, Sequence[str]], *, is_explicit: bool = False
) -> str | None:
    transport = load_transport(name)
    entries = {side: find_offer(name, offered) for side, offered in offers.items()}
    for side, entry in entries.items():
        if entry is None:
            return f"the {side} does not offer {name}, which needs {transport.needs()}"
    if transport.between_gpus and CPU in devices:
        return "it works only between GPUs"
    if len({*entries.values()}) > 1:
        versions = " and ".join(f"the {side} has {entry}" for side, entry in entries.items())
        return f"{versions}: only equal versions connect, so install the same torch on both sides"
    return transport.obstacle(devices, is_explicit)
