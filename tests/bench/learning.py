"""Measure what the algorithms learn at each staleness: `python -m tests.bench.learning --help`.

    grid of cells ─▶ worker processes, one thread each ─▶ DIR/cells.jsonl, a line per finished cell ─▶ table, plots

A restart with the same --out runs only the missing cells. Every cell of a task has the same number of samples. All
cells start from the weights of `tiny:digits`; a seed changes the prompts, their order and the sampling.
"""

import argparse
import fnmatch
import json
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from protocol.errors import SlipstreamError
from protocol.model_files import resolve_model
from tests.bench.cell import NUM_SEEDS, TASKS, Cell, grid


def main() -> None:
    """Run the missing cells, then print the table or, with --json, one JSON object."""
    options = parse_options(sys.argv[1:])
    # Set before torch is imported, here and in the workers. More threads are slower on such a small model.
    os.environ["OMP_NUM_THREADS"] = "1"
    from tests.bench import results
    from tests.bench.plots import write_plots
    from tests.bench.summary import as_text, summarize

    try:
        options.out.mkdir(parents=True, exist_ok=True)
        resolve_model("tiny:digits")  # created before several workers create it concurrently
        cells = [cell for cell in grid(options.tasks, options.seeds) if is_chosen(cell, options.only)]
        done = results.read(options.out)
        run_cells([cell for cell in cells if cell not in done], options.workers, options.out)
        trials = results.read(options.out)
        summary: dict[str, Any] = summarize(trials)
        summary["cells_missing"] = [cell.name for cell in grid(list(TASKS)) if cell not in trials]
        summary["plots"] = [str(path) for path in write_plots(trials, options.out)]
        if options.real:
            from tests.bench.real_system import run_real_cells

            summary["real"] = run_real_cells(options.out, options.seeds or list(range(NUM_SEEDS["sort"])), trials)
    except SlipstreamError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(summary) if options.json else as_text(summary))


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.learning", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--out", type=Path, default=Path("runs/bench-learning"), help="directory of cells and plots")
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", nargs="+", type=int, help="seeds (default: 0 to 3; with large steps 0 to 7)")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="PATTERN",
        help="cells whose name matches one, such as 'sort/grpo/stale[04]/none/*'",
    )
    parser.add_argument(
        "--real",
        action="store_true",
        help="repeat sort with grpo at staleness 0 and 4 in the whole system: server and learner processes",
    )
    return parser.parse_args(arguments)


def is_chosen(cell: Cell, patterns: list[str] | None) -> bool:
    return patterns is None or any(fnmatch.fnmatch(cell.name, pattern) for pattern in patterns)


def run_cells(cells: list[Cell], num_workers: int, directory: Path) -> None:
    """Run cells in worker processes and store each result. An error in one cell stops all."""
    if not cells:
        return
    from tests.bench import results
    from tests.bench.trial import run_trial

    started = time.monotonic()
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, mp_context=spawn) as pool:
        futures = [pool.submit(run_trial, cell) for cell in cells]
        try:
            for number, future in enumerate(as_completed(futures), start=1):
                trial = future.result()
                results.append(directory, trial)
                print(
                    f"{number}/{len(cells)} after {time.monotonic() - started:.0f} s: {trial.cell.name} took "
                    f"{trial.seconds:.0f} s, best {trial.best:.3f}, final {trial.final:.3f}",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


if __name__ == "__main__":
    main()
