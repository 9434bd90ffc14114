"""The import rules of the design, read from the source: who may import whom, and where each heavy package stands."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("protocol", "learner", "inference_server", "deploy")
ONLY_IN = {
    "zmq": {"protocol/channel/"},
    "vllm": {
        "inference_server/engine/",
        "inference_server/http.py",
    },
    "cupy": {"protocol/collective/nccl.py"},
}
FORBIDDEN = {
    "protocol": {"learner", "inference_server", "deploy"},
    "learner": {"inference_server", "deploy", "vllm"},
    "inference_server": {"learner", "deploy", "accelerate"},
}


ORDER = (  # of the learner's rooms and top files: each may import those before it, and no other
    "config", "prompts", "servers", "algorithm", "policy", "rewards", "rollouts", "training", "storage", "report", "leader", "evaluation",
    "train", "__main__",
)  # fmt: skip
INDEPENDENT = {
    "prompts",
    "servers",
    "algorithm",
    "policy",
}  # of each other: what is asked, whom, how to learn, what is trained
ANYWHERE = {"interrupt", "progress"}  # import nothing of ours


def room_of(name: str) -> str:
    """learner.rollouts.slots -> rollouts; learner/train.py and learner.train -> train."""
    return name.removesuffix(".py").replace("/", ".").split(".")[1]


def imported_rooms(source: str) -> set[str]:
    return {
        room_of(module)
        for node in ast.walk(ast.parse(source))
        for module in (
            [alias.name for alias in node.names] if isinstance(node, ast.Import)
            else [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) and node.module
            else []
        )
        if module.startswith("learner.")
    }  # fmt: skip


@pytest.mark.parametrize("path", sorted((ROOT / "learner").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_room_of_the_learner_imports_only_rooms_below_it(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    room = room_of(name)
    if room == "__init__":
        return
    others = imported_rooms(path.read_text()) - {room} - ANYWHERE
    assert room not in ANYWHERE or not others
    below = set(ORDER[: ORDER.index(room)]) if room in ORDER else set()
    assert others <= below - (INDEPENDENT if room in INDEPENDENT else set())


def imported_packages(source: str) -> set[str]:
    """Top-level names of every import statement, inside functions too."""
    packages = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            packages |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            packages.add(node.module.split(".")[0])
    return packages


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_place_allows(path: Path) -> None:
    name = str(path.relative_to(ROOT))
    imported = imported_packages(path.read_text())
    assert not imported & FORBIDDEN.get(name.split("/")[0], set())
    for package, allowed in ONLY_IN.items():
        assert package not in imported or name.startswith(tuple(allowed)), (
            f"{package} may be imported only in {sorted(allowed)}"
        )


def test_the_rule_would_catch_a_forbidden_import() -> None:
    assert imported_packages("def f():\n    from vllm.v1 import x\n    import zmq.asyncio") == {"vllm", "zmq"}


def test_no_module_is_named_after_nothing() -> None:
    assert not [path for path in modules() if path.stem in {"utils", "common", "helpers", "misc"}]


@pytest.mark.parametrize(
    "module", ["protocol", "protocol.messages", "protocol.channel.sockets", "protocol.config", "learner.config"]
)
def test_light_modules_load_neither_torch_nor_vllm(module: str) -> None:
    script = f"import sys, {module}; sys.exit(bool({{'torch', 'vllm', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], cwd=ROOT).returncode == 0
