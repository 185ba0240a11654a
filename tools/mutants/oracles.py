"""The oracles of both sides, by chapter, and which tests hold them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

_SECOND = "self_tests/chapters"  # of each chapter: second.py, or a folder of that name
_PAIRS = "test_pair*.py"
_REFERENCE = "moe_conformance.reference"

# Files that are no oracle of a pair.
_OTHERS = frozenset(
    {
        # Bounds of errors: self_tests/judging/test_bounds.py holds them.
        "reference/rounding/activations.py", "reference/rounding/errors.py", "reference/rounding/expert_magnitudes.py",
        "reference/rounding/magnitudes.py", "reference/rounding/routing_magnitudes.py",
        "reference/rounding/whole_layer_magnitudes.py",
        # What asks both oracles of a pair: another question that still fits is no error.
        "reference/config_rules/cases.py",
    }
)  # fmt: skip


class NotHeld(ValueError):
    """An oracle that belongs to no chapter, or that no test of a pair holds."""


@dataclass(frozen=True)
class Checkout:
    """A checkout of this project."""

    root: Path

    def oracles(self) -> list[str]:
        """Return all files of oracles, both sides, as paths below the root."""
        paths = [*(self.root / "reference").rglob("*.py"), *(self.root / _SECOND).glob("*/second.py")]
        paths += (self.root / _SECOND).glob("*/second/**/*.py")
        found = [path.relative_to(self.root).as_posix() for path in paths]
        return sorted(file for file in found if not file.endswith("/__init__.py") and file not in _OTHERS)

    def chapter(self, file: str) -> str:
        """Return the chapter of the spec whose name an oracle's file or folder bears.

        Raises:
            NotHeld: it bears none.
        """
        below = Path(file).relative_to(_SECOND if file.startswith(_SECOND) else "reference")
        chapter = below.parts[0].removesuffix(".py")
        if not (self.root / "moe_conformance" / "chapters" / chapter / "spec.toml").is_file():
            raise NotHeld(f"{file} bears the name of no chapter of the spec: put it into the folder of one")
        return chapter

    def tests(self, file: str) -> list[str]:
        """Return all tests of pairs that an oracle takes part in, directly or through others.

        Those of its chapter come first, then the nearest.

        Then come the examples in its own docstrings, if it has any: the file itself.

        Raises:
            NotHeld: there is no test of a pair, or no chapter.
        """
        chapter = self.chapter(file)
        stem = "test_pair" if Path(file).stem in (chapter, "second") else f"test_pair_{Path(file).stem}"
        distances = {}
        for path in (self.root / _SECOND).glob(f"*/{_PAIRS}"):
            distance = self._distance(path, self.root / file)
            if distance is not None:
                letters = zip(stem, path.stem, strict=False)
                alike = len(list(takewhile(lambda pair: pair[0] == pair[1], letters)))
                distances[path.relative_to(self.root).as_posix()] = (
                    path.parent.name != chapter, distance, -alike, path.name
                )  # fmt: skip
        if not distances:
            raise NotHeld(f"no {_SECOND}/*/{_PAIRS} imports {file}: write one, or name the file in {__file__}")
        examples = [_imported(file)] if ">>> " in (self.root / file).read_text() else []
        return sorted(distances, key=distances.__getitem__) + examples

    def _distance(self, start: Path, goal: Path) -> int | None:
        """Count the imports from one file to another; None if there is no way."""
        seen, ring, distance = {start}, {start}, 0
        while ring and goal not in ring:
            ring = {imported for path in ring for imported in _imports(path, self.root)} - seen
            seen |= ring
            distance += 1
        return distance if ring else None


def module(file: str) -> str:
    """Return the name under which an oracle is imported."""
    return _imported(file).removesuffix(".py").replace("/", ".")


def _imported(file: str) -> str:
    """Return the path by which an oracle is imported: those of reference/ by the link in the package."""
    return f"moe_conformance/{file}" if file.startswith("reference/") else file


@cache
def _imports(path: Path, root: Path) -> frozenset[Path]:
    """Return the files below the root that a file imports, packages left out."""
    return frozenset(_found(path, root))


def _found(path: Path, root: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse(path.read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            near = path.parent.relative_to(root).parts[: 1 - node.level or None] if node.level else ()
            package = ".".join([*near, *([node.module] if node.module else [])])
            names = [package, *(f"{package}.{alias.name}" for alias in node.names)]
        for name in names:
            below = name.removeprefix("moe_conformance.") if name.startswith(_REFERENCE) else name
            file = root / (below.replace(".", "/") + ".py")
            if file.is_file():
                yield file
