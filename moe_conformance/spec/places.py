"""Where a requirement is held: its checks, the oracles that decide it, native's lines, planted bugs, findings, waivers.

All of it is read from the source text, so that nothing is imported. An oracle says `Decides: ID, ID.` in its docstring,
or is a row of a table that begins with the id; native says `Implements: ID` where it has the lines that keep the rule.
Which oracles do decide what they say is stored (`deciding`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path

from moe_conformance.spec import deciding
from moe_conformance.spec.source_graph import SourceGraph, Symbol, row_of

ROOT = Path(__file__).parents[2]  # the folder in which moe_conformance lies

_ID = re.compile(r"\b[A-Z]+-\d\d\b")
_CHECKS, _ORACLES = "moe_conformance/distributed_tests", "moe_conformance/reference"
_NATIVE, _PLANTS = "moe_conformance/backends/native", ("self_tests/chapters", "self_tests/planted_bugs")
_DECIDING = "moe_conformance/spec/deciding.toml"
_UNCONFIRMED = "moe_conformance/spec/unconfirmed.toml"


@dataclass(frozen=True)
class Place:
    """A line of a file, and what stands there."""

    path: Path  # relative to the root
    line: int
    name: str
    text: str = ""

    def __str__(self) -> str:
        """`path:line name`."""
        return f"{self.path}:{self.line} {self.name}"


class Places:
    """What the source text says of every requirement; folders that are not there (in a wheel) hold nothing."""

    def __init__(self, root: Path = ROOT) -> None:
        """Read nothing yet."""
        self.root = root

    def checks(self, id: str) -> tuple[Place, ...]:
        """Return the checks that cite a requirement: rows, and functions under `@requirement(id)`."""
        return tuple(self._place(symbol, _first_line(symbol.docstring)) for symbol in self._checks.get(id, ()))

    def oracles(self, id: str) -> tuple[Place, ...]:
        """Return the oracles that decide a requirement: their result enters a comparison of one of its checks."""
        return tuple(self.claims(id)[name] for name in sorted(self.claims(id).keys() & self.decided.get(id, {}).keys()))

    def claims(self, id: str) -> Mapping[str, Place]:
        """Return the oracles that say that they decide a requirement, by their names in `deciding`."""
        return self.claimed.get(id, {})

    def native(self, id: str) -> tuple[Place, ...]:
        """Return the lines of native that say that they implement a requirement."""
        return self.implemented.get(id, ())

    def plants(self, id: str) -> tuple[Place, ...]:
        """Return the planted bugs that expect a requirement to fail."""
        pattern = rf'Expectation\(\s*(?:\*\()?"{id}"'
        return _unquoted(place for folder in _PLANTS for place in self._lines(folder, "*.py", pattern))

    def findings(self, id: str) -> tuple[Place, ...]:
        """Return where the findings in real libraries name a requirement."""
        return _unquoted(self._lines("docs/findings", "*.md", rf"\b{id}\b"))

    def waivers(self, id: str) -> tuple[Place, ...]:
        """Return where waivers name a requirement."""
        return _unquoted(self._lines("waivers", "*.toml", rf"\b{id}\b"))

    @cached_property
    def checked(self) -> frozenset[str]:
        """All requirements that have a check."""
        return frozenset(self._checks)

    @cached_property
    def claimed(self) -> Mapping[str, Mapping[str, Place]]:
        """By requirement and name: all oracles that say that they decide it, whether they do or not."""
        found: dict[str, dict[str, Place]] = {}
        for symbol in SourceGraph(self.root, (_ORACLES,)).symbols.values():
            module = symbol.module.removeprefix(f"{_ORACLES.replace('/', '.')}.")
            for id in decided(symbol.docstring):
                found.setdefault(id, {})[f"{module}:{symbol.name}"] = self._place(symbol)
            for id, line in _rows(symbol.node):
                place = replace(self._place(symbol), line=line, name=f"{symbol.name}[{id}]")
                found.setdefault(id, {}).setdefault(f"{module}:{place.name}", place)
        return found

    @cached_property
    def decided(self) -> Mapping[str, Mapping[str, str]]:
        """By requirement and oracle: the case on which the oracle was seen to decide."""
        return deciding.read(self.root / _DECIDING)

    @cached_property
    def unconfirmed(self) -> Mapping[str, Sequence[str]]:
        """By requirement: the oracles that claim to decide it, and were not seen to."""
        return deciding.unconfirmed(self.root / _UNCONFIRMED)

    @cached_property
    def implemented(self) -> dict[str, tuple[Place, ...]]:
        """By requirement: all lines of native that say that they implement it."""
        found: dict[str, list[Place]] = {}
        for place in self._lines(_NATIVE, "*.py", r"Implements:[^.\"]*"):
            for id in _ID.findall(place.text):
                found.setdefault(id, []).append(replace(place, text=""))
        return {id: tuple(places) for id, places in found.items()}

    @cached_property
    def _checks(self) -> dict[str, tuple[Symbol, ...]]:
        found: dict[str, list[Symbol]] = {}
        for symbol in SourceGraph(self.root, (_CHECKS,)).symbols.values():  # a few files: asked for by every run
            for id in _required(symbol):
                found.setdefault(id, []).append(symbol)
        return {id: tuple(symbols) for id, symbols in found.items()}

    def _place(self, symbol: Symbol, text: str = "") -> Place:
        return Place(symbol.path.resolve().relative_to(self.root.resolve()), symbol.node.lineno, symbol.name, text)

    def _lines(self, folder: str, names: str, pattern: str) -> Iterator[Place]:
        for path in sorted((self.root / folder).rglob(names)):
            text = _text(path)
            for match in re.finditer(pattern, text):
                line = text.count("\n", 0, match.start()) + 1
                owner = _owner(path, line) if path.suffix == ".py" else ""
                yield Place(path.relative_to(self.root), line, owner, match.group())


@cache
def checked() -> frozenset[str]:
    """Return the requirements that have a check."""
    return Places().checked


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _unquoted(places: Iterable[Place]) -> tuple[Place, ...]:
    return tuple(replace(each, text="") for each in places)


def decided(docstring: str) -> tuple[str, ...]:
    """Return the ids that a docstring says its function decides: those between `Decides:` and `Source:`."""
    said = re.search(r"Decides:(.*?)(?:Source|\n\s*\n|\Z)", docstring, re.DOTALL)
    return tuple(_ID.findall(said.group(1))) if said else ()


def _rows(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the ids with which rows of a table begin, and their lines: `TABLE = (Rule("RULE-06", ...), ...)`."""
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    for row in value.elts if isinstance(value, ast.Tuple) else ():
        first = row.args[0] if isinstance(row, ast.Call) and row.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and _ID.fullmatch(first.value):
            yield first.value, row.lineno


