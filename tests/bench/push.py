"""Measure the cost of a push of weights: `python -m tests.bench.push --help`.

    transport alone (push_transport.py, push_gpu.py) ─┐
    into real vLLM under load (push_engine.py)       ─┼─▶ DIR/push.json, one JSON object or a table
    to several servers (push_fleet.py)               ─┤
    changes only (push_delta.py)                     ─┘

The machine should be idle: two processes share its cores.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from protocol.errors import SlipstreamError


def main() -> None:
    """Run everything, then print the table or, with --json, one JSON object."""
    options = parse_options(sys.argv[1:])
    # Set before torch is imported, here and in the other processes. More threads than cores would measure the
    # scheduler.
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        options.out.mkdir(parents=True, exist_ok=True)
        result = run(options)
    except SlipstreamError as error:
        sys.exit(f"error: {error}")
    (options.out / "push.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result) if options.json else as_text(result))


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.push", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-push"), help="directory of push.json")
    parser.add_argument(
        "--sizes-mib", nargs="+", type=int, default=[64, 1024, 4096], help="sizes for the transport alone"
    )
    parser.add_argument("--rounds", type=int, default=7, help="repeats of the transport alone")
    parser.add_argument("--pushes", type=int, default=5, help="pushes into vLLM, and optimizer steps for the delta")
    parser.add_argument("--bucket-mib", type=int, default=256, help="bucket size for the transport alone and the delta")
    parser.add_argument("--servers", type=int, default=4, help="maximum number of servers to push to; 0: none")
    parser.add_argument("--servers-mib", type=int, default=256, help="size of a push to several servers")
    parser.add_argument("--skip-engine", action="store_true", help="skip real vLLM")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return all results in one object."""
    import torch

    from tests.bench import push_delta, push_gpu, push_transport

    torch.set_num_threads(1)
    bucket_bytes = options.bucket_mib << 20
    result: dict[str, Any] = {"num_cores": os.cpu_count(), "memory_gib_per_s": push_transport.measure_memory()}
    result["transport"] = []
    for size_mib in options.sizes_mib:
        say(f"transport of {size_mib} MiB")
        result["transport"].append(push_transport.measure(size_mib, options.rounds, bucket_bytes))
    result["gpu"] = push_gpu.measure(max(options.sizes_mib), options.rounds, bucket_bytes)
    say("changes only")
    result["delta"] = push_delta.measure(options.pushes, bucket_bytes)
    if options.servers:
        from tests.bench import push_fleet

        say(f"to up to {options.servers} servers")
        result["fleet"] = push_fleet.run(options.servers, options.servers_mib, options.pushes)
    result["engine"] = "skipped"
    if not options.skip_engine:
        from tests.bench import push_engine

        say("into vLLM")
        with tempfile.TemporaryDirectory(prefix="slipstream-bench-") as directory:
            result["engine"] = push_engine.run(Path(directory), options.pushes)
    return headlines(result) | result


def headlines(result: dict[str, Any]) -> dict[str, Any]:
    """Return the headline numbers. None: not measured."""
    of_1_gib = next((one for one in result["transport"] if one["size_mib"] == 1024), {})
    engine = result["engine"] if isinstance(result["engine"], dict) else {}
    small, tiny = engine.get("gpt2_small", {}), engine.get("tiny", {})
    return {
        "dense_over_raw": of_1_gib.get("dense_over_raw"),
        "cast_over_raw": of_1_gib.get("cast_over_raw"),
        "stall_over_push": small.get("server_overlap", {}).get("stall_over_push"),
        "learner_blocked_over_push": small.get("learner_overlap", {}).get("learner_blocked_over_push"),
        "server_memory_buckets": small.get("memory_no_overlap", {}).get("server_buckets"),
        "learner_memory_buckets": small.get("memory_no_overlap", {}).get("learner_buckets"),
        "tiny_stall_ms": tiny["no_overlap"]["stall_seconds"] * 1e3 if tiny else None,
        "delta_bytes_over_dense": result["delta"]["delta_bytes_over_dense"],
    }


def as_text(result: dict[str, Any]) -> str:
    """Format all results, one number per line."""
    return "\n".join(f"{name:<58}{value}" for name, value in _lines("", result))


def _lines(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _lines(f"{prefix}.{name}" if prefix else name, inner)
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for one in value:
            yield from _lines(f"{prefix}.{one['size_mib']}", one)
    elif isinstance(value, list):
        yield prefix, "  ".join(_format(one) for one in value)
    else:
        yield prefix, _format(value)


def _format(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
