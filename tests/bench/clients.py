"""Measure the latency of a client of /v1 and the learner's loss of throughput: `python -m tests.bench.clients --help`.

    BusyLink: 32 groups of 16 in flight ─▶ real vLLM, 32 slots ◀─ one client of /v1, request after request
                                           alternating windows without and with the client

The machine should be idle and have two cores: one for the server, the other for learner and client.
"""

import argparse
import json
import os
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import SlipstreamError
from tests.bench.machine import machine, versions
from tests.bench.push import as_text, say

NUM_PLACES = 32
NUM_GROUPS = 32
NUM_COMPLETIONS = 16
MAX_TOKENS = 64
"""Maximum length of the learner's completions."""
ANSWER_TOKENS = 32
"""Length of each answer to the client."""
ANSWER_TIMEOUT_S = 120.0
WARM_UP_S = 5.0


class Window(NamedTuple):
    """The measurements of one window of time."""

    tokens_per_s: float
    """Throughput of the learner's groups."""
    tokens_per_cpu_s: float
    """Throughput by CPU time of the engine, which is more robust on a busy machine."""
    answers_s: list[float]
    """The client's latency of each answer."""


class Client:
    """Sends one request after the other until stopped."""

    def __init__(self, url: str, model: str) -> None:
        question = {"model": model, "prompt": [3, 4, 5, 6], "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
        self._request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
        )
        self.answers_s: list[float] = []
        self._failure: Exception | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                began_at = time.perf_counter()
                with urllib.request.urlopen(self._request, timeout=ANSWER_TIMEOUT_S) as answer:
                    assert json.load(answer)["usage"]["completion_tokens"] == ANSWER_TOKENS
                self.answers_s.append(time.perf_counter() - began_at)
        except (OSError, AssertionError) as failure:
            self._failure = failure

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Send requests inside the block. Raises SlipstreamError if an answer does not arrive."""
        self._thread.start()
        try:
            yield
        finally:
            self._stop.set()
            self._thread.join(ANSWER_TIMEOUT_S)
        if self._failure is not None or self._thread.is_alive():
            raise SlipstreamError(f"/v1 did not answer within {ANSWER_TIMEOUT_S:g} s: {self._failure}")


def main() -> None:
    """Run everything, then print the table or, with --json, one JSON object."""
    options = parse_options(sys.argv[1:])
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        result = {"machine": machine(), "versions": versions(Path(sys.executable))} | run(options)
    except SlipstreamError as error:
        sys.exit(f"error: {error}")
    (options.out / "clients.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result) if options.json else as_text(result))


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.clients", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench-clients"), help="directory of the result, models and logs"
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each window")
    parser.add_argument("--repetitions", type=int, default=3, help="pairs of a window without and one with the client")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return all results in one object."""
    from protocol.messages import Sampling
    from tests.bench.push_server import BusyLink, ServedModel
    from tests.bench.server_generation import CASES, SERVER_CORES, cores_of_the_client, push_own_weights, save
    from tests.ports import free_port

    model, port = save(CASES[0].config, options.out.resolve() / "model"), free_port()
    with ExitStack() as open_things:
        server = ServedModel(
            model, options.out / "server", cpu_cores=SERVER_CORES, max_concurrent_sequences=NUM_PLACES, http_port=port
        )
        open_things.callback(server.close)
        open_things.enter_context(cores_of_the_client())
        link = BusyLink(server, NUM_GROUPS, Sampling(num_completions=NUM_COMPLETIONS, max_tokens=MAX_TOKENS))
        open_things.callback(link.close)
        push_own_weights(link.fleet, model)
        link.keep_busy()
        time.sleep(WARM_UP_S)
        alone, with_client_windows = list[Window](), list[Window]()
        for repetition in range(options.repetitions):
            for with_client in (False, True) if repetition % 2 == 0 else (True, False):
                say(f"repetition {repetition + 1}, {'with' if with_client else 'without'} the client")
                client = Client(f"http://127.0.0.1:{port}", model) if with_client else None
                (with_client_windows if with_client else alone).append(window(link, server, client, options.seconds))
    return compare(alone, with_client_windows) | {"seconds": options.seconds, "num_places": NUM_PLACES,
        "num_groups": NUM_GROUPS,
                                     "num_completions": NUM_COMPLETIONS}  # fmt: skip


def window(link: Any, server: Any, client: Client | None, seconds: float) -> Window:
    """Measure for `seconds`."""
    with client.asking() if client is not None else ExitStack():
        num_before, cpu_before, began_at = link.num_tokens, engine_cpu_s(server), time.perf_counter()
        time.sleep(seconds)
        num_tokens, elapsed_s = link.num_tokens - num_before, time.perf_counter() - began_at
        cpu_s = engine_cpu_s(server) - cpu_before
    return Window(num_tokens / elapsed_s, num_tokens / cpu_s, client.answers_s if client is not None else [])


def engine_cpu_s(server: Any) -> float:
    _, *engine = server.processes
    return sum(sum(process.cpu_times()[:2]) for process in engine)


def compare(alone: list[Window], with_client: list[Window]) -> dict[str, Any]:
    """Compare windows. The learner's share is the median over repetitions, each with one window of each kind."""
    answers_s = [second for one in with_client for second in one.answers_s]
    pairs = [*zip(with_client, alone, strict=True)]
    shares = [one.tokens_per_s / other.tokens_per_s for one, other in pairs]
    cpu_shares = [one.tokens_per_cpu_s / other.tokens_per_cpu_s for one, other in pairs]
    return {
        "slowest_answer_s": max(answers_s),
        "median_answer_s": statistics.median(answers_s),
        "num_answers": len(answers_s),
        "learners_share": statistics.median(shares),
        "learners_share_by_cpu": statistics.median(cpu_shares),
        "learners_share_by_repetition": shares,
        "learners_share_by_cpu_by_repetition": cpu_shares,
        "learners_tokens_per_s": {
            "alone": [one.tokens_per_s for one in alone],
            "with_client": [one.tokens_per_s for one in with_client],
        },
    }


if __name__ == "__main__":
    main()
