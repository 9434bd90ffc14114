"""Loading of user code that the config names: `module:name`, or `path/to/file.py:name`.

Used in the processes that run the code. Interpreters without Slipstream also load this file by path, so it
imports only the standard library.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ERRORS = (Exception, SystemExit, asyncio.CancelledError)
"""What user code may raise without ending its process. A coroutine raises CancelledError if it awaits a task that
it has canceled itself."""


_DIRECTORIES: set[str] = set()
"""Directories in which the modules that user code imports have been searched."""


class NotLoaded(Exception):
    """Failure to load what the config names; its text continues the name of the key."""


def load_named(spec: str) -> Any:
    """Return the callable that a spec names.

    Raises:
        NotLoaded: There is none.
    """
    module_name, _, name = spec.rpartition(":")
    loaded = getattr(_import(module_name), name, None)
    if not callable(loaded):
        found = "nothing" if loaded is None else f"a value of type {type(loaded).__name__}"
        raise NotLoaded(f"{module_name} holds {found} under the name {name!r}; define it there")
    return loaded


def _import(module_name: str) -> Any:
    is_file = module_name.endswith(".py")
    try:
        path = Path(module_name).expanduser().resolve()
        # A file finds its neighbors, as a script does. A console script does not search the working directory.
        directory = str(path.parent) if is_file else os.getcwd()
        if directory not in sys.path:
            sys.path.append(directory)
        module = _import_file(path) if is_file else importlib.import_module(module_name)
    except ERRORS as error:
        raise NotLoaded(
            f"importing {module_name} failed with {describe(error)}; expected module:name, importable from the working "
            "directory, or path/to/file.py:name"
        ) from error
    _DIRECTORIES.add(directory)
    _check_neighbors(directory, _file_of_module(module))
    return module


def _check_neighbors(directory: str, loaded: str | None) -> None:
    """Raise NotLoaded if user code imports a module next to it that has the name of another one already imported.

    Python imports one module of a name, so both users would get the same one.
    """
    imported = _imported_names(directory, loaded)
    for name, module in list(sys.modules.items()):
        file = _file_of_module(module)
        if file is None or name not in imported or _directory_of(file) not in _DIRECTORIES - {directory}:
            continue
        neighbor = importlib.machinery.PathFinder.find_spec(name, [directory])
        own = {os.path.realpath(one) for one in (file, loaded) if one is not None}
        if neighbor is not None and neighbor.origin is not None and os.path.realpath(neighbor.origin) not in own:
            raise NotLoaded(
                f"{neighbor.origin} and {file} have the same module name, so only one of them can be imported; "
                "rename one of them"
            )


def _imported_names(directory: str, loaded: str | None) -> set[str]:
    """Return the names of the modules that user code and its neighbors import, without those of packages' parts."""
    neighbors = {file for file in map(_file_of_module, list(sys.modules.values())) if file is not None}
    files = {file for file in neighbors if _directory_of(file) == directory} | ({loaded} if loaded else set())
    names: set[str] = set()
    for file in files:
        with contextlib.suppress(OSError, SyntaxError, ValueError):  # not Python, or changed meanwhile
            for node in ast.walk(ast.parse(Path(file).read_bytes())):
                if isinstance(node, ast.Import):
                    names |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    names.add(node.module.partition(".")[0])
    return names


def _directory_of(file: str) -> str:
    """Return the directory that Python searched to find a module or package."""
    directory, name = os.path.split(file)
    return os.path.dirname(directory) if name == "__init__.py" else directory


def _import_file(path: Path) -> Any:
    name = f"slipstream_user_{path.stem}_{abs(hash(path)):x}"
    if name not in sys.modules:
        module_spec = importlib.util.spec_from_file_location(name, path)
        if module_spec is None or module_spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[name] = module
        try:
            module_spec.loader.exec_module(module)
        except BaseException:
            # Otherwise the next attempt would find half a module, and fail with another error.
            del sys.modules[name]
            raise
    return sys.modules[name]


def file_of(loaded: Any) -> str | None:
    """Return the file that defines a function, class or callable object; None: its module has no file."""
    while isinstance(loaded, functools.partial):
        loaded = loaded.func
    return _file_of_module(sys.modules.get(getattr(loaded, "__module__", None) or ""))


def is_asynchronous(function: Any) -> bool:
    """Return whether calling a function returns a coroutine.

    Partial functions and callable objects count too, as in TRL.
    """
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def digests_of_files(loaded: Iterable[Any]) -> dict[str, str]:
    """Return digests of the files that define what is loaded, and of the imported files next to them, by path."""
    directories = {os.path.dirname(file) for one in loaded if (file := file_of(one))}
    digests = {}
    for file in map(_file_of_module, list(sys.modules.values())):
        if file and os.path.dirname(file) in directories:
            with contextlib.suppress(OSError):  # removed meanwhile, or inside an archive
                name = os.fsencode(file).decode("utf-8", "replace")  # a text that can be sent
                digests[name] = hashlib.sha256(Path(file).read_bytes()).hexdigest()
    return digests


def _file_of_module(module: Any) -> str | None:
    file = getattr(module, "__dict__", {}).get("__file__")  # not getattr, which lazy modules may answer by an import
    return file if isinstance(file, str) else None


def describe(error: BaseException) -> str:
    """Return a one-line description of an error, with the line where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {shorten(str(error), 300)}{where}"


def to_utf8_text(value: Any) -> str:
    """Return a value as a text that UTF-8 can encode, also if it is of a subclass or holds a lone surrogate.

    Python reads a file name that is not UTF-8 as a text with lone surrogates.
    """
    text = str.__str__(value) if isinstance(value, str) else str(value)  # of an Enum, str(value) is the name
    return text.encode("utf-8", "replace").decode()


def shorten(value: Any, limit: int = 120) -> str:
    """Return a value's repr, cut to a length that fits an error message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
