"""Reads what a Python package defines from its source, without importing it.

Importing SGLang's worker modules takes seconds and has effects; the contract must be
checkable before either.
"""

import ast
import functools
import importlib.util
from pathlib import Path

import msgspec


class Definition(msgspec.Struct, frozen=True):
    """One top-level name, or one member of a class.

    Attributes:
        parameters: names in order without `self`, or None for what cannot be called.
        members: of a class, its methods, class variables and `self.x` attributes by name.
    """

    parameters: tuple[str, ...] | None = None
    members: dict[str, "Definition"] | None = None


@functools.cache
def module_definitions(root: Path, module: str) -> dict[str, Definition]:
    """Top-level names of a module below the package folder `root`, also those under `if` and `try`.

    Imported names count as defined: a re-export is part of a module's interface.

    Raises:
        FileNotFoundError: there is no such module.
    """
    path = root.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return _definitions(ast.parse(file.read_text()).body)


def package_root(package: str) -> Path:
    """Folder of an installed package, found without importing it.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"the package {package} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _definitions(body: list[ast.stmt]) -> dict[str, Definition]:
    found: dict[str, Definition] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found[node.name] = Definition(parameters=_parameters(node))
        elif isinstance(node, ast.ClassDef):
            found[node.name] = _class(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                found.setdefault((alias.asname or alias.name).split(".")[0], Definition())
        else:
            for name in _assigned(node):
                found.setdefault(name, Definition())
            for block in ("body", "orelse", "finalbody", "handlers"):
                for inner in getattr(node, block, []):
                    nested = inner.body if isinstance(inner, ast.ExceptHandler) else [inner]
                    for name, definition in _definitions(nested).items():
                        found.setdefault(name, definition)
    return found


def _class(node: ast.ClassDef) -> Definition:
    members = _definitions(node.body)
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                members.setdefault(name, Definition())
    constructor = members.get("__init__")
    return Definition(parameters=constructor.parameters if constructor else None, members=members)


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, ...]:
    arguments = node.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    if names and names[0] in ("self", "cls"):
        names = names[1:]
    return tuple(names)


def _assigned(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        return [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []
