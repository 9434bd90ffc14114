"""Measure the ledger's cost per step: `python -m tests.bench.ledger --help`.

    loop thread    admit: the groups of a step, one commit
    receiver       keep: arriving groups, one commit for all that arrived meanwhile
    scorer         score: the same
    main thread    consume: the groups of a step, once all are scored
    checkpoint     forget_payloads, after every fourth step

These are the threads of a run, on a real disk, without generation and training. Groups arrive evenly over --step-s
seconds, the minimum duration of a step; 0: as fast as possible. Seconds are spent in the ledger's methods, including
waits for its locks. The learner's step is delayed by `main_s`.
"""

import argparse
import json
import queue
import sqlite3
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from learner.rollouts.ledger import Ledger
from learner.rollouts.rollout_group import keep
from protocol.codec import pack
from protocol.messages import Completion, Group
from tests.bench.machine import machine

MIB = 1 << 20
BYTES_PER_TOKEN = 8
"""An int32 and a float32."""
NUM_COMPLETIONS = 8
LOOKAHEAD_STEPS = 1
CHECKPOINT_EVERY_STEPS = 4
WARM_UP_STEPS = 4
"""The files only grow until the first checkpoint."""
PATIENCE_S = 300.0

Arrivals = queue.Queue[Any]


class Seconds:
    """The time that each thread spends in the ledger, per step."""

    def __init__(self) -> None:
        self.by_name: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.by_name[name].append(time.perf_counter() - started)


class Run:
    """The ledger of a run, used by the threads of a run."""

    def __init__(self, path: Path, num_groups: int, num_bytes: int, num_steps: int, step_s: float) -> None:
        self.ledger, self.seconds = Ledger(path), Seconds()
        self._num_groups, self._num_steps, self._step_s = num_groups, num_steps, step_s
        self._template = a_group(num_bytes)
        self._may_admit = threading.Semaphore(1 + LOOKAHEAD_STEPS)
        self._admitted, self._received, self._scored = Arrivals(), Arrivals(), Arrivals()

    def play(self) -> None:
        """Run all threads. Raises the error of any thread."""
        with ThreadPoolExecutor(4) as threads:
            jobs = [threads.submit(work) for work in (self._admit, self._receive, self._score)]
            jobs += self._consume(threads)
            for work in jobs:
                work.result(PATIENCE_S)
        self.ledger.close()

    def _admit(self) -> None:
        for step in range(self._num_steps):
            assert self._may_admit.acquire(timeout=PATIENCE_S)
            slots = range(step * self._num_groups, (step + 1) * self._num_groups)
            with self.seconds("loop"), self.ledger.batch():
                for slot in slots:
                    self.ledger.admit(slot=slot, attempt=0, position=slot, epoch=0, prompt_id=slot, version=step)
            for slot in slots:
                time.sleep(self._step_s / self._num_groups)
                self._admitted.put(slot)

    def _receive(self) -> None:
        for slots in batches(self._admitted, self._num_steps * self._num_groups):
            groups = [Group(group_id=f"{slot}.0", **self._template) for slot in slots]
            with self.seconds("packing"):
                for group in groups:
                    pack(group)
            with self.seconds("receiver"):  # packs the payloads again
                keep(self.ledger, groups)
            for slot in slots:
                self._received.put(slot)

    def _score(self) -> None:
        for slots in batches(self._received, self._num_steps * self._num_groups):
            rewards = json.dumps([0.5] * NUM_COMPLETIONS)
            with self.seconds("scorer"), self.ledger.batch():
                for slot in slots:
                    self.ledger.score(f"{slot}.0", rewards, 0.5)
            for slot in slots:
                self._scored.put(slot)

    def _consume(self, threads: ThreadPoolExecutor) -> list[Future[None]]:
        forgetting = []
        for step in range(1, self._num_steps + 1):
            trained_at = time.perf_counter() + self._step_s
            slots = [self._scored.get(timeout=PATIENCE_S) for _ in range(self._num_groups)]
            time.sleep(max(0.0, trained_at - time.perf_counter()))
            with self.seconds("main"):
                self.ledger.consume([(f"{slot}.0", 1) for slot in slots], step)
            self._may_admit.release()
            if step % CHECKPOINT_EVERY_STEPS == 0:
                forgetting.append(threads.submit(self._forget, step))
        return forgetting

    def _forget(self, step: int) -> None:
        with self.seconds("checkpoint"):
            self.ledger.forget_payloads(step)


def a_group(num_bytes: int) -> dict[str, Any]:
    """Return all fields except the id of a group of about `num_bytes`."""
    num_tokens = num_bytes // BYTES_PER_TOKEN // NUM_COMPLETIONS
    generator = np.random.default_rng(0)
    completion = Completion(
        token_ids=generator.integers(0, 1 << 17, num_tokens, np.int32),
        behavior_logprobs=generator.random(num_tokens, np.float32), versions=[(0, num_tokens)], finish_reason="stop",
    )  # fmt: skip
    return {"entered_version": 0, "completions": [completion] * NUM_COMPLETIONS}


def batches(arrivals: Arrivals, total: int) -> Iterator[list[int]]:
    """Yield the groups that arrived during the previous batch, as learner/rollouts/ledger_storage.py does."""
    while total:
        batch = [arrivals.get(timeout=PATIENCE_S)]
        while not arrivals.empty():
            batch.append(arrivals.get())
        total -= len(batch)
        yield batch


def measure(directory: Path, num_groups: int, num_bytes: int, num_steps: int, step_s: float) -> dict[str, Any]:
    """Run the threads and check the ledger."""
    path = directory / "ledger.db"
    run = Run(path, num_groups, num_bytes // num_groups, WARM_UP_STEPS + num_steps, step_s)
    started = time.perf_counter()
    run.play()
    wall_s = time.perf_counter() - started
    check(path, num_groups * (WARM_UP_STEPS + num_steps))
    by_name, num_all = run.seconds.by_name, WARM_UP_STEPS + num_steps
    total_s = {name: sum(seconds) / num_all for name, seconds in by_name.items()}
    total_s["receiver"] -= total_s.pop("packing")
    main_s = by_name["main"][WARM_UP_STEPS:]
    return {
        "num_groups": num_groups,
        "mib_per_step": num_bytes / MIB,
        "num_steps": num_steps,
        "main_s": statistics.median(main_s),
        "main_worst_s": max(main_s),
        "ledger_s": sum(total_s.values()),
        **{f"{name}_s": seconds for name, seconds in total_s.items() if name != "main"},
        "wall_s": wall_s / num_all,
        "disk_mib": sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()) / MIB,
    }


def check(path: Path, num_groups: int) -> None:
    ledger = Ledger(path)
    counts = ledger.counts()
    ledger.close()
    assert (counts.consumed, counts.lost, counts.duplicated) == (num_groups, 0, 0), counts
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--step-s", type=float, default=4.0)
    parser.add_argument("--groups", type=int, nargs="+", default=[32, 256])
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    for num_groups in options.groups:
        with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as directory:
            found.append(measure(Path(directory), num_groups, options.mib * MIB, options.steps, options.step_s))
    if options.json:
        print(json.dumps({"machine": machine(), "results": found}))
        return
    for one in found:
        print(
            " ".join(
                f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in one.items()
            )
        )


if __name__ == "__main__":
    main()
