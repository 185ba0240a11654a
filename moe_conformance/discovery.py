"""Finds what chapters of the spec bring with them, so that no list names them.

A chapter is a folder of `moe_conformance/chapters` with a spec.toml; docs/decisions/0017 says what lies in it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parent / "chapters"
CHECKS = "moe_conformance.distributed_tests"  # the package of the checks
_PACKAGE = "moe_conformance.chapters"


@cache
def chapters() -> tuple[str, ...]:
    """Return the chapters in alphabetical order."""
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/spec.toml")))


def modules(part: str) -> Iterator[ModuleType]:
    """Yield the module `part` of every chapter that has it, or all modules of that package, chapter by chapter."""
    for chapter in chapters():
        if (FOLDER / chapter / f"{part}.py").is_file():
            yield importlib.import_module(f"{_PACKAGE}.{chapter}.{part}")
        folder = FOLDER / chapter / part
        for found in pkgutil.walk_packages([str(folder)] if folder.is_dir() else [], f"{_PACKAGE}.{chapter}.{part}."):
            yield importlib.import_module(found.name)


def registered(part: str, table: str) -> dict[str, Any]:
    """Return what the tables of that name hold together, of all modules `part`.

    Raises:
        ValueError: two of them hold the same key.
    """
    found: dict[str, Any] = {}
    for module in modules(part):
        entries: Mapping[str, Any] = vars(module).get(table, {})
        if twice := found.keys() & entries.keys():
            raise ValueError(f"{module.__name__}.{table} has {', '.join(sorted(twice))}, which another chapter has too")
        found.update(entries)
    return found
