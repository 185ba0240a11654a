"""Finds the places of a requirement: checks, oracles that decide it, lines of native, planted bugs, findings, waivers.

All are read from the source text, so that nothing is imported. An oracle has `Decides: ID, ID.` in its docstring, or is
a row of a table that begins with the id; native has `Implements: ID` at the lines that implement the rule. The oracles
that were measured to decide what they claim are stored (`deciding`).
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
# A heading of a finding, and the requirements of the checks that detected it.
_DETECTED = rf"^## [A-Z]+-\d+ [^\n]*\n+Detected by {_ID.pattern}(?:(?:, and |, | and ){_ID.pattern})*"
_CHECKS, _ORACLES = "moe_conformance/distributed_tests", "moe_conformance/reference"
_NATIVE, _PLANTS = "moe_conformance/backends/native", ("self_tests/chapters", "self_tests/planted_bugs")
_DECIDING = "moe_conformance/spec/deciding.toml"


@dataclass(frozen=True)
class Place:
    """A line of a file, with the name and text at it."""

    path: Path  # relative to the root
    line: int
    name: str
    text: str = ""

    def __str__(self) -> str:
        """`path:line name`."""
        return f"{self.path}:{self.line} {self.name}"


class Places:
    """The places of every requirement in the source text; missing folders, as in a wheel, have none."""

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
        """Return the oracles that claim to decide a requirement, by their names in `deciding`."""
        return self.claimed.get(id, {})

    def native(self, id: str) -> tuple[Place, ...]:
        """Return the lines of native that have `Implements:` with a requirement."""
        return self.implemented.get(id, ())

    def plants(self, id: str) -> tuple[Place, ...]:
        """Return the planted bugs that expect a requirement to fail."""
        pattern = rf'Expectation\(\s*(?:\*\()?"{id}"'
        return _unquoted(place for folder in _PLANTS for place in self._lines(folder, "*.py", pattern))

    def findings(self, id: str) -> tuple[Place, ...]:
        """Return the lines of findings in real libraries that name a requirement."""
        return _unquoted(self._lines("docs/findings", "*.md", rf"\b{id}\b"))

    def detected(self, id: str) -> tuple[Place, ...]:
        """Return the findings that a check of a requirement detected, `name` their ids: `Detected by EXCH-01 and …`."""
        return self._detected.get(id, ())

    def waivers(self, id: str) -> tuple[Place, ...]:
        """Return the lines of waivers that name a requirement."""
        return _unquoted(self._lines("waivers", "*.toml", rf"\b{id}\b"))

    @cached_property
    def checked(self) -> frozenset[str]:
        """All requirements that have a check."""
        return frozenset(self._checks)

    @cached_property
    def claimed(self) -> Mapping[str, Mapping[str, Place]]:
        """By requirement and name: all oracles that claim to decide it, whether they do or not."""
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
        """By requirement and oracle: the stored case on which the oracle decides."""
        return deciding.read(self.root / _DECIDING)

    @cached_property
    def implemented(self) -> dict[str, tuple[Place, ...]]:
        """By requirement: all lines of native that have `Implements:` with it."""
        found: dict[str, list[Place]] = {}
        for place in self._lines(_NATIVE, "*.py", r"Implements:[^.\"]*"):
            for id in _ID.findall(place.text):
                found.setdefault(id, []).append(replace(place, text=""))
        return {id: tuple(places) for id, places in found.items()}

    @cached_property
    def _detected(self) -> dict[str, tuple[Place, ...]]:
        found: dict[str, list[Place]] = {}
        for place in self._lines("docs/findings", "*.md", _DETECTED):
            finding, _, by = place.text.partition("\n")
            for id in _ID.findall(by):
                found.setdefault(id, []).append(replace(place, name=finding.split()[1], text=""))
        return {id: tuple(places) for id, places in found.items()}

    @cached_property
    def _checks(self) -> dict[str, tuple[Symbol, ...]]:
        found: dict[str, list[Symbol]] = {}
        for symbol in SourceGraph(self.root, (_CHECKS,)).symbols.values():  # a few files: read by every run
            for id in _required(symbol):
                found.setdefault(id, []).append(symbol)
        return {id: tuple(symbols) for id, symbols in found.items()}

    def _place(self, symbol: Symbol, text: str = "") -> Place:
        return Place(symbol.path.resolve().relative_to(self.root.resolve()), symbol.node.lineno, symbol.name, text)

    def _lines(self, folder: str, names: str, pattern: str) -> Iterator[Place]:
        for path in sorted((self.root / folder).rglob(names)):
            text = _text(path)
            for match in re.finditer(pattern, text, re.MULTILINE):
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
    return tuple(replace(place, text="") for place in places)


def decided(docstring: str) -> tuple[str, ...]:
    """Return the ids that a docstring has between `Decides:` and `Source:`."""
    section = re.search(r"Decides:(.*?)(?:Source|\n\s*\n|\Z)", docstring, re.DOTALL)
    return tuple(_ID.findall(section.group(1))) if section else ()


def _rows(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the first ids of the rows of a table, and their lines: `TABLE = (Rule("RULE-06", ...), ...)`."""
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
    for row in value.elts if isinstance(value, ast.Tuple) else ():
        first = row.args[0] if isinstance(row, ast.Call) and row.args else None
        if isinstance(first, ast.Constant) and isinstance(first.value, str) and _ID.fullmatch(first.value):
            yield first.value, row.lineno


def _required(symbol: Symbol) -> Sequence[str]:
    """Return the ids of a check: the first argument of its row, or all arguments of its decorators."""
    if isinstance(symbol.node, ast.FunctionDef):
        marks = [mark for mark in symbol.node.decorator_list if isinstance(mark, ast.Call)]
        marks = [mark for mark in marks if isinstance(mark.func, ast.Name) and mark.func.id == "requirement"]
        given = [value for mark in marks for value in mark.args]
    elif (row := row_of(symbol.node)) is not None:
        first = row.args[0]
        given = first.elts if isinstance(first, ast.Tuple) else [first]
    else:
        return ()
    return [str(value.value) for value in given if isinstance(value, ast.Constant)]


def _owner(path: Path, line: int) -> str:
    """Return the innermost class or function (with decorators) at a line of a Python file; "" without one."""
    around = [(start, name) for start, end, name in _extents(path) if start <= line <= end]
    return max(around)[1] if around else ""


@cache
def _extents(path: Path) -> tuple[tuple[int, int, str], ...]:
    """Return the first and last line of every class and function of a file, and its name."""
    found = []
    for node in ast.walk(ast.parse(_text(path))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            found.append((start, node.end_lineno or start, node.name))
    return tuple(found)


def _first_line(docstring: str) -> str:
    return docstring.partition("\n")[0]
