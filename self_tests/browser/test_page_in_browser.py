"""report.html in headless Chromium: readable by axe-core's rules, no wider than a phone, usable by keyboard, quick."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from moe_conformance import spec
from moe_conformance.report import page, result
from moe_conformance.workloads.scripts import layout_names
from self_tests.plugin.plugin_runs import record

playwright = pytest.importorskip("playwright.sync_api", reason="`tox run -e browser` installs what this needs")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
AXE = os.environ.get("MOE_CONFORMANCE_AXE", "")
pytestmark = pytest.mark.skipif(
    not CHROMIUM or not Path(AXE).is_file(), reason="needs chromium, and axe-core by MOE_CONFORMANCE_AXE"
)
SIZES = ((1400, 900), (360, 740))


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page with a cell for every requirement on the layouts of the quick profile."""
    folder = tmp_path_factory.mktemp("page")
    verdicts = ("pass", "pass", "pass", "fail", "refused", "waived", "not adapted", "not kept", "crash")
    records = [
        record(each, verdicts[(row + column) % len(verdicts)], layout, message="wrong" * row)  # type: ignore[arg-type]
        for row, each in enumerate(spec.load())
        for column, layout in enumerate(layout_names()[:6])
    ]
    begun = datetime(2026, 1, 1, tzinfo=UTC)
    facts = result.Facts(
        "toy", {"torch": "2"}, "cpu", 4, "quick", "", "pytest", "again", begun, begun, 1, 16, stopped=""
    )
    result.write(folder, result.document(result.head(facts), tuple(spec.load().values()), records))
    return page.write(folder, result.read(folder)).as_uri()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, without a network."""
    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield started
        started.close()


@pytest.fixture(params=[(*size, scheme) for size in SIZES for scheme in ("light", "dark")], ids=str)
def shown(request: pytest.FixtureRequest, browser: Any, address: str) -> Iterator[Any]:
    """The page in a window of one size and colour scheme."""
    width, height, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
    tab = context.new_page()
    tab.goto(address)
    yield tab
    context.close()


class TestPage:
    def test_axe_finds_nothing_serious(self, shown: Any) -> None:
        """Neither in the page nor in the story of a cell."""
        shown.evaluate(Path(AXE).read_text("utf-8"))
        for opened in (False, True):
            if opened:
                shown.locator("#cells button").first.click()
            found = shown.evaluate("() => axe.run()")["violations"]
            assert [] == [each["id"] for each in found if each["impact"] in ("serious", "critical")]

    def test_nothing_is_wider_than_the_window(self, shown: Any) -> None:
        """The tables scroll in their own boxes."""
        assert shown.viewport_size["width"] == shown.evaluate("document.documentElement.scrollWidth")

    def test_a_cell_opens_by_keyboard_and_gives_the_focus_back(self, shown: Any) -> None:
        """Arrow keys move, Enter opens, Escape closes."""
        shown.locator("#cells button").first.focus()
        for key in ("ArrowDown", "ArrowRight", "Enter"):
            shown.keyboard.press(key)
        second, layout = list(spec.load())[1], layout_names()[1]
        assert f"{second} on {layout}" == shown.locator("#story-title").text_content()
        shown.keyboard.press("Escape")
        assert f"{second} {layout}" == shown.evaluate("document.activeElement.dataset.story")

    def test_filters_hide_rows(self, shown: Any) -> None:
        """By words and by verdict; the count is told."""
        shown.fill("#text", "EXCH-01")
        assert "EXCH-01" in shown.locator("#cells tbody tr:not(.hidden) th").first.text_content()
        assert 1 == shown.locator("#cells tbody tr:not(.hidden)").count()
        shown.fill("#text", "nosuchword")
        assert f"0 of {len(spec.load())} requirements" == shown.locator("#shown").text_content()
