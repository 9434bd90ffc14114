"""The rooms of a package and who imports whom, read from the source: `python -m tests.rooms [PACKAGE]` prints the matrix.

A room is a folder of the package or a file at its top. Row imports column; the number is imports from file to file.
"""

import ast
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent


def imported_modules(source: str) -> set[str]:
    """Full names of all that a source imports, inside functions too; of `from a import b` both a and a.b could be meant."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module and node.level == 0]
    return plain | {f"{node.module}.{alias.name}" for node in froms for alias in node.names}


def room_of(module: str) -> str:
    """learner.rollouts.slots -> rollouts; learner.train -> train."""
    return module.split(".")[1]


def rooms_imported(package: str, source: str) -> set[str]:
    return {room_of(module) for module in imported_modules(source) if module.startswith(f"{package}.")}


def files_by_room(package: str) -> dict[str, list[Path]]:
    rooms: dict[str, list[Path]] = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        if path.parent == ROOT / package and path.stem == "__init__":
            continue
        room = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
        rooms.setdefault(room, []).append(path)
    return rooms


def import_counts(package: str) -> dict[str, Counter[str]]:
    """By room, how many of its files import each other room."""
    counts = {}
    for room, paths in files_by_room(package).items():
        counts[room] = Counter(other for path in paths for other in rooms_imported(package, path.read_text()) - {room})
    return counts


def floors(package: str) -> dict[str, int]:
    """By room, how high it stands: above all that it imports. Raises graphlib.CycleError."""
    counts, found = import_counts(package), {}
    for room in TopologicalSorter({room: set(others) for room, others in counts.items()}).static_order():
        found[room] = 1 + max((found[other] for other in counts.get(room, ())), default=0)
    return found


def matrix(package: str) -> str:
    """The rooms from top to bottom with their size and what they import."""
    rooms, counts, heights = files_by_room(package), import_counts(package), floors(package)
    ordered = sorted(rooms, key=lambda room: (-heights[room], room))
    lines = ["floor room            files lines | " + " ".join(f"{room[:8]:8}" for room in ordered)]
    for room in ordered:
        num_lines = sum(len(path.read_text().splitlines()) for path in rooms[room])
        row = " ".join(f"{counts[room][other] or '·':<8}" for other in ordered)
        lines.append(f"{heights[room]:>5} {room:15} {len(rooms[room]):>5} {num_lines:>5} | {row}".rstrip())
    return "\n".join([*lines, f"acyclic; floors: {max(heights.values())}"])


if __name__ == "__main__":
    print(matrix(sys.argv[1] if len(sys.argv) > 1 else "learner"))