def _required(symbol: Symbol) -> Sequence[str]:
    """Return the ids of a check: the first argument of its row, or all arguments of its decorators."""
    if isinstance(symbol.node, ast.FunctionDef):
        marks = [each for each in symbol.node.decorator_list if isinstance(each, ast.Call)]
        marks = [each for each in marks if isinstance(each.func, ast.Name) and each.func.id == "requirement"]
        given = [value for each in marks for value in each.args]
    elif (row := row_of(symbol.node)) is not None:
        first = row.args[0]
        given = first.elts if isinstance(first, ast.Tuple) else [first]
    else:
        return ()
    return [str(value.value) for value in given if isinstance(value, ast.Constant)]


def _owner(path: Path, line: int) -> str:
    """Return the innermost class or function at a line of a Python file, its decorators included; "" if none is."""
    around = [(start, name) for start, end, name in _extents(path) if start <= line <= end]
    return max(around)[1] if around else ""


@cache
def _extents(path: Path) -> tuple[tuple[int, int, str], ...]:
    """Return the first and last line of every class and function of a file, and its name."""
    found = []
    for node in ast.walk(ast.parse(_text(path))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            start = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            found.append((start, node.end_lineno or start, node.name))
    return tuple(found)


def _first_line(docstring: str) -> str:
    return docstring.partition("\n")[0]
