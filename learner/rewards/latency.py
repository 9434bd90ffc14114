"""Latencies of reward functions: recorded by worker threads, read once per step."""

import statistics
import threading
from collections import defaultdict


class Latencies:
    """Call durations of each function since the last `pop_metrics`. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: dict[str, list[float]] = defaultdict(list)

    def record(self, function: str, seconds: float) -> None:
        with self._lock:
            self._seconds[function].append(seconds)

    def pop_metrics(self) -> dict[str, float]:
        """Return the mean and the longest call of each function as metrics, and reset."""
        with self._lock:
            seconds, self._seconds = self._seconds, defaultdict(list)
        means = {f"reward_seconds/{name}": statistics.fmean(calls) for name, calls in seconds.items()}
        return means | {f"reward_seconds_max/{name}": max(calls) for name, calls in seconds.items()}
