"""MkDocs hook: writes the reference of all config keys into configuration.md.

The keys, types and defaults are those of the config structs, and the help texts those of `--help`.
"""

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec
from tyro._docstrings import get_field_docstring

from deploy.placement import DeployConfig
from inference_server.config import ServerConfig
from learner.config import LearnerConfig
from protocol.config import SharedConfig
from protocol.config_keys import MAY_CHANGE, PASSED_ON

PAGE = "configuration.md"
START, END = "<!-- config reference -->", "<!-- end of config reference -->"
HEADER = "| Key | Type | Default | Meaning |\n|---|---|---|---|"
RESUMABLE = "May change at a resume."
Struct = type[msgspec.Struct]


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri != PAGE:
        return markdown
    before, _, rest = markdown.partition(START)
    _, _, after = rest.partition(END)
    return before + reference() + after


def reference() -> str:
    """Return one table per section, shared keys first, in a block that style.css lays out."""
    tops = {"": SharedConfig, "server": ServerConfig, "learner": LearnerConfig, "deploy": DeployConfig}
    tables = [table(name, struct) for top, root in tops.items() for name, struct in sections(top, root)]
    return "\n\n".join(['<div class="reference" markdown>', *tables, "</div>"])


def sections(name: str, struct: Struct) -> Iterator[tuple[str, Struct]]:
    """Yield a section and all sections in it."""
    yield name, struct
    for field in msgspec.structs.fields(struct):
        if is_struct(field.type):
            yield from sections(f"{name}.{field.name}", field.type)
        elif (inner := struct_of_each(field.type)) is not None:
            yield f"{name}.{field.name}.NAME", inner


def table(name: str, struct: Struct) -> str:
    fields = [field for field in msgspec.structs.fields(struct) if not is_struct(field.type)]
    rows = [row(name, struct, field) for field in fields]
    return "\n".join([f"### {name or 'Shared keys'}", "", HEADER, *rows])


def row(section: str, struct: Struct, field: msgspec.structs.FieldInfo) -> str:
    text = " ".join((get_field_docstring(struct, field.name, ()) or "").split())
    if MAY_CHANGE in getattr(field.type, "__metadata__", ()):
        text = f"{text} {RESUMABLE}"
    key = f"{section}.{field.name}".lstrip(".")
    cells = [f"`{key}`", type_name(field.type), default(field), text]
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return "" if field.default_factory is dict else "by the machine"
    if field.default is msgspec.NODEFAULT:
        return "required"
    return "unset" if field.default is None else f"`{in_toml(field.default)}`"


def in_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"…"' if "\n" in value else f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(in_toml, value))}]"
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) and value < 1e-3 else str(value)


def type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return type_name(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{in_toml(value)}`" for value in arguments)
    if origin is tuple:
        return f"list of {type_name(arguments[0])}"
    if origin is dict or annotation is dict:
        return "table"
    if origin is Union or type(annotation).__name__ == "UnionType":
        return " or ".join(type_name(part) for part in arguments if part is not type(None))
    if origin is not None and getattr(origin, "__value__", None) is not None:
        return type_name(origin.__value__)
    return {str: "text", int: "integer", float: "number", bool: "true or false"}.get(annotation, str(annotation))


def is_struct(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, msgspec.Struct)


def struct_of_each(annotation: Any) -> Struct | None:
    """Return the struct of a table whose names the user gives, else None."""
    if PASSED_ON not in getattr(annotation, "__metadata__", ()):
        return None
    values = get_args(get_args(annotation)[0])[1:]
    return values[0] if values and is_struct(values[0]) else None
