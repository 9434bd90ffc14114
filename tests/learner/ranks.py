"""Ranks of a learner, as torchrun starts them, forked from a process that has imported everything.

run_ranks       a whole `learner train` on each
on_two_ranks    a function on each of two ranks that are shared by all tests of the session
on_four_ranks   the same on two nodes of two ranks
"""

import atexit
import faulthandler
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgspec
import torch
from accelerate.state import AcceleratorState

from learner.training.distributed import make_accelerator
from protocol.config import to_toml
from tests.learner.forked_learner import end_of, start_learner
from tests.learner.model_engine import tiny_server
from tests.learner.runs import make_run, metrics_of, seeded
from tests.peer import PROCESSES
from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent
ACCELERATE = ["accelerate.commands.accelerate_cli", "launch", "--num_processes", "2", "--num_machines", "1",
              "--main_process_port", "0", "--mixed_precision", "no", "--dynamo_backend", "no", "--multi_gpu",
              "--no_python", sys.executable]  # fmt: skip
"""Like `accelerate launch --no_python slipstream`, which need not be installed here."""
TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
TIMEOUT_S = 200.0
"""Timeout of a function on ranks, below that of a test, so that the ranks show where they hang."""
Work = Callable[..., Any]


class Place(msgspec.Struct, frozen=True):
    """The place of a rank among others, as torchrun defines it."""

    rank: int
    num_ranks: int
    port: int
    num_on_node: int

    def enter(self) -> None:
        if self.num_ranks == 1:
            return
        os.environ |= {"RANK": str(self.rank), "LOCAL_RANK": str(self.rank % self.num_on_node)}
        os.environ |= {"WORLD_SIZE": str(self.num_ranks), "LOCAL_WORLD_SIZE": str(self.num_on_node)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "ACCELERATE_USE_CPU": "true"}


ALONE = Place(rank=0, num_ranks=1, port=0, num_on_node=1)


def places_of(num_ranks: int, *, num_nodes: int = 1) -> list[Place]:
    """Return the places of ranks of one group."""
    if num_ranks == 1:
        return [ALONE]
    port, num_on_node = free_port(), num_ranks // num_nodes
    return [Place(rank=rank, num_ranks=num_ranks, port=port, num_on_node=num_on_node) for rank in range(num_ranks)]


def run_ranks(
    tmp_path: Path, num_ranks: int, *, start: Callable[..., str] | None = None, **learner: Any
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train on `num_ranks` ranks. Return their metrics and the weights that reached the server."""
    with tiny_server() as server:
        reference = {"reference": {"kind": "every", "every_steps": 2}, "kl": {"coef": 0.1}}
        run = make_run(tmp_path, server.endpoint, **seeded() | reference | learner)
        tmp_path.mkdir()
        config = tmp_path / "run.toml"
        config.write_text(to_toml(run))
        logs = start(config) if start else fork(config, num_ranks=num_ranks)
        assert ("rank 1 of 2" in logs) == (num_ranks > 1)
        return metrics_of(run), server.engine.weights


def fork(config: Path, *, num_ranks: int) -> str:
    """Train to the end and return the log."""
    log = config.with_suffix(".log")
    places = places_of(num_ranks)
    ranks = [start_learner(("train", str(config)), log, log, place.enter) for place in places]
    assert [end_of(rank, log) for rank in ranks] == [0] * num_ranks, log.read_text()
    return log.read_text()


def launch(launcher: list[str], config: Path) -> str:
    """Train by a command. accelerate assumes GPUs, without which it would start a single process."""
    command = [sys.executable, "-m", *launcher, "-m", "deploy.cli", "train", str(config)]
    on_cpu = os.environ | {"ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, env=on_cpu)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stderr


def on_two_ranks(work: Work, *args: Any) -> list[Any]:
    """Call `work(accelerator, *args)` on both ranks. Return both results."""
    return _do_on(2, 1, work, args)


def on_four_ranks(work: Work, *args: Any) -> list[Any]:
    """The same on four ranks, two on each of two nodes."""
    return _do_on(4, 2, work, args)


def _do_on(num_ranks: int, num_nodes: int, work: Work, args: tuple[Any, ...]) -> list[Any]:
    ranks = _ranks(num_ranks, num_nodes)
    try:
        return ranks.do(work, args)
    except BaseException:
        _ranks.cache_clear()  # one may wait in a collective for the others
        ranks.end()
        raise


class Ranks:
    """Processes that all run the same sequence of functions."""

    def __init__(self, places: list[Place]) -> None:
        self._pipes, self._processes = [], []
        for place in places:
            ours, theirs = PROCESSES.Pipe()
            self._processes.append(PROCESSES.Process(target=_serve, args=(place, theirs), daemon=True))
            self._processes[-1].start()
            self._pipes.append(ours)
            theirs.close()

    def do(self, work: Work, args: tuple[Any, ...]) -> list[Any]:
        for pipe in self._pipes:
            pipe.send_bytes(pickle.dumps((work, args)))
        answers: dict[Any, Any] = {}
        problems: list[str] = []
        deadline = time.monotonic() + TIMEOUT_S
        while waiting := [pipe for pipe in self._pipes if pipe not in answers]:
            # After an error of one rank, others may wait for it in a collective.
            ready = wait(waiting, 5 if problems else max(0.0, deadline - time.monotonic()))
            if not ready:
                problems.append(f"{work} did not end on {len(waiting)} ranks; their stacks are in the captured stderr")
                self._show_stacks()
                break
            for pipe in ready:
                answers[pipe], problem = pickle.loads(pipe.recv_bytes())
                problems += [f"rank {self._pipes.index(pipe)}: {problem}"] if problem else []
        assert not problems, "\n".join(problems)
        return [answers[pipe] for pipe in self._pipes]

    def _show_stacks(self) -> None:
        for process in self._processes:
            os.kill(process.pid, signal.SIGUSR1)
            time.sleep(0.5)  # one after the other

    def end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


@cache
def _ranks(num_ranks: int, num_nodes: int) -> Ranks:
    ranks = Ranks(places_of(num_ranks, num_nodes=num_nodes))
    atexit.register(ranks.end)
    return ranks


def _serve(place: Place, pipe: Any) -> None:
    place.enter()
    faulthandler.register(signal.SIGUSR1)
    while True:
        try:
            work, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        before = _attributes()
        random.seed(0), torch.manual_seed(0)
        try:
            answer = _do(place, work, args), None
        except BaseException:
            answer = None, traceback.format_exc()
        _put_back(before)
        pipe.send_bytes(pickle.dumps(answer))


def _do(place: Place, work: Work, args: tuple[Any, ...]) -> Any:
    AcceleratorState._reset_state()  # not the process group
    accelerator = make_accelerator()
    assert accelerator.num_processes == place.num_ranks
    try:
        return work(accelerator, *args)
    finally:
        accelerator.free_memory()


def _attributes() -> list[tuple[Any, dict[str, Any]]]:
    """Return the attributes of the product's modules and classes, to restore them after a function."""
    modules = [module for name, module in sys.modules.items() if name.partition(".")[0] in ("learner", "protocol")]
    classes = [
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    return [(owner, dict(vars(owner))) for owner in (*modules, *classes)]


def _put_back(before: list[tuple[Any, dict[str, Any]]]) -> None:
    for owner, attributes in before:
        for name, value in list(vars(owner).items()):
            if name not in attributes and isinstance(owner, type) and not name.startswith("__"):
                delattr(owner, name)
            elif name in attributes and value is not attributes[name]:
                setattr(owner, name, attributes[name])
