"""A plug-in for pytest that writes down when the first item was judged, then ends the session."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

VARIABLE = "ENGINE_BENCHMARK_FIRST_VERDICT"  # the file to write to


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    """End the session with the first item that ran and passed."""
    report = yield
    if report.when == "call" and report.passed:
        Path(os.environ[VARIABLE]).write_text(str(time.monotonic()))
        item.session.shouldstop = "the first verdict is there"
    return report
