"""Load the reward functions that the config names.

They have TRL's signature, `f(prompts, completions, completion_ids, **columns) -> list[float | None]`, and run
unchanged. The processes of `process.py` import this file, `call.py`, `sandbox/` and the functions'
modules, nothing heavier.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import msgspec

from learner.config import RewardConfig
from learner.rewards.builtin.json_schema import json_schema
from learner.rewards.builtin.judge import judge
from learner.rewards.builtin.mathematics import math_equivalence
from learner.rewards.builtin.program import passes_tests, why_not_confined
from learner.rewards.builtin.text import (
    environment_reward,
    exact_match,
    last_number,
    multiple_choice,
    share_right,
    think_format,
)
from learner.sandbox.user_code import NotLoaded, digests_of_files, is_asynchronous, load_named
from protocol.errors import RewardError

RewardFunction = Callable[..., Any]
BUILT_IN: dict[str, RewardFunction] = {
    function.__name__: function
    for function in (
        exact_match,
        last_number,
        multiple_choice,
        math_equivalence,
        json_schema,
        passes_tests,
        judge,
        share_right,
        think_format,
        environment_reward,
    )
}


GIVEN = {
    "prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "opens_reasoning",
    "timeout_s", "reward_config", "environment_rewards", "environments",
}  # fmt: skip
"""Arguments of a function that are no columns."""


@functools.cache
def load_function(spec: str) -> RewardFunction:
    """Return the function that a spec names.

    Raises:
        RewardError: The function cannot be loaded or called. The error names the remedy.
    """
    if ":" not in spec:
        if spec not in BUILT_IN:
            raise RewardError(
                f"reward function {spec!r} is not built in; known are: {', '.join(BUILT_IN)}. "
                "Name one of your own as module:function or path/to/file.py:function"
            )
        return BUILT_IN[spec]
    try:
        function: RewardFunction = load_named(spec)
    except NotLoaded as error:
        raise RewardError(f"reward function {spec!r}: {error}") from error
    _check_signature(function, spec)
    return function


def _check_signature(function: RewardFunction, spec: str) -> None:
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # written in C, so only the first call shows it
        return
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    missing = [name for name in ("prompts", "completions", "completion_ids") if name not in parameters]
    if missing:
        raise RewardError(
            f"reward function {spec!r} takes ({', '.join(parameters)}) but not {', '.join(missing)}; it is called, as "
            "in TRL, with prompts, completions, completion_ids and every column: add **kwargs to its parameters"
        )


class LoadedFunctions(msgspec.Struct, frozen=True):
    """Result of loading functions: the first error, or the functions' properties."""

    problem: str | None = None
    is_unreachable: bool = False
    """Whether the error means that a service, which a module calls as it is imported, is down."""
    asynchronous: frozenset[str] = frozenset()
    with_environments: frozenset[str] = frozenset()
    """Functions that ask for the environments' attributes."""
    file_digests: dict[str, str] = {}
    """Digests of the files of the user's functions, by path."""


def load_all(config: RewardConfig) -> LoadedFunctions:
    """Load all functions, including what they import slowly. Raises RewardError."""
    functions = config.functions
    if math_equivalence.__name__ in functions:  # importing sympy takes longer than an answer may
        math_equivalence(completions=[r"\boxed{1}"], answer=["1"])
    if judge.__name__ in functions:
        importlib.import_module("aiohttp")  # importing it takes as long as a verdict may
    if passes_tests.__name__ in functions and not config.unconfined_programs and (reason := why_not_confined()):
        raise RewardError(
            f"passes_tests cannot confine programs on this machine ({reason}). Allow unprivileged user namespaces "
            "(docker: --security-opt seccomp=unconfined --security-opt apparmor=unconfined; Ubuntu: sysctl "
            "kernel.apparmor_restrict_unprivileged_userns=0), or set learner.reward.unconfined_programs = true to "
            "run programs with all of your permissions"
        )
    return LoadedFunctions(
        asynchronous=frozenset(spec for spec in functions if is_asynchronous(load_function(spec))),
        with_environments=frozenset(spec for spec in functions if names(spec, "environments")),
        file_digests=digests_of_files(load_function(spec) for spec in functions if ":" in spec),
    )


@functools.cache
def accepts(spec: str, name: str) -> bool:
    """Return whether a function takes a parameter of this name or any keyword."""
    parameters = _parameters(spec)
    return name in parameters or any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())


def names(spec: str, name: str) -> bool:
    """Return whether a function has a parameter of this name.

    `**kwargs` does not count, because it does not request expensive arguments.
    """
    return name in _parameters(spec)


def missing_columns(spec: str, columns: Collection[str]) -> list[str]:
    """Return the columns that a built-in function requires besides these."""
    if spec not in BUILT_IN:
        return []
    required = [
        name
        for name, parameter in _parameters(spec).items()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    return [name for name in required if name not in GIVEN and name not in columns]


def check_columns(config: RewardConfig, data: str, columns: Collection[str]) -> None:
    """Raise RewardError if the data has not the columns that a built-in function requires."""
    for spec in config.functions:
        for missing in missing_columns(spec, columns):
            raise RewardError(
                f'learner.reward.functions contains "{spec}", which reads the column {missing!r}, but the columns of '
                f"{data} are: {', '.join(columns) or 'none'}. Rename the column of the data"
            )


def _parameters(spec: str) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(load_function(spec)).parameters
    except ValueError:  # written in C
        return {}
