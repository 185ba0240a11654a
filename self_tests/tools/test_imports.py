"""What oracles import, by name: import-linter can forbid names, not all names but a few."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {"torch", "numpy"}


def imported(source: str) -> Iterator[str]:
    """Yield the full names that a source text imports, wherever it does; relative ones begin with a dot."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def foreign(source: str) -> list[str]:
    """Return the imports that are neither of oracles nor of torch, numpy or the standard library."""
    return [
        name
        for name in imported(source)
        if not name.startswith((".", "moe_conformance.reference"))
        and name.partition(".")[0] not in ALLOWED | sys.stdlib_module_names
    ]


class TestReference:
    def test_oracles_import_torch_and_numpy_only(self) -> None:
        """Beside the standard library and other oracles."""
        files = sorted((ROOT / "reference").rglob("*.py"))
        assert len(files) > 50
        assert [] == [(str(path), name) for path in files for name in foreign(path.read_text("utf-8"))]

    @pytest.mark.parametrize(
        "source",
        ["import scipy", "from moe_conformance.contract import Config", "def f():\n    import hypothesis.strategies"],
    )
    def test_another_import_is_found(self, source: str) -> None:
        """Of another package, of another part of this one, and within a function."""
        assert 1 == len(foreign(source))
