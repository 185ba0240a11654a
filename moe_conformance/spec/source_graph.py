"""The definitions of some folders, read from the source text: nothing is imported."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Definition = ast.FunctionDef | ast.ClassDef
_Defined = Definition | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Symbol:
    """A definition at the top of a module, `module:name`, or a method or row of a class, `module:Class.name`."""

    module: str
    name: str
    path: Path
    node: _Defined
    below: str = ""  # of a row: its sentence, the string below it

    @property
    def id(self) -> str:
        """`module:name`."""
        return f"{self.module}:{self.name}"

    @property
    def docstring(self) -> str:
        """Its docstring, or the string below a row; "" without one."""
        return ast.get_docstring(self.node) or "" if isinstance(self.node, Definition) else self.below


@dataclass(frozen=True)
class SourceGraph:
    """The definitions of some folders.

    Args:
        root: The folder in which the top packages lie.
        folders: Those that are read, relative to it.
    """

    root: Path
    folders: tuple[str, ...]

    @cached_property
    def symbols(self) -> Mapping[str, Symbol]:
        """All definitions by id, folder by folder and file by file."""
        paths = [path for folder in self.folders for path in sorted((self.root / folder).rglob("*.py"))]
        return {symbol.id: symbol for path in paths for symbol in _symbols(self._name(path), path)}

    def _name(self, path: Path) -> str:
        return ".".join(path.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__")


def _symbols(module: str, path: Path) -> Iterator[Symbol]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for name in _names(node):
            assert isinstance(node, _Defined)
            yield Symbol(module, name, path, node)
        if isinstance(node, ast.ClassDef):
            for inner, below in zip(node.body, [*node.body[1:], None], strict=True):
                if isinstance(inner, ast.FunctionDef):
                    yield Symbol(module, f"{node.name}.{inner.name}", path, inner)
                elif isinstance(inner, ast.Assign) and row_of(inner) is not None:
                    for name in _names(inner):
                        yield Symbol(module, f"{node.name}.{name}", path, inner, _string(below))


def row_of(node: ast.stmt) -> ast.Call | None:
    """Return the call of `Row` that an assignment holds, None if it is something else."""
    value = node.value if isinstance(node, ast.Assign) else None
    is_row = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "Row"
    return value if isinstance(value, ast.Call) and is_row else None


def _string(node: ast.stmt | None) -> str:
    """Return the string that a statement is, "" if it is something else."""
    value = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else None
    return inspect.cleandoc(value) if isinstance(value, str) else ""


def _names(node: ast.stmt) -> Iterable[str]:
    if isinstance(node, Definition):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]
