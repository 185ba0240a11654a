"""The checkout's own tests: how Hypothesis draws in self_tests, and which planted bugs are tried.

The plug-in comes by its entry point, once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from moe_conformance.workloads.selection import shards

PLANTED_BUGS = Path(__file__).parent / "self_tests" / "planted_bugs"

# A run that judges a backend brings its own profile (moe_conformance/plugin/drawing.py), which takes the place of this.
settings.register_profile("self", derandomize=True, database=None, deadline=None, print_blob=False)
settings.load_profile("self")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that takes a part of the planted bugs."""
    parser.addoption("--planted-bugs", metavar="I/N", default="1/1", help="test the I-th of N parts of planted bugs")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of planted bugs that are in other parts."""
    try:
        part = shards.parse(config.getoption("--planted-bugs"), "--planted-bugs")
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    if part.count == 1:
        return
    from self_tests.planted_bugs import parts

    others = [
        item
        for item in items
        if item.path.parent == PLANTED_BUGS and hasattr(item, "callspec") and not parts.holds(part, item.name)
    ]
    config.hook.pytest_deselected(items=others)
    gone = set(others)
    items[:] = [item for item in items if item not in gone]
