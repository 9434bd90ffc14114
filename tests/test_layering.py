"""The import rules of the design, checked in the source: which packages and folders may import which."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

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
ORDER = (  # folders and top files of the learner: each may import only earlier ones
    "config", "prompts", "servers", "algorithm", "forward", "policy", "environments", "gateway", "rewards",
    "run_inputs", "rollouts", "training", "storage", "evaluation", "report", "publishing", "reference_controller",
    "server_fit", "controller", "doctor", "train", "starter", "__main__",
)  # fmt: skip
INDEPENDENT = {"prompts", "servers", "algorithm", "forward"}
"""Folders that must not import each other."""
ANYWHERE = {"sandbox", "rank_agreement", "rank_watch"}
"""Modules that import nothing of the learner, so that any of its modules may import them."""
MAX_FILES_OF_A_FOLDER = 16
MAX_PARAMETERS = 6
MAX_LINES = {"learner/train.py": 130, "learner/rollouts/rollouts.py": 280}
"""Limits for the main loop and its rollouts, which must be readable in one go."""
LIGHT = ("protocol.messages", "protocol.channel.sockets", "protocol.config", "learner.config", "learner.report.page",
         "inference_server.__main__")  # fmt: skip


def sources(*folders: str) -> dict[str, str]:
    """Return the sources by file name."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text() for path in paths}


PRODUCT = sources(*PACKAGES)


@cache
def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def imported_modules(source: str) -> set[str]:
    """Return the full names of all imports, including those in functions. `from a import b` counts as a.b."""
    nodes = nodes_of(source)
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.module and node.level == 0]
    return plain | {f"{node.module}.{alias.name}" for node in froms for alias in node.names}


def folder_of(name: str) -> str:
    """Return the folder or top file of a source: learner/rollouts/slots.py -> rollouts; learner/train.py -> train."""
    return name.split("/")[1].removesuffix(".py")


def folders_imported(package: str, source: str) -> set[str]:
    return {module.split(".")[1] for module in imported_modules(source) if module.startswith(f"{package}.")}


def imports_by_folder(package: str) -> dict[str, set[str]]:
    """Return the imported folders by folder."""
    found: dict[str, set[str]] = {}
    for name, source in PRODUCT.items():
        if name.startswith(f"{package}/") and name != f"{package}/__init__.py":
            found.setdefault(folder_of(name), set()).update(folders_imported(package, source) - {folder_of(name)})
    return found


def test_a_folder_of_the_learner_imports_only_folders_below_it() -> None:
    for room, others in imports_by_folder("learner").items():
        below = set(ORDER[: ORDER.index(room)]) if room not in ANYWHERE else set()
        assert others - ANYWHERE <= below - (INDEPENDENT if room in INDEPENDENT else set()), room


@pytest.mark.parametrize("package", ["protocol", "inference_server"])
def test_the_folders_of_a_package_have_no_import_cycles(package: str) -> None:
    TopologicalSorter(imports_by_folder(package)).prepare()  # raises graphlib.CycleError


def test_folders_and_central_files_of_the_learner_stay_small() -> None:
    folders = {path.parent for path in (ROOT / "learner").rglob("*.py")}
    crowded = {folder.name: len(list(folder.glob("*.py"))) for folder in folders}
    assert {name: num for name, num in crowded.items() if num > MAX_FILES_OF_A_FOLDER} == {}
    assert all(PRODUCT[name].count("\n") <= limit for name, limit in MAX_LINES.items())


def long_signatures(source: str) -> Iterator[str]:
    for node in nodes_of(source):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            names = [argument.arg for argument in arguments if argument.arg not in ("self", "cls")]
            if len(names) > MAX_PARAMETERS:
                yield f"{node.name}({', '.join(names)})"


def test_only_formulas_of_the_learner_take_more_than_six_parameters() -> None:
    found = {name: list(long_signatures(source)) for name, source in sources("learner").items()}
    assert {name: long for name, long in found.items() if long and folder_of(name) != "algorithm"} == {}


def test_a_module_imports_only_packages_allowed_in_its_folder() -> None:
    for name, source in PRODUCT.items():
        imported = {module.split(".")[0] for module in imported_modules(source)}
        assert not imported & FORBIDDEN.get(name.split("/")[0], set()), name
        for package, allowed in ONLY_IN.items():
            assert package not in imported or name.startswith(allowed), (
                f"{name} must not import {package}: only {allowed} may"
            )


def test_the_checks_find_an_import_in_a_function_and_a_long_signature() -> None:
    source = (
        "def f(a, b, c, d, *, e, g, h):\n    from learner.rollouts.slots import x\n    import zmq.asyncio, "
        "learner.train"
    )
    assert imported_modules(source) == {"learner.rollouts.slots.x", "zmq.asyncio", "learner.train"}
    assert folders_imported("learner", source) == {"rollouts", "train"}
    assert list(long_signatures(source)) == ["f(a, b, c, d, e, g, h)"]


def test_no_module_has_a_vague_name_or_trusts_remote_code() -> None:
    assert not {Path(name).stem for name in PRODUCT} & {"utils", "common", "helpers", "misc"}
    for name, source in PRODUCT.items():
        trusts = [ast.unparse(node) for node in nodes_of(source) if isinstance(node, ast.keyword)
                  and node.arg == "trust_remote_code"]  # fmt: skip
        assert set(trusts) <= {"trust_remote_code=False"}, name


def test_light_modules_load_neither_torch_nor_vllm() -> None:
    script = f"import sys, {', '.join(LIGHT)}; print({{'torch', 'vllm', 'transformers'}} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "set()\n", done.stdout + done.stderr


def test_no_test_file_is_imported_by_another() -> None:
    """Shared code belongs in a helper module, named after what it is."""
    tests = sources("tests")
    of_tests = {name.removesuffix(".py").replace("/", ".") for name in tests if Path(name).name.startswith("test_")}
    shared = {
        f"{name} imports {module}"
        for name, source in tests.items()
        for module in imported_modules(source)
        if not of_tests.isdisjoint((module, module.rpartition(".")[0]))
    }
    assert sorted(shared) == []
