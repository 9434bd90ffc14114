"""`slipstream serve run.toml` and `slipstream doctor --server run.toml`, also by the name `inference-server`.

The first reads the config, takes the ports, starts vLLM on its cores, and serves until a signal arrives and
the drain ends. The second checks whether the first could start.

Invariant: vLLM and torch are imported only after the environment variables that they read on import are set.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from inference_server.config import ServerRun
from inference_server.engine.socket_directory import socket_directory
from inference_server.shutdown import until_ended
from protocol import console
from protocol.config import load_config, to_toml
from protocol.hardware import gpu_choice, share_of_cores
from protocol.installation import version_line
from protocol.signals import shutdown_signals

log = logging.getLogger("inference_server")

DRY_RUN = "--dry-run"
ENVIRONMENT = {
    # Keep the threads of the CPU backend on the cores that sched_setaffinity chose.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Let torch request huge pages: allocating memory for buckets then takes a third of the time.
    "THP_MEM_ALLOC_ENABLE": "1",
    # Each batch size has its own matrix products. oneDNN would keep the code of 1,024 of them, which takes
    # 250 MiB within the first hour.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64",
    # On a CPU, the warnings of vLLM and torch concern hardware that does not exist there.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_LOGS": "-torch",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONWARNINGS": "ignore::FutureWarning,ignore::UserWarning:multiprocessing.resource_tracker",
}
"""Variables that vLLM and torch read on import. Values set by the user take precedence."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve, or run the server's doctor; a user error ends it without a traceback."""
    for number in shutdown_signals():
        signal.signal(number, _quit_while_starting)
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    with console.exit_on_user_error(lambda: "server-gpu" if gpu_choice().has_gpu else "server-cpu"):
        words = console.pop_switches(sys.argv[1:] if arguments is None else arguments)
        _start_logging()
        match words:
            case ["doctor", *words]:
                from inference_server.doctor import doctor_command

                sys.exit(doctor_command(words))
            case ["--version"]:
                print(version_line("inference-server"))
            case _:
                _serve_command(words)


def _serve_command(words: list[str]) -> None:
    arguments = [word for word in words if word != DRY_RUN]
    run = load_config(
        ServerRun,
        arguments,
        "slipstream serve",
        {DRY_RUN: "print the config with all keys, and start nothing"} | console.SWITCHES,
    )
    if DRY_RUN in words:
        print(to_toml(run))
        return
    _set_environment(run)
    if run.server.node_rank > 0:
        _serve_node(run)
    else:
        asyncio.run(_serve(run))


def _quit_while_starting(*_: object) -> NoReturn:
    """Kill the child processes and exit.

    There is nothing to save yet. An exception could surface anywhere in the starting engine, which may
    swallow it.
    """
    for child in multiprocessing.active_children():
        child.kill()
    log.info("stopped during startup")
    os._exit(0)


def _start_logging() -> None:
    console.start_logging("%(asctime)s %(message)s", level=logging.WARNING)
    if console.output_mode().is_json:
        os.environ["VLLM_CONFIGURE_LOGGING"] = "0"  # Its log records go through our handler, as JSON.
    # Libraries set the level of the root logger on import, so set it on our own loggers.
    for package in ("inference_server", "protocol"):
        logging.getLogger(package).setLevel(logging.INFO)


def _on_own_cores(run: ServerRun) -> ServerRun:
    """Return the config with the server's share of the cores, if it names none."""
    if run.server.cpu_cores is not None:
        return run
    cores = share_of_cores("server", run.learner, (run.endpoint,), num_processes=run.server.workers_per_node)
    return msgspec.structs.replace(run, server=msgspec.structs.replace(run.server, cpu_cores=cores))


def _device_summary(run: ServerRun) -> str:
    """Describe the device found, the reason, and the resulting values of unset keys."""
    server = run.server
    kv_cache = "the remaining memory" if server.kv_cache_memory_mib is None else f"{server.kv_cache_memory_mib} MiB"
    return (
        f"{gpu_choice().reason}. dtype = {run.computes_in}, "
        f"server.enforce_eager = {str(server.enforce_eager).lower()}, KV cache: {kv_cache}"
    )


def _set_environment(run: ServerRun) -> None:
    """Set the environment that vLLM and torch read, in this process and its children."""
    os.environ.update(
        SLIPSTREAM_SERVER_PID=str(os.getpid()),
        SLIPSTREAM_NODE_WORKERS=str(run.server.workers_per_node),
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        VLLM_ENGINE_READY_TIMEOUT_S=str(run.server.start_timeout_s),
        VLLM_KEEP_ALIVE_ON_ENGINE_DEATH="1",
    )
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])


def _serve_node(run: ServerRun) -> None:
    """Run the workers of a node other than the first."""
    from inference_server.engine.worker_node import run_node
    from inference_server.preparation import prepare_model

    with socket_directory():
        model_path, model = prepare_model(run)
        log.info(_device_summary(run))
        os.environ["HF_HUB_OFFLINE"] = "1"  # The model files are on this machine by now.
        run_node(_on_own_cores(run), model_path, model)


async def _serve(run: ServerRun) -> None:
    """Start all parts, those that fail cheaply first, then serve and shut down."""
    from inference_server.http_access import address_of
    from inference_server.preparation import prepare
    from protocol.channel.sockets import ServerChannel

    started_at = time.monotonic()
    with contextlib.ExitStack() as open_things:
        open_things.enter_context(socket_directory())
        prepared = prepare(run, open_things)
        log.info(_device_summary(run))
        listener = prepared.listener
        os.environ["HF_HUB_OFFLINE"] = "1"  # The model files are on this machine by now.
        run = _on_own_cores(run)
        log.info("starting vLLM with %s", run.model)
        from inference_server.engine.vllm_engine import VllmEngine

        # VllmEngine blocks signals so that vLLM's processes inherit the mask. A thread keeps them unblocked
        # in the main thread.
        engine = await asyncio.to_thread(VllmEngine, run, prepared.model_path)
        open_things.callback(engine.close)
        channel = ServerChannel(run.endpoint, prepared.keys, insecure=run.insecure)
        open_things.callback(channel.close)
        from inference_server.http import build_http
        from inference_server.server import Server
        from protocol.model_digest import digest_model

        server = Server(channel, engine, prepared.model, run.server, digest_model(prepared.model_path))
        where = f"http://{address_of(run.server)}" if listener else "off"

        def log_ready() -> None:
            log.info(
                "ready after %.1f s: model %s, %d worker(s), learners at %s, HTTP at %s",
                time.monotonic() - started_at, run.model, engine.limits.num_workers, channel.endpoint, where,
            )  # fmt: skip

        parts = [server.serve(log_ready)]
        if listener is not None:
            http = await build_http(engine.llm, run, prepared.model_path, server.status, prepared.api_key)
            engine.on_restart = http.answer_from
            server.drain.num_requests = lambda: http.num_requests
            parts.append(http.serve_on(listener))
        await until_ended(parts, server.drain.run)


if __name__ == "__main__":
    main()
