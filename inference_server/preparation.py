"""Everything that can fail before a model is loaded, the cheapest first; a model may be downloaded on the way.

    keys ─▶ API key ─▶ endpoint ─▶ HTTP port ─▶ vLLM's names ─▶ the model's files ─▶ block size ─▶ GPUs or memory ─▶ StartupResources

Invariant: vLLM has not been imported, and every error is a ConfigError with its remedy.
"""

import contextlib
import logging
import socket
from pathlib import Path

import msgspec

from inference_server.config import ServerRun
from inference_server.engine.vllm_names import check_vllm
from inference_server.http_access import listen, read_api_key
from protocol.channel.keys import ServerKeys, server_keys
from protocol.channel.sockets import ServerChannel
from protocol.doctor import GIB, total_memory_bytes
from protocol.endpoint import exposure
from protocol.errors import ConfigError
from protocol.hardware import gpu_choice
from protocol.messages import ModelFingerprint
from protocol.model_files import fingerprint, has_latent_attention, resolve_model, weight_bytes

log = logging.getLogger(__name__)

MIB = 1 << 20
CPU_BLOCK = 32
WORKER_BYTES = 256 * MIB
"""Of a worker on a CPU beside its weights and its KV cache: Python, torch and vLLM."""


class StartupResources(msgspec.Struct, frozen=True, eq=False):
    """What `prepare` has found and taken."""

    keys: ServerKeys | None
    api_key: str | None
    listener: socket.socket | None
    """Of HTTP, closed with the stack it was opened on; None where HTTP is off."""
    model_path: Path
    model: ModelFingerprint


def prepare(run: ServerRun, open_things: contextlib.ExitStack) -> StartupResources:
    """Look at everything and take what must be held. Raises ConfigError."""
    keys = server_keys(run.keys) if run.keys is not None else None
    api_key = read_api_key(run.server, insecure=run.insecure)
    # Only to fail now if it cannot. Open while the engine starts, which keeps the loop from reading, it would fill with
    # the Hellos of a learner that waits, and libzmq may abort over what comes of that.
    ServerChannel(run.endpoint, keys, insecure=run.insecure).close()
    if note := exposure(run.endpoint, has_keys=keys is not None):
        log.warning(note)
    listener = listen(run.server)
    if listener is not None:
        open_things.callback(listener.close)
    check_vllm()
    model_path = resolve_model(run.model)
    model = fingerprint(model_path)
    check_block_size(run, model_path)
    check_room(run, model_path)
    return StartupResources(keys, api_key, listener, model_path, model)


def check_block_size(run: ServerRun, model_path: Path) -> None:
    """Raises ConfigError for what vLLM's attention on a CPU would fail of, once the model is loaded."""
    block_size = run.server.block_size
    if gpu_choice().has_gpu or block_size is None or has_latent_attention(model_path):
        return  # for latent attention vLLM sets its own
    if block_size % CPU_BLOCK:
        raise ConfigError(
            f"server.block_size = {block_size}: on a CPU vLLM's attention takes multiples of {CPU_BLOCK}; set it to "
            f"{max(CPU_BLOCK, round(block_size / CPU_BLOCK) * CPU_BLOCK)}"
        )


def check_room(run: ServerRun, model_path: Path) -> None:
    """Refuse more workers than there are GPUs, and on a CPU more memory than the machine has. Raises ConfigError."""
    server, gpu = run.server, gpu_choice()
    sizes = (
        f"server.tensor_parallel_size = {server.tensor_parallel_size} times server.data_parallel_size = "
        f"{server.data_parallel_size}"
    )
    if gpu.has_gpu:
        if server.num_workers > gpu.num_gpus:
            raise ConfigError(
                f"{sizes} wants {server.num_workers} GPUs, one for each worker, and there are {gpu.num_gpus} "
                f"({gpu.reason}). Lower one of the two, or show the server more with CUDA_VISIBLE_DEVICES"
            )
        return
    total, needed = total_memory_bytes(), needed_bytes(run, model_path)
    if total is not None and needed > total:
        raise ConfigError(
            f"server.kv_cache_memory_mib = {server.kv_cache_memory_mib} for each worker ({sizes}) and the weights need "
            f"{needed / GIB:.1f} GiB, this machine has {total / GIB:.1f} GiB. Lower one of the three, or choose a smaller "
            "model"
        )


def needed_bytes(run: ServerRun, model_path: Path) -> int:
    """What the server takes of a CPU's memory: each replica its weights, each worker its KV cache and itself."""
    server, weights = run.server, weight_bytes(model_path, run.computes_in)
    of_kv = (server.kv_cache_memory_mib or 0) * MIB
    return server.data_parallel_size * weights + server.num_workers * (of_kv + WORKER_BYTES)
