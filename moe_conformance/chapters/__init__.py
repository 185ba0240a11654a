"""Chapters of the spec: each folder holds what is of one chapter alone, and is found by itself.

spec.toml       the requirements
workloads       the pinned workloads that its checks read
judge           what its checks call
scenario        what ranks run for it, where that is not a step or a script of calls

None of them imports another; what two of them need is in `workloads`, `scenarios` and `judging`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).parent


@cache
def names() -> tuple[str, ...]:
    """Return the chapters in alphabetical order: the folders with a spec.toml."""
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/spec.toml")))


def modules(part: str) -> Iterator[ModuleType]:
    """Yield the module `part` of every chapter that has it, or all modules of its package, chapter by chapter."""
    for chapter in names():
        for found in pkgutil.walk_packages([str(FOLDER / chapter)], f"{__name__}.{chapter}."):
            if found.name.split(".")[3] == part:
                yield importlib.import_module(found.name)
