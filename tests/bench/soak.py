"""Check that the demo at full load does not grow: `python -m tests.bench.soak [--minutes 30] [--json] [--out DIR]`.

    deploy.colocate (endless steps) ─▶ its processes, sampled every second ─▶ DIR/soak.json, a table or JSON

A role is one process, or all processes of a kind: reward workers are replaced. Exit code 1 if a role is not flat.
"""

import argparse
import json
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import psutil

from learner.rollouts.ledger import Ledger
from tests.bench.flatness import Flatness, flatness
from tests.ports import free_port

ROOT = Path(__file__).parent.parent.parent
RECIPE = "deploy/recipes/reverse.toml"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 120.0
INTERVAL_S = 1.0


class Series(msgspec.Struct):
    """The samples of one role."""

    seconds: list[float] = msgspec.field(default_factory=list)
    rss_mib: list[float] = msgspec.field(default_factory=list)
    file_descriptors: list[int] = msgspec.field(default_factory=list)
    threads: list[int] = msgspec.field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="duration, from the first step")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-soak"), help="directory of the run and soak.json")
    options = parser.parse_args()
    result = soak(options.out, options.minutes * 60)
    (options.out / "soak.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result) if options.json else as_text(result))
    sys.exit(0 if result["is_flat"] else 1)


def soak(directory: Path, duration_s: float) -> dict[str, Any]:
    """Run the demo for `duration_s`. Return the verdict on every role and the results of the run."""
    run_dir = directory / time.strftime("run-%Y%m%d-%H%M%S")
    run_dir.mkdir(parents=True)
    command = [
        sys.executable, "-m", "deploy.cli", "colocate", RECIPE, "--run-dir", str(run_dir),
        "--endpoint", f"tcp://127.0.0.1:{free_port()}", "--server.http-port", str(free_port()),
        "--learner.report.dashboard-port", str(free_port()), "--learner.steps", "10000000",
    ]  # fmt: skip
    with (directory / "console.log").open("w") as console:
        demo = subprocess.Popen(command, cwd=ROOT, stdout=console, stderr=console)
    try:
        _wait_for_steps(run_dir / "metrics.jsonl", demo)
        seen = _watch(demo, duration_s)
        demo.send_signal(signal.SIGINT)
        code = demo.wait(STOP_TIMEOUT_S)
    finally:
        demo.kill()
        demo.wait()
    roles = {role: flatness(*msgspec.structs.astuple(series)) for role, series in seen.items()}
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {
        "is_flat": code == 0 and all(role.is_flat for role in roles.values()),
        "exit_code": code,
        "duration_s": duration_s,
        "steps": len(lines),
        "lost": Ledger(run_dir / "ledger.db", read_only=True).counts().lost,
        "roles": msgspec.to_builtins(roles),
        "rss_mib_by_minute": {role: by_minute(series) for role, series in seen.items()},
    }


def by_minute(series: Series) -> list[float]:
    """Return the median of each minute, which shows when a process grew."""
    minutes: defaultdict[int, list[float]] = defaultdict(list)
    for second, rss_mib in zip(series.seconds, series.rss_mib, strict=True):
        minutes[int(second // 60)].append(rss_mib)
    return [round(statistics.median(minutes[minute]), 1) for minute in sorted(minutes)]


def _watch(demo: subprocess.Popen[bytes], duration_s: float) -> dict[str, Series]:
    seen: defaultdict[str, Series] = defaultdict(Series)
    began = time.monotonic()
    while (now := time.monotonic() - began) < duration_s:
        assert demo.poll() is None, f"the demo ended after {now:.0f} s"
        for role, processes in _roles(psutil.Process(demo.pid)).items():
            _add(seen[role], now, processes)
        time.sleep(INTERVAL_S)
    return seen


def _roles(colocate: psutil.Process) -> dict[str, list[psutil.Process]]:
    """Return the processes of the run by role."""
    roles: dict[str, list[psutil.Process]] = {"colocate": [colocate]}
    for process in colocate.children():
        role = "server" if "inference_server" in process.cmdline() else "learner"
        roles[role] = [process]
        roles[{"server": "engine", "learner": "reward workers"}[role]] = process.children(recursive=True)
    return roles


def _add(series: Series, now: float, processes: list[psutil.Process]) -> None:
    """Add the sum over the processes, unless a process started or ended during the sample."""
    try:
        rss = sum(process.memory_info().rss for process in processes)
        file_descriptors = sum(process.num_fds() for process in processes)
        threads = sum(process.num_threads() for process in processes)
    except psutil.NoSuchProcess:
        return
    series.seconds.append(now)
    series.rss_mib.append(rss / 2**20)
    series.file_descriptors.append(file_descriptors)
    series.threads.append(threads)


def _wait_for_steps(metrics: Path, demo: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not (metrics.exists() and metrics.stat().st_size):
        assert demo.poll() is None and time.monotonic() < deadline, (
            f"no step after {START_TIMEOUT_S:.0f} s: console.log"
        )
        time.sleep(INTERVAL_S)


def as_text(result: dict[str, Any]) -> str:
    lines = [
        f"{result['steps']} steps in {result['duration_s']:.0f} s, {result['lost']} groups lost, exit code "
        f"{result['exit_code']}",
        f"{'':15} {'RSS MiB':>9} {'MiB/hour':>9} {'growth':>7} {'files':>9} {'threads':>9}",
    ]
    for role, values in result["roles"].items():
        one = msgspec.convert(values, Flatness)
        lines.append(
            f"{role:15} {one.rss_mib:9.1f} {one.slope_mib_per_hour:+9.2f} {one.growth_mib:+7.2f} "
            f"{'-'.join(map(str, one.file_descriptors)):>9} {'-'.join(map(str, one.threads)):>9} "
            f"{'flat' if one.is_flat else 'GROWS'}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
