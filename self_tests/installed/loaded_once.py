"""Which files a process has loaded under more than one name; as a pytest plug-in it fails the run that has any."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

import pytest


def twice() -> Mapping[str, Sequence[str]]:
    """Return the names in sys.modules of each file of the suite that stands there more than once."""
    names: dict[str, list[str]] = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name != "__main__":
            names.setdefault(os.path.realpath(file), []).append(name)
    return {file: found for file, found in names.items() if len(found) > 1 and any(map(_is_ours, found))}


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == "moe_conformance"  # beside it lies whatever else is installed


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Say what was loaded, and end with status 99 if anything was loaded twice."""
    checks = sorted(name for name in sys.modules if "distributed_tests" in name)
    print(f"\nchecks loaded: {len(checks)}, of which under another name:", end=" ")
    print([name for name in checks if not name.startswith("moe_conformance.distributed_tests")])
    for file, names in twice().items():
        print(f"loaded twice: {file} as {names}")
    if twice():
        session.exitstatus = 99
