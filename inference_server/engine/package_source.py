"""Names and signatures of a package, read from its source without importing it.

    site-packages or a wheel ─▶ PackageSource.find("pkg.module", "Class.method") ─▶ Definition and parameters

It follows imports between modules of the package, and searches base classes for members. All branches of a
condition count, because the branch that a platform takes is unknown here.
"""

import ast
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

MAX_HOPS = 20
"""Maximum number of imports followed for one name. A cycle of imports would never end."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(msgspec.Struct, frozen=True):
    """Definition of a name."""

    parameters: tuple[str, ...] | None = None
    """Parameters in order, without `self`. For a class: those of its constructor. None: not callable, or
    unknown."""
    takes_any: bool = False
    """True if the callable accepts further parameters, as `**kwargs`."""


class Module(msgspec.Struct, frozen=True, eq=False):
    """A module's own names: definitions, assignments, and imports as (module, name)."""

    name: str
    names: dict[str, list[Any]]
    """Definitions by name, the last one first. Branches of a condition may define a name several times."""
    stars: tuple[str, ...]
    """Modules from which all names are imported."""


class PackageSource:
    """Source of one package, in the folder or the wheel that contains it."""

    def __init__(self, package: str, root: Path | zipfile.Path) -> None:
        self._package, self._root = package, root
        self._modules: dict[str, Module | None] = {}
        self._classes: dict[ast.ClassDef, dict[str, ast.AST]] = {}

    def find(self, module: str, name: str) -> Definition | None:
        """Return the definition of a name in a module, or None if there is none.

        A member of a class is "Class.member".
        """
        first, *members = name.split(".")
        module, node = self._resolve(module, first)
        for member in members:
            module, node = self._member(module, node, member) if isinstance(node, ast.ClassDef) else (module, None)
        return None if node is None else self._definition(module, node)

    def members(self, module: str, name: str) -> set[str]:
        """Return the methods and fields of a class, without those of its bases.

        The result is empty if there is no such class. The table's test uses it: an override of a vLLM name is
        a use of that name.
        """
        _, node = self._resolve(module, name)
        return set(self._names_of(node)) if isinstance(node, ast.ClassDef) else set()

    def _module(self, name: str) -> Module | None:
        if name not in self._modules:
            self._modules[name] = self._read(name)
        return self._modules[name]

    def _read(self, name: str) -> Module | None:
        if name.partition(".")[0] != self._package:
            return None
        parts = name.split(".")
        package = self._root.joinpath(*parts, "__init__.py")
        file = self._root.joinpath(*parts[:-1], f"{parts[-1]}.py")
        is_package = package.is_file()
        if not is_package and not file.is_file():
            return None
        # Bytes: ast reads the encoding, and a stray character must not cause a failure.
        tree = ast.parse((package if is_package else file).read_bytes())
        names: dict[str, list[Any]] = defaultdict(list)
        stars: list[str] = []
        for statement in _flat(tree.body):
            if isinstance(statement, ast.ImportFrom):
                source = _absolute(statement, name, is_package=is_package)
                for alias in statement.names:
                    if alias.name == "*":
                        stars.append(source)
                    else:
                        names[alias.asname or alias.name].insert(0, (source, alias.name))
            elif isinstance(statement, ast.Import):
                for alias in statement.names:
                    names[alias.asname or alias.name.partition(".")[0]].insert(0, (alias.name, ""))
            else:
                for defined, node in _defined_by(statement).items():
                    names[defined].insert(0, node)
        return Module(name, dict(names), tuple(stars))

    def _resolve(self, module: str, name: str, hops: int = 0) -> tuple[str, ast.AST | None]:
        """Return the module that defines a name, and its node, or None if it is missing."""
        found = self._module(module)
        if found is None or hops > MAX_HOPS:
            return module, None
        candidates = [*found.names.get(name, ()), *((source, name) for source in found.stars)]
        for candidate in candidates:
            if not isinstance(candidate, tuple):
                return module, candidate
            source, original = candidate
            where, node = self._resolve(source, original, hops + 1)
            if node is not None:
                return where, node
        # A module is a name too: an imported module, or a module of this package.
        modules = (
            ".".join(filter(None, candidate))
            for candidate in [*candidates, (module, name)]
            if isinstance(candidate, tuple)
        )
        return module, ast.Pass() if any(self._module(one) is not None for one in modules) else None

    def _member(self, module: str, node: ast.ClassDef, name: str) -> tuple[str, ast.AST | None]:
        """Look in a class, then in its bases in turn, close to Python's order."""
        for where, one in self._lineage(module, node):
            if (found := self._names_of(one).get(name)) is not None:
                return where, found
        return module, None

    def _names_of(self, node: ast.ClassDef) -> dict[str, ast.AST]:
        if node not in self._classes:
            self._classes[node] = _names_of_class(node)
        return self._classes[node]

    def _lineage(self, module: str, node: ast.ClassDef, depth: int = 0) -> Iterator[tuple[str, ast.ClassDef]]:
        """Yield a class and its bases that belong to the package."""
        yield module, node
        for base in node.bases if depth < MAX_HOPS else ():
            where, found = self._resolve_expression(module, base)
            if isinstance(found, ast.ClassDef) and found is not node:
                yield from self._lineage(where, found, depth + 1)

    def _resolve_expression(self, module: str, expression: ast.expr) -> tuple[str, ast.AST | None]:
        """Resolve a base class: `Name`, `module.Name` or `Name[T]`."""
        match expression:
            case ast.Name(id=name):
                return self._resolve(module, name)
            case ast.Subscript(value=value):
                return self._resolve_expression(module, value)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                found = self._module(module)
                for source in found.names.get(name, ()) if found is not None else ():
                    if isinstance(source, tuple):
                        return self._resolve(".".join(filter(None, source)), attribute)
        return module, None

    def _definition(self, module: str, node: ast.AST) -> Definition:
        if isinstance(node, Function):
            return _signature(node, is_method=_is_method(node))
        if not isinstance(node, ast.ClassDef):
            return Definition()
        lineage = list(self._lineage(module, node))
        for _, one in lineage:
            if isinstance(constructor := self._names_of(one).get("__init__"), Function):
                return _signature(constructor, is_method=True)
        # A dataclass, struct or named tuple: its fields are its parameters, those of its bases first.
        fields = dict.fromkeys(name for _, one in reversed(lineage) for name in _fields(one))
        return Definition(tuple(fields)) if fields else Definition()


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield all statements, also in nested blocks, but not in functions and classes."""
    for statement in body:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for part in ("body", "orelse", "finalbody"):
                yield from _flat(getattr(statement, part, ()))
            for handler in getattr(statement, "handlers", ()):
                yield from _flat(handler.body)


def _defined_by(statement: ast.stmt) -> dict[str, ast.stmt]:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return {name: statement}
        case ast.Assign(targets=targets):
            return {node.id: statement for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name: statement}
    return {}


def _names_of_class(node: ast.ClassDef) -> dict[str, ast.AST]:
    """Return the names in the class body, and those that methods set on `self`."""
    names: dict[str, ast.AST] = {}
    for statement in _flat(node.body):
        if isinstance(statement, Function):
            for inner in ast.walk(statement):
                match inner:
                    case ast.Attribute(value=ast.Name(id="self"), attr=attribute, ctx=ast.Store()):
                        names.setdefault(attribute, inner)
    for statement in _flat(node.body):
        names.update(_defined_by(statement))
    return names


def _fields(node: ast.ClassDef) -> list[str]:
    return [
        statement.target.id
        for statement in _flat(node.body)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and "ClassVar" not in ast.dump(statement.annotation)
    ]


def _signature(function: Function, *, is_method: bool) -> Definition:
    arguments = function.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)][int(is_method) :]
    named = [argument.arg for argument in arguments.kwonlyargs]
    return Definition((*positional, *named), takes_any=arguments.kwarg is not None)


def _is_method(function: Function) -> bool:
    """Return True if the first parameter is `self` or `cls`."""
    arguments = (*function.args.posonlyargs, *function.args.args)
    return bool(arguments) and arguments[0].arg in ("self", "cls")


def _absolute(statement: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    if statement.level == 0:
        return statement.module or ""
    parts = module.split(".")
    above = parts[: len(parts) - statement.level + int(is_package)]
    return ".".join([*above, *([statement.module] if statement.module else [])])
