"""Which definitions a function may use, read from the source text: nothing is imported, and few files are read."""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
class _Module:
    """A file: its definitions by name, and what its imported names stand for, `module` or `module:name`."""

    symbols: Mapping[str, Symbol]
    imports: Mapping[str, str]


@dataclass(frozen=True)
class _Uses:
    """What a definition names: to use it, or in a type hint alone; and attributes, with their owner, "" if no name."""

    names: tuple[str, ...]
    hints: tuple[str, ...]
    attributes: tuple[tuple[str, str], ...]  # (name, attribute)


@dataclass(frozen=True)
class SourceGraph:
    """The definitions of some folders and what each of them names.

    A name is followed through the imports of its module. An attribute of anything but a module is taken for the method
    or property of that name of every class that is known by then: one that is used, or that a type hint names. So the
    graph may hold calls that never happen, and lacks those that are written neither as names nor as attributes, and
    those of methods whose class is named nowhere.

    Args:
        root: The folder in which the top packages lie.
        folders: Those that are read, relative to it.
    """

    root: Path
    folders: tuple[str, ...]

    @cached_property
    def symbols(self) -> Mapping[str, Symbol]:
        """All definitions by id: reads every file."""
        modules = [self._name(path) for folder in self.folders for path in sorted((self.root / folder).rglob("*.py"))]
        return {symbol.id: symbol for name in modules for symbol in self._module(name).symbols.values()}

    def reached(self, start: str) -> Iterator[Symbol]:
        """Yield every definition that one may use, itself first, each once."""
        yield from _Walk(self).symbols_from(start)

    # ---- what a walk asks for --------------------------------------------------------------------------------

    def used_by(self, symbol: Symbol) -> _Uses:
        """Return what a definition names."""
        if symbol.id not in self._uses:
            self._uses[symbol.id] = _named_in(symbol.node)
        return self._uses[symbol.id]

    def meant(self, module: str, name: str) -> Symbol | None:
        """Return the definition that a name stands for in a module, through modules that only pass it on."""
        for _ in range(_PASSED_ON):
            here = self._module(module)
            if name in here.symbols:
                return here.symbols[name]
            module, colon, name = here.imports.get(name, "").partition(":")
            if not colon or not self.is_module(module):
                return None
        return None

    def module_named(self, module: str, name: str) -> str | None:
        """Return the module that a name stands for in a module, None if it is none of those that are read."""
        target = self._module(module).imports.get(name, "")
        return target if target and ":" not in target else None

    def methods(self, kind: Symbol) -> Iterator[Symbol]:
        """Yield the methods of a class."""
        inside = f"{kind.name}."
        symbols = self._module(kind.module).symbols
        yield from (symbol for name, symbol in symbols.items() if name.startswith(inside))

    def is_module(self, name: str) -> bool:
        """Whether a module is among those that are read."""
        return self._path(name) is not None

    # ---- files -----------------------------------------------------------------------------------------------

    @cached_property
    def _modules(self) -> dict[str, _Module]:
        return {}

    @cached_property
    def _uses(self) -> dict[str, _Uses]:
        return {}

    def _module(self, name: str) -> _Module:
        if name not in self._modules:
            path = self._path(name)
            assert path is not None, name
            tree = ast.parse(path.read_text(encoding="utf-8"))
            package = name if path.stem == "__init__" else name.rpartition(".")[0]
            symbols = {symbol.name: symbol for symbol in _symbols(name, path, tree)}
            self._modules[name] = _Module(symbols, dict(self._imported(package, tree)))
        return self._modules[name]

    def _name(self, path: Path) -> str:
        return ".".join(path.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__")

    def _path(self, module: str) -> Path | None:
        place = Path(*module.split("."))
        if not any(place.is_relative_to(folder) for folder in self.folders):
            return None
        for path in (self.root / place.with_suffix(".py"), self.root / place / "__init__.py"):
            if path.is_file():
                return path
        return None

    def _imported(self, package: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            source = ".".join(filter(None, (base, node.module or "")))
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                yield alias.asname or alias.name, inner if self.is_module(inner) else f"{source}:{alias.name}"


_PASSED_ON = 8  # modules that a name may be passed on through


@dataclass
class _Walk:
    """One walk from a definition: what it has seen, and which methods wait for their class, or their name."""

    graph: SourceGraph
    seen: dict[str, Symbol] = field(default_factory=dict)
    waiting: list[Symbol] = field(default_factory=list)
    attributes: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)  # classes and aliases of types
    unnamed: dict[str, list[Symbol]] = field(default_factory=lambda: defaultdict(list))  # methods of known classes

    def symbols_from(self, start: str) -> Iterator[Symbol]:
        module, _, name = start.partition(":")
        first = self.graph.meant(module, name)
        assert first is not None, start
        self._use(first)
        while self.waiting:
            symbol = self.waiting.pop()
            yield symbol
            self._follow(symbol)

    def _use(self, symbol: Symbol) -> None:
        if symbol.id in self.seen:
            return
        self.seen[symbol.id] = symbol
        self.waiting.append(symbol)
        if isinstance(symbol.node, ast.ClassDef):
            self._know(symbol)
            for method in self.graph.methods(symbol):
                if method.name.endswith("__"):  # called without being named
                    self._use(method)

    def _follow(self, symbol: Symbol) -> None:
        uses, module = self.graph.used_by(symbol), symbol.module
        for name in uses.names:
            if (found := self.graph.meant(module, name)) is not None:
                self._use(found)
        self._hint(module, uses.hints)
        for owner, attribute in uses.attributes:
            inside = self.graph.module_named(module, owner) if owner else None
            if inside is None:
                self._name_attribute(attribute)
            elif (found := self.graph.meant(inside, attribute)) is not None:
                self._use(found)

    def _name_attribute(self, attribute: str) -> None:
        if attribute not in self.attributes:
            self.attributes.add(attribute)
            for method in self.unnamed.pop(attribute, ()):
                self._use(method)

    def _hint(self, module: str, names: Iterable[str]) -> None:
        for name in names:
            if (found := self.graph.meant(module, name)) is not None:
                self._know(found)

    def _know(self, symbol: Symbol) -> None:
        """Take a type for one of which there may be values: its methods are used where they are named."""
        if symbol.id in self.known or isinstance(symbol.node, ast.FunctionDef):
            return
        self.known.add(symbol.id)
        uses = self.graph.used_by(symbol)
        self._hint(symbol.module, (*uses.names, *uses.hints))  # bases and fields, or what an alias stands for
        if isinstance(symbol.node, ast.ClassDef):
            for method in self.graph.methods(symbol):
                attribute = method.name.rpartition(".")[2]
                if attribute in self.attributes:
                    self._use(method)
                else:
                    self.unnamed[attribute].append(method)


def _symbols(module: str, path: Path, tree: ast.Module) -> Iterator[Symbol]:
    for node in tree.body:
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


def _named_in(node: _Defined) -> _Uses:
    """Read what a definition names: of a class, its decorators, bases and fields, not the methods' bodies."""
    parts: list[ast.AST] = [node]
    if isinstance(node, ast.ClassDef):
        fields = [each for each in node.body if isinstance(each, ast.Assign | ast.AnnAssign)]
        parts = [*node.bases, *node.decorator_list, *fields]
    hinted = [hint for part in parts for hint in _hints(part)]
    hints = [each.id for hint in hinted for each in ast.walk(hint) if isinstance(each, ast.Name)]
    skipped = {id(each) for hint in hinted for each in ast.walk(hint)}
    inside = [each for part in parts for each in ast.walk(part) if id(each) not in skipped]
    names = [each.id for each in inside if isinstance(each, ast.Name)]
    attributes = [
        (each.value.id if isinstance(each.value, ast.Name) else "", each.attr)
        for each in inside
        if isinstance(each, ast.Attribute)
    ]
    return _Uses(tuple(dict.fromkeys(names)), tuple(dict.fromkeys(hints)), tuple(dict.fromkeys(attributes)))


def _hints(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the annotations in a definition: they name types, and call nothing."""
    for part in ast.walk(node):
        if isinstance(part, ast.arg | ast.AnnAssign) and part.annotation is not None:
            yield part.annotation
        if isinstance(part, ast.FunctionDef) and part.returns is not None:
            yield part.returns
