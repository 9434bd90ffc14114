"""Measure the overhead of the server: `python -m tests.bench.server --help`.

    groups through the server ÷ vllm.LLM.generate (server_generation.py) ─┬▶ DIR/server.json, one JSON object or a table
    the typed channel ÷ bare pyzmq (server_channel.py)                    ─┘

The machine should be idle and have two cores: one for the server, the other for the client.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from protocol.errors import SlipstreamError
from tests.bench.machine import machine, versions
from tests.bench.push import as_text, say


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
    (options.out / "server.json").write_text(json.dumps(result, indent=1))
    print(json.dumps(result) if options.json else as_text(result))


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.server", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench-server"), help="directory of server.json, models and logs"
    )
    parser.add_argument("--repetitions", type=int, default=5, help="repetitions of each side, each with new engines")
    parser.add_argument("--skip-generation", action="store_true", help="skip real vLLM")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Return all results in one object."""
    from tests.bench import server_channel

    result: dict[str, Any] = {"machine": machine(), "versions": versions(Path(sys.executable)), "generation": "skipped"}
    say("the channel")
    result["channel"] = server_channel.measure(options.repetitions)
    if not options.skip_generation:
        from tests.bench import server_generation

        result["generation"] = {}
        for case in server_generation.CASES:
            say(f"a model of {case.name} parameters")
            result["generation"][case.name] = server_generation.measure(case, options.out, options.repetitions)
    return headlines(result) | result


def headlines(result: dict[str, Any]) -> dict[str, Any]:
    """Return the headline numbers of the smallest model, which shows the overhead best. None: not measured."""
    channel = [one["over_pyzmq"] for one in result["channel"].values()]
    generation = result["generation"] if isinstance(result["generation"], dict) else {}
    of_smallest = next(iter(generation.values()), {"seeded": {}})["seeded"]
    return {
        "over_bare_vllm": of_smallest.get("over_bare_vllm"),
        "same_tokens": all(one["seeded"]["same_tokens"] for one in generation.values()) if generation else None,
        "channel_over_pyzmq": statistics.geometric_mean(channel),
        "channel_over_pyzmq_worst": min(channel),
    }


if __name__ == "__main__":
    main()
