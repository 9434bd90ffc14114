"""A node of a server other than its first: runs vLLM's workers on its GPUs until node 0 ends the server.

    node 0 ◀── link (node_link.py) ──▶ this process ─ starts ─▶ vLLM's executor ─▶ workers

The learner never talks to this process. Node 0's engine calls the workers through vLLM, and each worker joins the
collective of a weight sync itself.
Invariant: when this node connects to node 0, no worker of an earlier engine is left.
"""

import logging
import multiprocessing
import os
import signal
import time
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil

from inference_server.config import ServerRun
from inference_server.engine.interface import EngineDead
from inference_server.engine.node_link import TICK_S, NodeLink, join_node_0
from inference_server.engine.processes import END_TIMEOUT_S, SERVER_PID, end_with_server
from protocol.hardware import bound_to_cores
from protocol.messages import ModelFingerprint
from protocol.signals import forces_exit, shutdown_signals, signals_blocked

log = logging.getLogger(__name__)
SLACK_S = 10.0
"""Extra seconds after server.drain_timeout_s for node 0 to end the server."""


def run_node(run: ServerRun, model_path: Path, model: ModelFingerprint) -> None:
    """Run this node's share of each engine until the server ends.

    Raises:
        ConfigError: Node 0 refuses this node, or does not answer.
        EngineDead: A worker outlives its engine.
    """
    while (link := join_node_0(run, model)) is not None:
        os.environ.setdefault("VLLM_HOST_IP", link.own_address)  # vLLM would take that of the default route
        log.info("starting %d worker(s) of node %d", run.server.workers_per_node, run.server.node_rank)
        context = multiprocessing.get_context("spawn")
        part = context.Process(target=_run_part, args=(run, model_path, link.start.master_port), name="node part")
        with signals_blocked():
            part.start()
        try:
            with Stop(run.server.drain_timeout_s) as stop:
                if _watch(link, part, stop):
                    return
        finally:
            link.close()


class Stop:
    """A signal to stop while an engine runs.

    Node 0 gets the same signal, drains, and ends this process. A second signal does not wait for that.
    """

    def __init__(self, drain_timeout_s: float) -> None:
        self._drain_timeout_s = drain_timeout_s
        self._first_at: float | None = None
        self._at: float | None = None

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._on_signal) for number in shutdown_signals()}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @property
    def is_due(self) -> bool:
        return self._at is not None and time.monotonic() > self._at

    def _on_signal(self, number: int, _: object) -> None:
        if self._first_at is None:
            self._first_at = time.monotonic()
            self._at = self._first_at + self._drain_timeout_s + SLACK_S
            log.info("waiting for node 0 to drain and end the server (server.drain_timeout_s)")
        elif forces_exit(number, self._first_at):
            self._at = 0.0


def _watch(link: NodeLink, part: BaseProcess, stop: Stop) -> bool:
    """Wait for the end of the engine, kill its workers here, and return whether this process ends too."""
    root = psutil.Process(part.pid)
    workers: set[psutil.Process] = set()
    try:
        while True:
            ended = wait([link.fileno(), part.sentinel], timeout=TICK_S)
            is_over = link.fileno() in ended
            if is_over and link.server_has_ended:
                log.info("the server has ended")
                return True
            if stop.is_due:
                log.warning("stopped before node 0 ended the server")
                return True
            if ended:
                reason = "node 0 has ended the engine" if is_over else "a worker of this node has exited"
                log.warning("%s; waiting for node 0 to start the next engine", reason)
                return False
            workers |= _tree_of(root)
    finally:
        _kill(workers | _tree_of(root))
        part.join()


def _tree_of(root: psutil.Process) -> set[psutil.Process]:
    try:
        return {root, *root.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def _kill(processes: set[psutil.Process]) -> None:
    """Kill the processes and wait until their memory is free. Raises EngineDead if one lives on."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    if psutil.wait_procs(processes, END_TIMEOUT_S)[1]:
        raise EngineDead(f"a worker of the ended engine is still running {END_TIMEOUT_S:g} s after SIGKILL")


def _run_part(run: ServerRun, model_path: Path, master_port: int) -> None:
    """Run vLLM's executor with this node's workers, in a process of its own."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from inference_server.engine.vllm_args import engine_arguments

    end_with_server()
    os.environ[SERVER_PID] = str(os.getpid())  # the workers end with this process
    config = engine_arguments(run, model_path, master_port).create_engine_config(headless=True)
    with bound_to_cores(run.server.cpu_cores):
        executor = MultiprocExecutor(config, monitor_workers=False)
        executor.start_worker_monitor(inline=True)
