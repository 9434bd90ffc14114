"""The import rules of the design, read from the source: who may import whom, and where each heavy package stands."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rooms import files_by_room, floors, imported_modules, rooms_imported

ROOT = Path(__file__).parent.parent
PACKAGES = ("protocol", "learner", "inference_server", "deploy")
ONLY_IN = {
    "zmq": ("protocol/channel/",),
    "vllm": ("inference_server/engine/", "inference_server/http.py"),
    "cupy": ("protocol/transports/nccl.py",),
    "torch": (
        "protocol/transports/", "protocol/weights/", "protocol/builtin_models/", "inference_server/engine/", "learner/",
    ),
}  # fmt: skip
FORBIDDEN = {
    "protocol": {"learner", "inference_server", "deploy"},
    "learner": {"inference_server", "deploy", "vllm"},
    "inference_server": {"learner", "deploy", "accelerate"},
}
ORDER = (  # of the learner's rooms and top files: each may import those before it, and no other
    "config", "prompts", "servers", "algorithm", "forward", "policy", "environments", "gateway", "run_inputs", "rewards", "rollouts", "training", "storage",
    "evaluation", "report", "controller", "doctor", "train", "starter", "__main__",
)  # fmt: skip
INDEPENDENT = {"prompts", "servers", "algorithm", "forward"}
"""Of each other: what is asked, whom, how to learn, what is trained."""
ANYWHERE = {"sandbox", "rank_agreement", "rank_watch"}
"""Import nothing of the learner, so anyone of it may import them."""
MAX_FILES_OF_A_FOLDER = 15
MAX_PARAMETERS = 6
MAX_LINES = {"learner/train.py": 120, "learner/rollouts/rollouts.py": 280}
"""What is to be read in one go: the main loop, and what it waits for."""


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


LEARNER = [(room, path) for room, paths in files_by_room("learner").items() for path in paths]


@pytest.mark.parametrize(("room", "path"), LEARNER, ids=[name_of(path) for _, path in LEARNER])
def test_a_room_of_the_learner_imports_only_rooms_below_it(room: str, path: Path) -> None:
    others = rooms_imported("learner", path.read_text()) - {room} - ANYWHERE
    below = set(ORDER[: ORDER.index(room)]) if room not in ANYWHERE else set()
    assert others <= below - (INDEPENDENT if room in INDEPENDENT else set())


@pytest.mark.parametrize("package", ["protocol", "inference_server", "learner"])
def test_the_rooms_of_a_package_import_each_other_one_way(package: str) -> None:
    assert max(floors(package).values()) <= len(ORDER)


def test_a_circle_between_rooms_would_be_found() -> None:
    assert rooms_imported("learner", "def f():\n    from learner.rollouts.slot_order import SlotOrder") == {"rollouts"}
    assert rooms_imported("learner", "from learner import train\nimport learner.controller") == {"train", "controller"}


def test_no_folder_of_the_learner_has_more_files_than_one_can_read_at_a_glance() -> None:
    folders = {path.parent for _, path in LEARNER}
    crowded = {folder.name: len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: num for name, num in crowded.items() if num > MAX_FILES_OF_A_FOLDER} == {}


@pytest.mark.parametrize(("name", "limit"), MAX_LINES.items())
def test_a_file_that_is_to_be_read_in_one_go_stays_short(name: str, limit: int) -> None:
    assert len((ROOT / name).read_text().splitlines()) <= limit


def long_signatures(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
            if len(names) > MAX_PARAMETERS:
                yield f"{node.name}({', '.join(names)})"


@pytest.mark.parametrize(("room", "path"), LEARNER, ids=[name_of(path) for _, path in LEARNER])
def test_nothing_of_the_learner_but_a_formula_takes_more_than_six_parameters(room: str, path: Path) -> None:
    assert room == "algorithm" or list(long_signatures(path.read_text())) == []


def test_a_long_signature_would_be_found() -> None:
    assert list(long_signatures("def f(a, b, c, d, *, e, g, h): ...")) == ["f(a, b, c, d, e, g, h)"]


def imported_packages(source: str) -> set[str]:
    """Top-level names of every import statement, inside functions too."""
    return {module.split(".")[0] for module in imported_modules(source)}


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_a_module_imports_only_what_its_place_allows(path: Path) -> None:
    name, imported = name_of(path), imported_packages(path.read_text())
    assert not imported & FORBIDDEN.get(name.split("/")[0], set())
    for package, allowed in ONLY_IN.items():
        assert package not in imported or name.startswith(allowed), f"{package} may be imported only in {allowed}"


def test_the_rule_would_catch_a_forbidden_import() -> None:
    assert imported_packages("def f():\n    from vllm.v1 import x\n    import zmq.asyncio") == {"vllm", "zmq"}


def test_no_module_is_named_after_nothing() -> None:
    assert not [path for path in modules() if path.stem in {"utils", "common", "helpers", "misc"}]


@pytest.mark.parametrize(
    "module",
    [
        "protocol",
        "protocol.messages",
        "protocol.channel.sockets",
        "protocol.config",
        "learner.config",
        "learner.report.page",
        "inference_server.__main__",
    ],
)
def test_light_modules_load_neither_torch_nor_vllm(module: str) -> None:
    script = f"import sys, {module}; sys.exit(bool({{'torch', 'vllm', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0
