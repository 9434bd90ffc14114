"""Help of a command above the list of all its keys: purpose, flags of its own, common keys."""

import re
import shutil
import textwrap
from collections.abc import Mapping, Sequence

import msgspec
from tyro._docstrings import get_field_docstring

SENTENCE = re.compile(r".+?[.:](?=\s|$)", re.DOTALL)
MAX_WIDTH = 110


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


def _columns(rows: Mapping[str, str]) -> str:
    indent = 4 + max(map(len, rows))
    width = max(min(shutil.get_terminal_size().columns, MAX_WIDTH), indent + 30)
    lines = []
    for name, text in rows.items():
        first, *others = textwrap.wrap(text, width - indent) or [""]
        lines += [f"  {name:<{indent - 2}}{first}", *(" " * indent + other for other in others)]
    return "\n".join(lines)
