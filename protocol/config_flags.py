"""Flags of a config, which override its file (--section.key VALUE), and the help of a command.

flags ─▶ (sections that a library defines) ─▶ checked names ─▶ tyro ─▶ msgspec ─▶ config
"""

import contextlib
import difflib
import io
import re
import shutil
import textwrap
import tomllib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, get_args, get_origin

import msgspec
import tyro
from tyro._docstrings import get_field_docstring

from protocol.config_keys import expected_values, explain, is_passed_on, keys_of, refuse_unknown_keys
from protocol.errors import ConfigError

C = TypeVar("C", bound=msgspec.Struct)
SENTENCE = re.compile(r".+?[.:](?=\s|$)", re.DOTALL)
MAX_HELP_WIDTH = 110
"""Maximum width of the help above the keys."""


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
        ConfigError: A flag is unknown, or its value has a wrong type or range.
    """
    if base is not None and not flags:
        return base
    flags, passed_on = _split_passed_on(config_type, flags)
    _refuse_unknown_flags(config_type, flags, switches)
    flags = _spell_out_booleans(config_type, flags)
    _refuse_wrong_number_of_values(config_type, flags)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            default = tyro.MISSING_NONPROP if base is None else base
            conversions = (tyro.conf.FlagConversionOff,)
            text = describe() if {"-h", "--help"} & set(flags) else None
            config = tyro.cli(
                config_type, args=flags, prog=usage, description=text, default=default, config=conversions
            )
    except SystemExit as exit_:
        if exit_.code in (0, None):
            raise
        raise ConfigError(_plain(config_type, flags, complaint.getvalue())) from exit_
    # Tyro builds the structs field by field. Only a conversion runs every check again.
    raw = msgspec.to_builtins(config)
    for path, value in passed_on:
        _set(raw, path, value)
    refuse_unknown_keys(config_type, raw, "flags")
    try:
        return msgspec.convert(raw, config_type)
    except msgspec.ValidationError as error:
        raise ConfigError(explain(str(error), raw, config_type)) from error


def description(
    purpose: str, flags: Mapping[str, str], config_type: type[msgspec.Struct], common: Sequence[str]
) -> str:
    """Return the text between the usage and the keys."""
    parts = [purpose.strip()]
    if flags:
        parts.append(f"flags:\n{_columns(flags)}")
    if common:
        keys = {f"--{key.replace('_', '-')}": summary(config_type, key) for key in common}
        parts.append(f"common keys:\n{_columns(keys)}")
    return "\n\n".join([*parts, "all keys, by section:"])


def summary(config_type: type[msgspec.Struct], key: str) -> str:
    """Return the first sentence of what is documented of a key: `learner.steps`."""
    *sections, name = key.split(".")
    for section in sections:
        config_type = {field.name: field.type for field in msgspec.structs.fields(config_type)}[section]
    text = " ".join((get_field_docstring(config_type, name, ()) or "").split())
    sentence = SENTENCE.match(text)
    return (sentence[0] if sentence else text).rstrip(".:")


def _split_passed_on(
    config_type: type[msgspec.Struct], flags: list[str]
) -> tuple[list[str], list[tuple[list[str], Any]]]:
    """Return the flags that tyro knows, then path and value of each other flag.

    Raises:
        ConfigError: A flag has no value.
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

    Such a flag may stand alone, or before true or false. A key that may also be "auto" always has a value.

    Raises:
        ConfigError: Another word follows it.
    """
    fields = {_flag_of(key): field for key, field in keys_of(config_type).items()}
    booleans = {name for name, field in fields.items() if _is_boolean(field)}
    mixed = {name for name, field in fields.items() if bool in get_args(_plain_type(field))}
    spelled, left = [], deque(flags)
    while left:
        flag = left.popleft()
        name, has_value, word = flag.partition("=")
        if name not in booleans | mixed:
            spelled.append(flag)
            continue
        if not has_value:
            is_alone = not left or left[0].startswith("-")
            word = left.popleft() if not is_alone else "true" if name in booleans else ""
        is_word = word.lower() in ("true", "false")
        if name in booleans and not is_word:
            raise ConfigError(f"{name} {word} is not a boolean; use {name} true or {name} false ({name} alone is true)")
        spelled += [name, word.capitalize() if is_word else word] if word else [flag]
    return spelled


def _is_boolean(field: msgspec.structs.FieldInfo) -> bool:
    return _plain_type(field) is bool


def _plain_type(field: msgspec.structs.FieldInfo) -> Any:
    """Return the type of a key, for Annotated the annotated type."""
    return field.type.__origin__ if hasattr(field.type, "__metadata__") else field.type


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


def _flag_of(key: str) -> str:
    return f"--{key.replace('_', '-')}"


def _refuse_unknown_flags(config_type: type[msgspec.Struct], flags: list[str], switches: Iterable[str]) -> None:
    """Raise ConfigError for a flag of no key, and for a key that only the file can set."""
    keys = {key: field for key, field in keys_of(config_type).items() if not is_passed_on(field)}
    in_file = [key for key, field in keys.items() if _is_only_in_file(field)]
    known = {"--help", "-h", *(_flag_of(key) for key in keys if key not in in_file)}
    for name, _ in _with_values(flags):
        if not name or name in known:
            continue
        key = name.removeprefix("--").replace("-", "_")
        if any(f"{key}.".startswith(f"{one}.") for one in in_file):
            raise ConfigError(
                f"{name} is no flag of this command; set {key} in the config file, or see --help for all flags"
            )
        near = difflib.get_close_matches(name, [*known, *switches], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "see --help for all flags"
        raise ConfigError(f"unknown flag {name}; {hint}")


def _refuse_wrong_number_of_values(config_type: type[msgspec.Struct], flags: list[str]) -> None:
    """Raise ConfigError for a flag without its value, and for a word that belongs to no flag."""
    types = {_flag_of(key): field.type for key, field in keys_of(config_type).items()}
    for name, values in _with_values(flags):
        if not name:
            raise ConfigError(f"{values[0]!r} belongs to no flag; expected: --key VALUE after the config file")
        if name not in types or _takes_several(types[name]):
            continue
        expected = expected_values(types[name])
        if not values:
            raise ConfigError(
                f"{name} has no value; use {name} VALUE with {expected} ({name}=VALUE if it begins with -)"
            )
        if len(values) > 1:
            raise ConfigError(
                f"{name} got {len(values)} values: {' '.join(values)}; use one, {expected}, in quotes if it has spaces"
            )


def _with_values(flags: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each flag and the words after it; words before the first flag come with an empty name."""
    name, values = "", list[str]()
    for word in flags:
        if not word.startswith("-") or _is_number(word):
            values.append(word)
            continue
        if name or values:
            yield name, values
        name, has_value, value = word.partition("=")
        values = [value] if has_value else []
    if name or values:
        yield name, values


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _is_only_in_file(field: msgspec.structs.FieldInfo) -> bool:
    return tyro.conf.Suppress in getattr(field.type, "__metadata__", ())


