"""`slipstream doctor --server`: checks whether a server can start here, with a one-line remedy for each problem.

The doctor binds ports briefly and loads no model. `slipstream doctor` checks what needs both sides while the
server runs: connectivity, matching keys and versions, and clocks.
"""

import asyncio
import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from inference_server import preparation
from inference_server.config import ServerRun
from inference_server.engine.installed_vllm import SUPPORTED, check_vllm, installed_version
from inference_server.engine.memory import gpu_memory_bytes
from inference_server.engine.vllm_names import all_names
from inference_server.http_access import listen, read_api_key
from inference_server.preparation import MIB, WITHOUT_COPY, loaded_bytes, needed_bytes
from protocol import console
from protocol.builtin_models import cache_dir
from protocol.channel.keys import learner_keys, server_keys
from protocol.channel.sockets import ServerChannel
from protocol.config import load_config
from protocol.doctor import (
    Finding,
    disk_finding,
    dtype_finding,
    free_memory_bytes,
    memory_finding,
    ok,
    package_version,
    print_findings,
    problem,
    problem_of,
    unknown,
)
from protocol.endpoint import is_loopback, join_address, split_endpoint
from protocol.errors import ConfigError, PushError
from protocol.hardware import gpu_choice
from protocol.messages import PROTOCOL_VERSION
from protocol.model_files import fingerprint, local_model, weight_bytes
from protocol.transports.registry import TRANSPORTS


def doctor_command(arguments: Sequence[str]) -> int:
    """Run all checks and return the exit status: 1 if there is a problem, otherwise 0."""
    as_json = "--json" in arguments
    arguments = [argument for argument in arguments if argument != "--json"]
    run = load_config(
        ServerRun, arguments, "slipstream doctor --server", {"--json": "print JSON"} | console.SWITCHES,
        "Check whether the server can start here, and print a remedy for each problem.",
    )  # fmt: skip
    return print_findings(examine(run), as_json=as_json)


def examine(run: ServerRun) -> Iterator[Finding]:
    if run.server.node_rank == 0:  # the other nodes of a server only run workers
        yield from check_addresses(run)
    yield ok("versions", f"slipstream-rl {package_version()}, protocol {PROTOCOL_VERSION}")
    yield unknown("clock", "`slipstream doctor` compares it, like keys and bandwidth, while this server runs")
    yield dtype_finding(run.computes_in)
    yield from check_resources(run)
    yield from check_transports(run)
    known = check_vllm_names()
    yield known
    if known.verdict == "ok" and run.server.vllm:
        yield check_vllm_arguments(run)
    if run.server.openai_keys:
        yield check_openai_keys(run)


def check_addresses(run: ServerRun) -> Iterator[Finding]:
    found = check_names(run.endpoint)
    yield found
    if found.verdict == "ok":
        yield check_port(run.endpoint)
    yield check_http(run)
    yield check_keys(run.keys)


def check_names(endpoint: str) -> Finding:
    """Check that the endpoint's host is an address of this machine."""
    host, _ = split_endpoint(endpoint)
    if host == "*":
        return ok("names", "every IPv4 address of this machine")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return problem(
            "names", f"{host} does not resolve ({error.strerror or error})",
            "correct `endpoint`, or add the name to DNS or /etc/hosts; tcp://*:PORT listens on every address",
        )  # fmt: skip
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        try:
            trial.bind((address[0], 0, *address[2:]))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
            return problem(
                "names", f"{host} ({address[0]}) is not an address of this machine",
                "set `endpoint` to one of its addresses, or to tcp://*:PORT for all of them",
            )  # fmt: skip
    return ok("names", f"{host} is this machine's {address[0]}")


def check_port(endpoint: str) -> Finding:
    async def bind() -> str:
        with closing(ServerChannel(endpoint, insecure=True)) as channel:  # the channel is never read
            return channel.endpoint

    try:
        return ok("port", f"{asyncio.run(bind())} is free")
    except ConfigError as error:
        return problem_of("port", error, "choose another port with `endpoint`")


def check_http(run: ServerRun) -> Finding:
    try:
        key = read_api_key(run.server, insecure=run.insecure)
        listener = listen(run.server)
    except ConfigError as error:
        return problem_of("http", error, "choose another port with server.http_port")
    if listener is None:
        return ok("http", "off (server.http_port = 0)")
    with listener:
        host, number = listener.getsockname()[:2]
    return ok("http", f"{join_address(host, number)} is free, {'with' if key else 'without'} an API key")


def check_keys(directory: str | None) -> Finding:
    """Check the keys: readable, at least one learner allowed, server.pub matching."""
    if directory is None:
        return ok("keys", "none: every peer that reaches the endpoint is accepted")
    try:
        own = server_keys(directory)
    except ConfigError as error:
        return problem_of("keys", error, "create keys with `slipstream keys keys`")
    if (Path(directory) / "learner.key").exists():
        try:
            learner = learner_keys(directory)
        except ConfigError as error:
            return problem_of("keys", error, "create keys with `slipstream keys keys`")
        if learner.server != own.public:
            return problem(
                "keys", f"{directory}/server.pub does not belong to {directory}/server.key",
                "copy it again from where the key was created: a learner with this file is rejected",
            )  # fmt: skip
        if learner.public not in own.allowed():
            return problem(
                "keys", f"{directory}/allowed does not list {directory}/learner.key",
                f"copy that learner's public key, its allowed/learner.pub, into {directory}/allowed",
            )  # fmt: skip
    return ok("keys", f"{len(own.allowed())} learner(s) are allowed")


