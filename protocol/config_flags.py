"""Flags of a config, which override its file: --section.key VALUE.

flags ─▶ (sections that a library defines) ─▶ checked names ─▶ tyro ─▶ msgspec ─▶ config
"""

import contextlib
import difflib
import io
import re
import tomllib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec
import tyro

from protocol.config_keys import explain, is_passed_on, keys_of
from protocol.console import exit_on_closed_pipe
from protocol.errors import ConfigError

C = TypeVar("C", bound=msgspec.Struct)


def with_flags(
    config_type: type[C],
    base: C | None,
    flags: list[str],
    usage: str,
    switches: Iterable[str],
    describe: Callable[[], str],
) -> C:
    """Return the config with the flags on top of `base`, which is None if there is no file.

    `switches` are flags of the caller. `describe` returns the text of the help.

    Raises:
        ConfigError: If a flag is unknown, or its value has a wrong type or range.
    """
    if base is not None and not flags:
        return base
    flags, passed_on = _split_passed_on(config_type, flags)
    _refuse_unknown_flags(config_type, flags, switches)
    flags = _spell_out_booleans(config_type, flags)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint), exit_on_closed_pipe():
            default = tyro.MISSING_NONPROP if base is None else base
            conversions = (tyro.conf.FlagConversionOff,)
            text = describe() if {"-h", "--help"} & set(flags) else None
            config = tyro.cli(
                config_type, args=flags, prog=usage, description=text, default=default, config=conversions
            )
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        raise ConfigError(_plain(complaint.getvalue())) from exit_
    # Tyro builds the structs field by field. Only a conversion runs every check again.
    raw = msgspec.to_builtins(config)
    for path, value in passed_on:
        _set(raw, path, value)
    try:
        return msgspec.convert(raw, config_type)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(str(error), raw)) from error


def _split_passed_on(
    config_type: type[msgspec.Struct], flags: list[str]
) -> tuple[list[str], list[tuple[list[str], Any]]]:
    """Return the flags that tyro knows, then path and value of each other flag.

    Raises:
        ConfigError: If a flag has no value.
    """
    sections = tuple(f"--{key}." for key, field in keys_of(config_type).items() if is_passed_on(field))
    known, passed_on = [], []
    waiting = iter(flags)
    for flag in waiting:
        if not sections or not flag.startswith(sections):
            known.append(flag)
            continue
        name, has_value, text = flag.partition("=")
        value = text if has_value else next(waiting, "--")
        if value.startswith("--"):
            raise ConfigError(f"{name} has no value; expected: {name} VALUE, or {name} true for a boolean")
        passed_on.append((name.removeprefix("--").replace("-", "_").split("."), _toml_value(value)))
    return known, passed_on


def _spell_out_booleans(config_type: type[msgspec.Struct], flags: list[str]) -> list[str]:
    """Give each boolean flag an explicit value, which tyro requires.

    Such a flag may stand alone, or before true or false.

    Raises:
        ConfigError: If another word follows it.
    """
    names = {f"--{key.replace('_', '-')}" for key, field in keys_of(config_type).items() if _is_boolean(field)}
    spelled, left = [], deque(flags)
    while left:
        flag = left.popleft()
        name, has_value, word = flag.partition("=")
        if name not in names:
            spelled.append(flag)
            continue
        if not has_value:
            word = left.popleft() if left and not left[0].startswith("-") else "true"
        if word.lower() not in ("true", "false"):
            raise ConfigError(f"{name} {word} is not a boolean; use {name} true or {name} false ({name} alone is true)")
        spelled += [name, word.capitalize()]
    return spelled


def _is_boolean(field: msgspec.structs.FieldInfo) -> bool:
    return getattr(field.type, "__origin__", field.type) is bool  # for Annotated, the annotated type


def _toml_value(text: str) -> Any:
    """Return a TOML value. A word without quotes is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _set(raw: dict[str, Any], path: list[str], value: Any) -> None:
    *sections, name = path
    for section in sections:
        if not isinstance(raw.get(section), dict):
            raw[section] = {}
        raw = raw[section]
    raw[name] = value


def _refuse_unknown_flags(config_type: type[msgspec.Struct], flags: list[str], switches: Iterable[str]) -> None:
    keys = [key for key, field in keys_of(config_type).items() if not is_passed_on(field)]
    known = {"--help", "-h", *(f"--{key.replace('_', '-')}" for key in keys)}
    for flag in flags:
        if flag.startswith("--") and flag.partition("=")[0] not in known:
            near = difflib.get_close_matches(flag, [*known, *switches], n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else "see --help for all flags"
            raise ConfigError(f"unknown flag {flag}; {hint}")


def _plain(box: str) -> str:
    """Return the text inside tyro's error box, without tyro's own phrases."""
    lines = (line.strip("│╭╮╰╯─ \n") for line in box.splitlines())
    text = " ".join(line for line in lines if line).removeprefix("Value error ").partition(" For full helptext")[0]
    return re.sub(r"^Error parsing ([\w.]+): ", r"\1.", text)