def _takes_several(annotated: Any) -> bool:
    return get_origin(annotated) is tuple or any(_takes_several(inner) for inner in get_args(annotated))


def _plain(config_type: type[msgspec.Struct], flags: list[str], box: str) -> str:
    """Return the error in tyro's box without tyro's own phrases."""
    lines = (line.strip("│╭╮╰╯─ \n") for line in box.splitlines())
    text = " ".join(line for line in lines if line).removeprefix("Value error ").partition(" For full helptext")[0]
    types = {_flag_of(key): field.type for key, field in keys_of(config_type).items()}
    for name, values in _with_values(flags):
        if re.search(rf"(Error parsing |argument '){name}[:']", text):
            return f"{name} {' '.join(values) or repr('')} is not valid; use {expected_values(types[name])}"
    return re.sub(r"^Error parsing ([\w.]+): ", r"\1.", text)


def _columns(rows: Mapping[str, str]) -> str:
    indent = 4 + max(map(len, rows))
    width = max(min(shutil.get_terminal_size().columns, MAX_HELP_WIDTH), indent + 30)
    lines = []
    for name, text in rows.items():
        first, *others = textwrap.wrap(text, width - indent) or [""]
        lines += [f"  {name:<{indent - 2}}{first}", *(" " * indent + other for other in others)]
    return "\n".join(lines)
