"""The checkout's own tests: how Hypothesis draws in self_tests, and which part of the slow tests is run.

The plug-in comes by its entry point, once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from moe_conformance.workloads.selection import shards

SELF_TESTS = Path(__file__).parent / "self_tests"

# A run that judges a backend brings its own profile (moe_conformance/plugin/drawing.py), which takes the place of this.
settings.register_profile("self", derandomize=True, database=None, deadline=None, print_blob=False)
settings.load_profile("self")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that takes a part of the slow tests."""
    parser.addoption("--part", metavar="I/N", default="1/1", help="run the I-th of N parts of the slow self_tests")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the slow tests that are in other parts."""
    try:
        part = shards.parse(config.getoption("--part"), "--part")
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    if part.count == 1:
        return
    from self_tests import parts

    others = [
        item
        for item in items
        if item.path.is_relative_to(SELF_TESTS)
        and not parts.holds(part, item.path.relative_to(SELF_TESTS), item.name, parametrized=hasattr(item, "callspec"))
    ]
    config.hook.pytest_deselected(items=others)
    gone = set(others)
    items[:] = [item for item in items if item not in gone]
