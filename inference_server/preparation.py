"""Startup checks before a model is loaded, the cheapest first. They may download the model.

    keys ─▶ API key ─▶ endpoint ─▶ HTTP port ─▶ vLLM's names ─▶ model files ─▶ block size, quantization
         ─▶ GPUs or memory ─▶ StartupResources

Invariant: vLLM is not imported, and every error is a ConfigError with its remedy.
"""

import contextlib
import logging
import socket
from pathlib import Path

import msgspec

from inference_server.config import INT8, ServerRun
from inference_server.engine.installed_vllm import check_vllm
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
"""Memory of a CPU worker without weights and KV cache: Python, torch and vLLM."""
WITHOUT_COPY = "set server.overlap_weight_loading = false, "


class StartupResources(msgspec.Struct, frozen=True, eq=False):
    """Results of `prepare`."""

    keys: ServerKeys | None
    api_key: str | None
    listener: socket.socket | None
    """HTTP socket, closed with the ExitStack that `prepare` received. None if HTTP is off."""
    model_path: Path
    model: ModelFingerprint


def prepare(run: ServerRun, open_things: contextlib.ExitStack) -> StartupResources:
    """Run all checks and open the HTTP socket. Raises ConfigError if a check fails."""
    keys = server_keys(run.keys) if run.keys is not None else None
    api_key = read_api_key(run.server, insecure=run.insecure)
    # Bind only to fail early. While the engine starts, the event loop reads nothing, so an open socket would
    # fill with the Hellos of a waiting learner. libzmq may abort as a consequence.
    ServerChannel(run.endpoint, keys, insecure=run.insecure).close()
    if warning := exposure(run.endpoint, has_keys=keys is not None):
        log.warning(warning)
    listener = listen(run.server)
    if listener is not None:
        open_things.callback(listener.close)
    return StartupResources(keys, api_key, listener, *prepare_model(run))


def prepare_model(run: ServerRun) -> tuple[Path, ModelFingerprint]:
    """Check what every node of a server needs. Raises ConfigError if a check fails."""
    check_vllm()
    model_path = resolve_model(run.model)
    check_block_size(run, model_path)
    check_quantization(run, model_path)
    check_room(run, model_path)
    return model_path, fingerprint(model_path)


def check_block_size(run: ServerRun, model_path: Path) -> None:
    """Check server.block_size, which fails on a CPU only after the model is loaded.

    Raises:
        ConfigError: vLLM's CPU attention does not support the block size.
    """
    block_size = run.server.block_size
    if gpu_choice().has_gpu or block_size is None or has_latent_attention(model_path):
        return  # vLLM chooses the block size for latent attention itself.
    if block_size % CPU_BLOCK:
        raise ConfigError(
            f"server.block_size = {block_size} is not a multiple of {CPU_BLOCK}, which vLLM's attention requires on a "
            f"CPU; set it to {max(CPU_BLOCK, round(block_size / CPU_BLOCK) * CPU_BLOCK)}"
        )


def check_quantization(run: ServerRun, model_path: Path) -> None:
    """Check server.quantization, which vLLM would ignore on some devices.

    Raises:
        ConfigError: This device has no kernels for it, or weight syncs cannot quantize the model.
    """
    method, gpu = run.server.quantization, gpu_choice()
    if method is None:
        return
    key = f'server.quantization = "{method}"'
    if method == INT8 and gpu.has_gpu:
        raise ConfigError(
            f'{key} runs on CPUs only: on a GPU, vLLM quantizes only experts with it. Set it to "fp8_per_tensor"'
        )
    if method != INT8 and not gpu.has_gpu:
        raise ConfigError(f'{key} needs a GPU, but there is none ({gpu.reason}). Set it to "{INT8}", or unset it')
    if method != INT8 and run.computes_in != "bfloat16":
        raise ConfigError(f'{key} computes in bfloat16, not in {run.computes_in}. Set server.dtype = "bfloat16"')
    if has_latent_attention(model_path):
        raise ConfigError(
            f"{key} is not supported with model = {run.model!r}: it has latent attention (MLA), and vLLM derives "
            "matrices from its quantized layers that a weight sync would not renew. Unset it; to save memory, set "
            'server.kv_cache_dtype = "fp8"'
        )


def check_room(run: ServerRun, model_path: Path) -> None:
    """Check that there are enough GPUs, or enough memory on a CPU.

    Raises:
        ConfigError: There are fewer GPUs than workers, or too little memory.
    """
    server, gpu = run.server, gpu_choice()
    sizes = (
        f"server.tensor_parallel_size = {server.tensor_parallel_size} times server.data_parallel_size = "
        f"{server.data_parallel_size}"
    ) + (f" on {server.nnodes} nodes" if server.nnodes > 1 else "")
    if gpu.has_gpu:
        if server.workers_per_node > gpu.num_gpus:
            raise ConfigError(
                f"{sizes} requires {server.workers_per_node} GPUs, one for each worker, but {gpu.num_gpus} are "
                f"available ({gpu.reason}). Lower one of the two keys, or make more GPUs visible with "
                f"CUDA_VISIBLE_DEVICES"
            )
        return
    total, needed = total_memory_bytes(), needed_bytes(run, model_path)
    if needed > total:
        raise ConfigError(
            f"server.kv_cache_memory_mib = {server.kv_cache_memory_mib} for each worker ({sizes}) and the weights need "
            f"{needed / GIB:.1f} GiB, but this machine has {total / GIB:.1f} GiB. Lower one of the three keys, "
            f"{WITHOUT_COPY if server.overlap_weight_loading else ''}or choose a smaller model"
        )


def needed_bytes(run: ServerRun, model_path: Path) -> int:
    """Return the memory that the server needs on a CPU, in bytes.

    Each replica needs its weights, of which each node has its share, and once more the weights that it receives
    during generation, which are not quantized. Each worker needs its KV cache and WORKER_BYTES.
    """
    server, weights = run.server, loaded_bytes(run, model_path)
    if server.overlap_weight_loading:
        weights += weight_bytes(model_path, run.dtype if server.quantization else run.computes_in)
    of_kv = (server.kv_cache_memory_mib or 0) * MIB
    return server.data_parallel_size * weights // server.nnodes + server.workers_per_node * (of_kv + WORKER_BYTES)


def loaded_bytes(run: ServerRun, model_path: Path) -> int:
    """Return the bytes of the weights of one replica."""
    return weight_bytes(model_path, run.computes_in, quantized=run.server.quantization is not None)
