"""Check a tiny model of every causal family of the installed transformers: `python -m tests.sweep --help`."""

import argparse
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import msgspec
import torch
import transformers

from tests.sweep.families import FAMILIES
from tests.sweep.report import by_way, figures, problem_of
from tests.sweep.visit import visit_in_process


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.sweep", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="Default: all.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    given = parser.parse_args()
    visits = []
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for done in as_completed(pool.submit(visit_in_process, family) for family in given.families or FAMILIES):
            visits.append(done.result())
            print(len(visits), visits[-1].family, visits[-1].way, flush=True)
    visits.sort(key=lambda visit: visit.family)
    print(by_way(visits), figures(visits), sep="\n\n")
    problems = [f"{visit.family}: {problem}" for visit in visits if (problem := problem_of(visit))]
    print("\n".join(["", "as expected" if not problems else "NOT as expected:", *problems]))
    if given.json:
        found = {"transformers": transformers.__version__, "torch": str(torch.__version__), "visits": visits}
        given.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")


if __name__ == "__main__":
    main()
