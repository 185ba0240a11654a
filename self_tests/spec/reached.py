"""Which oracles code outside of reference/ names, by the imports and names of the source text: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from moe_conformance.spec.places import ROOT

_ORACLES, _REFERENCE = "moe_conformance/reference", "moe_conformance.reference"
_CHECKS = ("moe_conformance", "moe_conformance/distributed_tests")  # what a check runs, without links to other folders
_OTHERS = (_ORACLES, "moe_conformance/goldens")  # of a wheel, where they are no links


@dataclass(frozen=True)
class Oracles:
    """The definitions of reference/, by their names in `deciding`: `exchange.deliveries:deliveries`."""

    root: Path = ROOT

    @cached_property
    def uses(self) -> Mapping[str, frozenset[str]]:
        """By definition: those that it names."""
        found: dict[str, set[str]] = {}
        for module, tree in self._trees.items():
            imported = dict(_imports(tree))
            for node in tree.body:
                for name in _defined(node):
                    own = {f"{module}:{each}" for each in _loaded(node)}
                    found.setdefault(f"{module}:{name}", set()).update(own, _named(node, imported))
        return {name: frozenset(each for each in names if each in found) for name, names in found.items()}

    @cached_property
    def public(self) -> frozenset[str]:
        """All public functions and classes."""
        return frozenset(
            f"{module}:{node.name}"
            for module, tree in self._trees.items()
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
        )

    @cached_property
    def checked(self) -> frozenset[str]:
        """Those that code outside of reference/ and the goldens names, and those behind them.

        Whether a check calls that code is held by `test_no_judge_is_idle`.
        """
        named = set[str]()
        for path in (path for folder in _CHECKS for path in (self.root / folder).rglob("*.py")):
            if not path.relative_to(self.root).as_posix().startswith(_OTHERS):
                tree = ast.parse(path.read_text(encoding="utf-8"))
                named |= _named(tree, dict(_imports(tree)))
        return self.behind(named)

    def behind(self, names: Iterable[str]) -> frozenset[str]:
        """Return these definitions and all that they lead to."""
        found, left = set[str](), [name for name in names if name in self.uses]
        while left:
            if (name := left.pop()) not in found:
                found.add(name)
                left += self.uses[name]
        return frozenset(found)

    @cached_property
    def _trees(self) -> Mapping[str, ast.Module]:
        folder = self.root / _ORACLES
        return {
            ".".join(path.relative_to(folder).with_suffix("").parts): ast.parse(path.read_text(encoding="utf-8"))
            for path in sorted(folder.rglob("*.py"))
        }


def _imports(tree: ast.Module) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield every name that a file imports from reference/, with the module and the name there."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(_REFERENCE):
            module = (node.module or "").removeprefix(_REFERENCE).removeprefix(".")
            for each in node.names:
                yield each.asname or each.name, (module, each.name)


def _named(tree: ast.AST, imported: Mapping[str, tuple[str, str]]) -> set[str]:
    """Return the definitions that a text names, as `function` or `module.function`; many of them are none."""
    found = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in imported:
            found.add(":".join(imported[node.id]))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in imported:
            module = ".".join(part for part in imported[node.value.id] if part)
            found.add(f"{module}:{node.attr}")
    return found


def _loaded(node: ast.stmt) -> set[str]:
    """Return the names that a definition reads and does not give to values of its own."""
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    own = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    own |= {each.id for each in names if isinstance(each.ctx, ast.Store)}
    return {each.id for each in names} - own


def _defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
