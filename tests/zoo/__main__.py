"""Run model families through the whole system: `python -m tests.zoo --help`.

Runs a tiny random model of each family, and three with an adapter. Prints the differences between server, learner,
transformers and a plain vLLM. Exit code 0 only if every family behaves as expected.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import msgspec

from tests.inference_server.forked_server import fork_server
from tests.zoo.families import FAMILIES
from tests.zoo.visit import WITH_ADAPTER, Visit, table, visit


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__.partition("\n\n")[2])
    parser.add_argument("families", nargs="*", help=f"any of {', '.join(FAMILIES)}; append +lora for an adapter")
    parser.add_argument("--json", action="store_true", help="print the results as JSON instead of a table")
    parser.add_argument("--out", type=Path, help="directory of models and logs (default: a temporary directory)")
    arguments = parser.parse_args()
    directory = arguments.out or Path(tempfile.mkdtemp(prefix="zoo-"))
    visits: list[Visit] = []
    with fork_server():
        for name in arguments.families or [*FAMILIES, *(f"{family}+lora" for family in WITH_ADAPTER)]:
            family, _, adapter = name.partition("+")
            (directory / name).mkdir(parents=True)
            visits.append(visit(family, directory / name, lora=bool(adapter)))
            print(msgspec.json.encode(visits[-1]).decode(), file=sys.stderr, flush=True)
    print(msgspec.json.format(msgspec.json.encode(visits)).decode() if arguments.json else table(visits))
    sys.exit(0 if all(visited.is_as_expected for visited in visits) else 1)


if __name__ == "__main__":
    main()
