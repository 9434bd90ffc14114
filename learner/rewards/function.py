"""A reward function of the user's: how a name in the config becomes one.

It has TRL's signature, `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, and runs unchanged. All
of this happens in the processes of process.py; they import this file, call.py and the functions' modules, nothing heavier.
"""

import functools
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from learner.rewards.builtin import BUILT_IN
from protocol.errors import RewardError

RewardFunction = Callable[..., Any]


@functools.cache
def load_function(spec: str) -> RewardFunction:
    """Return the function that a spec names. Raises RewardError with the remedy if it cannot be loaded or called."""
    if ":" not in spec:
        if spec not in BUILT_IN:
            raise RewardError(
                f"reward function {spec!r} is not built in; known are: {', '.join(BUILT_IN)}. "
                "Name one of your own as module:function or path/to/file.py:function"
            )
        return BUILT_IN[spec]
    module_name, _, name = spec.rpartition(":")
    function = vars(_import(module_name, spec)).get(name)
    if not callable(function):
        came = "nothing" if function is None else f"a value of type {type(function).__name__}"
        raise RewardError(
            f"reward function {spec!r}: {module_name} holds {came} under the name {name!r}; define it there"
        )
    _check_signature(function, spec)
    return function


def _import(module_name: str, spec: str) -> Any:
    try:
        if module_name.endswith(".py"):
            return _import_file(Path(module_name).expanduser().resolve())
        if os.getcwd() not in sys.path:  # a console script does not look into the directory it is called from
            sys.path.append(os.getcwd())
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"reward function {spec!r}: importing {module_name} failed with {describe(error)}; expected module:function, "
            "importable from the working directory, or path/to/file.py:function"
        ) from error


def _import_file(path: Path) -> Any:
    name = f"slipstream_rewards_{path.stem}_{abs(hash(path)):x}"
    if name not in sys.modules:
        module_spec = importlib.util.spec_from_file_location(name, path)
        if module_spec is None or module_spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[name] = module
        try:
            module_spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]  # else the next attempt would find half a module and another error
            raise
    return sys.modules[name]


def _check_signature(function: RewardFunction, spec: str) -> None:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # written in C: the first call will show
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    missing = [name for name in ("prompts", "completions", "completion_ids") if name not in parameters]
    if missing:
        raise RewardError(
            f"reward function {spec!r} takes ({', '.join(parameters)}) but not {', '.join(missing)}; it is called, as in "
            "TRL, with prompts, completions, completion_ids and every column: add **kwargs to its parameters"
        )


class Loaded(msgspec.Struct, frozen=True):
    """What came of loading functions: what is wrong with the first that cannot be, or which ones are asynchronous."""

    problem: str | None = None
    asynchronous: frozenset[str] = frozenset()


def load_all(functions: Sequence[str]) -> Loaded:
    """Load all functions."""
    try:
        return Loaded(asynchronous=frozenset(spec for spec in functions if is_asynchronous(load_function(spec))))
    except RewardError as error:
        return Loaded(problem=str(error))


def is_asynchronous(function: RewardFunction) -> bool:
    """Whether calling it returns a coroutine, in the forms that TRL knows: partial functions and callable objects too."""
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


@functools.cache
def accepts(spec: str, name: str) -> bool:
    """Whether a function has a parameter of this name, or takes any."""
    try:
        parameters = inspect.signature(load_function(spec)).parameters
    except ValueError:  # written in C
        return False
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def describe(error: BaseException) -> str:
    """Return an error in one line, with the place it was raised at."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {shorten(str(error), 300)}{where}"


def shorten(value: Any, limit: int = 120) -> str:
    """Return a value as it would be written in Python, cut to what fits into a message."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[:limit]}…"
