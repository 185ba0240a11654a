"""Which functions a function may call, read from the source text: nothing is imported."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Definition = ast.FunctionDef | ast.ClassDef
_Defined = Definition | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Symbol:
    """A definition at the top of a module, or a method of a class there: `module:name` or `module:Class.method`."""

    module: str
    name: str
    path: Path
    node: _Defined

    @property
    def id(self) -> str:
        """`module:name`."""
        return f"{self.module}:{self.name}"

    @property
    def docstring(self) -> str:
        """Its docstring, "" without one."""
        return ast.get_docstring(self.node) or "" if isinstance(self.node, Definition) else ""


@dataclass(frozen=True)
class SourceGraph:
    """The definitions of some folders and what each of them names.

    A name is followed through the imports of its module. An attribute of anything but a module is taken for the method
    or property of that name of any class here: the graph may hold calls that never happen, and lacks none that are
    written as names or attributes.

    Args:
        root: The folder in which the top packages lie.
        folders: Those that are read, relative to it.
    """

    root: Path
    folders: tuple[str, ...]

    @cached_property
    def symbols(self) -> Mapping[str, Symbol]:
        """All definitions by id."""
        return {symbol.id: symbol for module in self._modules for symbol in _symbols(module, *self._modules[module])}

    def reached(self, start: str) -> Iterator[Symbol]:
        """Yield every definition that one may use, itself first, each once."""
        seen, waiting = {start}, [start]
        while waiting:
            symbol = self.symbols[waiting.pop()]
            yield symbol
            new = [each for each in self._used(symbol) if each not in seen]
            seen.update(new)
            waiting += new

    @cached_property
    def _modules(self) -> Mapping[str, tuple[Path, ast.Module]]:
        found: dict[str, tuple[Path, ast.Module]] = {}
        for folder in self.folders:
            for path in sorted((self.root / folder).rglob("*.py")):
                name = ".".join(path.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__")
                found[name] = (path, ast.parse(path.read_text(encoding="utf-8")))
        return found

    @cached_property
    def _imports(self) -> Mapping[str, Mapping[str, str]]:
        """By module: its names that are imported, and what they stand for, `module` or `module:name`."""
        return {module: dict(self._imported(module, tree)) for module, (_, tree) in self._modules.items()}

    def _imported(self, module: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
        package = module if self._modules[module][0].stem == "__init__" else module.rpartition(".")[0]
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (base, node.module or "")))
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield alias.asname or alias.name, inner if inner in self._modules else f"{source}:{alias.name}"

    @cached_property
    def _methods(self) -> Mapping[str, tuple[str, ...]]:
        """By name: the methods of all classes."""
        found: dict[str, list[str]] = defaultdict(list)
        for symbol in self.symbols.values():
            if "." in symbol.name:
                found[symbol.name.rpartition(".")[2]].append(symbol.id)
        return {name: tuple(ids) for name, ids in found.items()}

    def _used(self, symbol: Symbol) -> Iterator[str]:
        imports = self._imports[symbol.module]
        for node in _parts(symbol.node):
            if isinstance(node, ast.Name):
                yield from self._meant(symbol.module, imports.get(node.id, f"{symbol.module}:{node.id}"))
            elif isinstance(node, ast.Attribute):
                owner = imports.get(node.value.id) if isinstance(node.value, ast.Name) else None
                if owner is not None and owner in self._modules:
                    yield from self._meant(owner, f"{owner}:{node.attr}")
                elif not node.attr.startswith("__"):
                    yield from self._methods.get(node.attr, ())

    def _meant(self, module: str, target: str) -> Iterator[str]:
        """Yield the definition that a name stands for, through modules that only pass it on."""
        for _ in range(len(self._modules)):
            if target in self.symbols:
                yield target
                constructor = f"{target}.__init__"
                if constructor in self.symbols:
                    yield constructor
                return
            module, _, name = target.partition(":")
            passed_on = self._imports.get(module, {}).get(name)
            if passed_on is None or passed_on == target:
                return
            target = passed_on


def _symbols(module: str, path: Path, tree: ast.Module) -> Iterator[Symbol]:
    for node in tree.body:
        for name in _names(node):
            assert isinstance(node, _Defined)
            yield Symbol(module, name, path, node)
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield Symbol(module, f"{node.name}.{inner.name}", path, inner)


def _names(node: ast.stmt) -> Iterable[str]:
    if isinstance(node, Definition):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _parts(node: _Defined) -> Iterator[ast.AST]:
    """Yield what a definition is made of: of a class, its decorators, bases and fields, not the methods' bodies."""
    if not isinstance(node, ast.ClassDef):
        skipped = {id(part) for hint in _hints(node) for part in ast.walk(hint)}
        yield from (part for part in ast.walk(node) if id(part) not in skipped)
        return
    for part in (*node.bases, *node.decorator_list, *(each for each in node.body if isinstance(each, ast.Assign))):
        yield from ast.walk(part)


def _hints(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the annotations in a function: they name types, and call nothing."""
    for part in ast.walk(node):
        if isinstance(part, ast.arg | ast.AnnAssign) and part.annotation is not None:
            yield part.annotation
        if isinstance(part, ast.FunctionDef) and part.returns is not None:
            yield part.returns
