"""Write moe_conformance/contract/assembled.pyi: what the chapters add to the contract, for type checkers.

At run time contract/assembled.py finds it; mypy and editors cannot. The file is made before mypy runs and when the
wheel is built, and is not stored. Only source text is read, so that torch need not be there: `python -m tools.stubs`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
STUB = Path("moe_conformance/contract/assembled.pyi")

_PARTS = {"ClaimsPart", "SessionPart"}


@dataclass(frozen=True)
class Surface:
    """What a surface.py defines."""

    chapter: str
    names: tuple[str, ...]  # public classes and types
    parts: frozenset[str]  # of `_PARTS`
    sections: dict[str, str]  # option of `Config`: class


def surfaces(root: Path) -> Iterator[Surface]:
    """Yield every surface.py, in the order of chapters."""
    for path in sorted(root.glob("moe_conformance/chapters/*/surface.py")):
        defined = [name for node in ast.parse(path.read_text("utf-8")).body for name in _defined(node)]
        names = tuple(name for name in defined if name not in _PARTS and name != "SECTIONS")
        yield Surface(path.parent.name, names, frozenset(_PARTS & {*defined}), _sections(path))


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef):
        return [] if node.name.startswith("_") else [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else []
    return [each.id for each in targets if isinstance(each, ast.Name) and not each.id.startswith("_")]


def _sections(path: Path) -> dict[str, str]:
    """Return the table `SECTIONS` of a file; empty if it has none.

    Raises:
        TypeError: it is no dictionary of strings to names of classes, written out.
    """
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and _defined(node) == ["SECTIONS"]:
            if not isinstance(node.value, ast.Dict):
                raise TypeError(f"{path}: SECTIONS is a dictionary, written out")
            pairs = zip(node.value.keys, node.value.values, strict=True)
            return {str(ast.literal_eval(key)): ast.unparse(value) for key, value in pairs if key is not None}
    return {}


def stub(root: Path) -> str:
    """Return the text of the file."""
    found = list(surfaces(root))
    lines = ["# Written by tools/stubs.py.", "from dataclasses import dataclass", ""]
    for each in found:
        module = f"moe_conformance.chapters.{each.chapter}.surface"
        lines += [f"from {module} import {name} as {name}" for name in each.names]
        lines += [f"from {module} import {part} as _{each.chapter}_{part}" for part in sorted(each.parts)]
    lines += ["", "@dataclass(frozen=True, kw_only=True)", "class Sections:"]
    lines += [f"    {option}: {kind} = ..." for each in found for option, kind in each.sections.items()]
    for part in sorted(_PARTS):
        bases = ", ".join(f"_{each.chapter}_{part}" for each in found if part in each.parts)
        lines += ["", *(["@dataclass(frozen=True)"] if part == "ClaimsPart" else []), f"class {part}({bases}): ..."]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Write the file into the checkout."""
    (ROOT / STUB).write_text(stub(ROOT), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
