"""Check that the user's code is an environment, and list what the policy can call.

    class of TRL's `environment_factory`: no argument, reset(**row), get_reward(), methods     plus functions

This runs in the environment's process. In a conversation, methods and functions are tools, described by their
type hints and docstrings. In plain text, the class has one method, which gets each turn as it is.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from learner.environments.builtin import Calculator, CalculatorByTurn, Guess, GuessByTurn
from learner.sandbox.user_code import NotLoaded, load_named, shorten

TURN_REWARD, STATE_KEY = "get_turn_reward", "get_state_key"
"""Optional methods: the reward of the last turn, and the name of the state in which the next turn begins."""
RESERVED = ("reset", "get_reward", TURN_REWARD, STATE_KEY)
"""Public methods that the policy does not call."""

BUILT_IN = {
    "calculator": Calculator,
    "calculator_by_turn": CalculatorByTurn,
    "guess": Guess,
    "guess_by_turn": GuessByTurn,
}

Tools = Mapping[str, Callable[..., Any]]


def load_environment(spec: str, *, takes_text: bool) -> type:
    """Return the class that `learner.environment.factory` names.

    Raises:
        NotLoaded: It cannot be loaded or is no environment.
    """
    if ":" not in spec and spec not in BUILT_IN:
        raise NotLoaded(f"it is not built in; known are: {', '.join(BUILT_IN)}. Name one of your own as module:Class")
    factory = BUILT_IN[spec] if ":" not in spec else load_named(spec)
    if not inspect.isclass(factory):
        raise NotLoaded(f"it is {shorten(factory)}, expected a class")
    if not callable(getattr(factory, "reset", None)):
        raise NotLoaded("the class has no method reset(self, **row), which begins an episode")
    if callable(getattr(factory, "done", None)):
        raise NotLoaded(
            "done is a method of the class, so every episode would be over at once; make it an attribute or a "
            "property, or rename the method"
        )
    if takes_text:
        method_of_turns(factory)
    return factory


def load_functions(specs: Sequence[str]) -> Tools:
    """Return the functions of `learner.environment.tools` by name.

    Raises:
        NotLoaded: One cannot be loaded, is not a function, or has the name of another.
    """
    functions: dict[str, Callable[..., Any]] = {}
    for spec in specs:
        function = load_named(spec)
        name = getattr(function, "__name__", "")
        if inspect.isclass(function) or not name:
            raise NotLoaded(f"{spec} is {shorten(function)}, expected a function")
        if name in functions:
            raise NotLoaded(f"{spec} is the second tool with the name {name}; the policy calls them by name, rename it")
        functions[name] = function
    return functions


def methods_of(factory: type) -> list[str]:
    """Return the names of the public methods that are not RESERVED."""
    return [name for name, _ in inspect.getmembers(factory, callable) if name[0] != "_" and name not in RESERVED]


def method_of_turns(factory: type) -> str:
    """Return the only name in `methods_of`. Raises NotLoaded unless there is just one."""
    names = methods_of(factory)
    if len(names) != 1:
        raise NotLoaded(
            f"the class has {len(names)} public methods besides {', '.join(RESERVED[:-1])} and {RESERVED[-1]} "
            f"({', '.join(names) or 'none'}); "
            "expected one, which gets the text of each turn, because the prompts are plain texts. Prefix the names of "
            "the other methods with _, or use prompts that are conversations, in which methods are tools"
        )
    return names[0]


def schemas_of(tools: Tools) -> list[dict[str, Any]]:
    """Return the tools' JSON schemas for chat templates.

    They derive from type hints and docstrings in Google style.

    Raises:
        NotLoaded: transformers is missing, or a tool has no type hints or no docstring.
    """
    try:  # takes seconds, so imported only on demand
        from transformers.utils import get_json_schema
        from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException
    except ImportError as error:
        raise NotLoaded(
            f"transformers, which describes tools to the policy, is missing in {sys.executable} ({error}); install it "
            "there"
        ) from error

    schemas = []
    for name, tool in tools.items():
        try:
            schemas.append(get_json_schema(tool))
        except (DocstringParsingException, TypeHintParsingException) as error:
            raise NotLoaded(
                f"the tool {name} cannot be described to the policy: {error} Expected type hints for all arguments and "
                "a docstring in Google style that describes the tool, and each argument under Args"
            ) from error
    return schemas