def check_resources(run: ServerRun) -> Iterator[Finding]:
    """Yield the findings about the model, the disk and the memory.

    The KV cache gets what the weights leave of the configured share of memory.
    """
    try:
        path = local_model(run.model)
        if path is not None:
            yield ok("model", f"{fingerprint(path).architecture} in {path}")
    except ConfigError as error:
        yield problem_of("model", error, "set `model` to a model that is available here")
        return
    if path is None:
        yield unknown("model", f"{run.model} is not on this machine yet; the server will download it")
        yield disk_finding(cache_dir(), "the download", None)
        return
    config = run.server
    if config.quantized_parts:
        yield check_quantization(run, path)
    try:
        preparation.check_block_size(run, path)
        preparation.check_room(run, path)
    except ConfigError as error:
        yield problem_of("resources", error, "lower the keys that it names")
        return
    gpu = gpu_memory_bytes()
    if gpu is None:
        fewer = "lower server.data_parallel_size, " if config.data_parallel_size > 1 else ""
        without = WITHOUT_COPY if config.overlap_weight_loading else ""
        remedy = f"{fewer}lower server.kv_cache_memory_mib, {without}or choose a smaller model"
        yield memory_finding("the server", needed_bytes(run, path), free_memory_bytes(), remedy)
        return
    weights = loaded_bytes(run, path) // config.tensor_parallel_size
    if config.overlap_weight_loading:
        remedy = f"{WITHOUT_COPY}or free host memory"
        received = weight_bytes(path, run.dtype)
        yield memory_finding("a copy of the weights in host memory", received, free_memory_bytes(), remedy)
    free, total = gpu
    if config.kv_cache_memory_mib is not None:
        remedy = (
            "lower server.kv_cache_memory_mib, raise server.tensor_parallel_size, or stop other processes on the GPU"
        )
        needed = weights + config.kv_cache_memory_mib * MIB
        yield memory_finding("a worker's weights and KV cache", needed, free, remedy)
        return
    share = int(total * config.gpu_memory_utilization)
    remedy = "lower server.gpu_memory_utilization, or stop the other processes on the GPU"
    yield memory_finding(f"{config.gpu_memory_utilization:.0%} of the GPU for the server", share, free, remedy)
    remedy = "raise server.tensor_parallel_size or server.gpu_memory_utilization"
    yield memory_finding("a worker's weights", weights, share, remedy)


def check_quantization(run: ServerRun, model_path: Path) -> Finding:
    try:
        preparation.check_quantization(run, model_path)
    except ConfigError as error:
        return problem_of("quantization", error, "change server.quantization")
    return ok("quantization", f"{run.server.quantized_parts}; each weight sync is quantized")


def check_transports(run: ServerRun) -> Iterator[Finding]:
    """Check the transports that need an installation, if weight syncs would use them."""
    wanted = run.learner.get("weight_sync", {}).get("transport", "auto")
    if gpu_memory_bytes() is None:
        return
    from protocol.transports.collective import load_transport

    shares_gpu = gpu_choice().num_gpus == 1 and is_loopback(split_endpoint(run.endpoint)[0])
    for name in TRANSPORTS:
        if wanted not in ("auto", name):
            continue
        transport = load_transport(name)
        if not transport.finding:
            continue
        if (reason := transport.why_not_here()) is None:
            yield ok(name, transport.finding)
        elif wanted == "auto" and shares_gpu:
            yield ok(name, "not installed and not needed: the learner on this machine uses the same GPU (ipc)")
        else:
            yield problem_of(name, PushError(reason), 'set learner.weight_sync.transport = "tcp"')


def check_vllm_names() -> Finding:
    """Check that the server supports the installed vLLM, down to function parameters."""
    try:
        check_vllm()
    except ConfigError as error:
        return problem_of("vllm_names", error, f"install vllm{SUPPORTED}")
    return ok("vllm_names", f"{installed_version()} has all {len([*all_names()])} names that the server uses")


def check_vllm_arguments(run: ServerRun) -> Finding:
    """Check that vLLM has these arguments and types, and that the server allows them."""
    # Imports vLLM, which takes seconds.
    from inference_server.engine.vllm_args import added_arguments, own_arguments

    try:
        added_arguments(run.server.vllm, own_arguments(run, Path(run.model)))
    except ConfigError as error:
        return problem_of("vllm", error, "correct the argument in [server.vllm]")
    return ok("vllm", f"accepts {', '.join(run.server.vllm)}")


def check_openai_keys(run: ServerRun) -> Finding:
    """Check that vLLM knows the parsers and can read the chat template."""
    # Imports vLLM, which takes seconds.
    from inference_server.engine.openai_options import check_openai_options

    try:
        check_openai_options(run.server, local_model(run.model))
    except ConfigError as error:
        return problem_of("openai", error, "correct the key in [server]")
    return ok("openai", f"accepts {', '.join(run.server.openai_keys)}")
