"""report.html: what it shows, and that nothing a backend says becomes markup or script."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest

from moe_conformance import spec
from moe_conformance.report import page, result
from moe_conformance.report.comparison import compare
from moe_conformance.report.page.content import content
from moe_conformance.report.records import Record
from moe_conformance.report.standing import standings
from self_tests.plugin.plugin_runs import record

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
RECORDS = (
    record("EXCH-01", "fail", message=f"rank 1 {EVIL}", detail=f"Traceback {EVIL}", kind="WrongDelivery", blamed=(1,)),
    record("EXCH-01", "pass", "ep4", compared={"elements": 8, "pairs": 4, "ranks": [0]}, worst=0.25),
    record("EXCH-02", "refused", message="refused by the library: no"),
    record("EXPT-01", "pass", worst=0.75),
)


def report(folder: Path, records: tuple[Record, ...] = RECORDS) -> result.Report:
    """Write a report of these records and read it back."""
    begun = datetime(2026, 1, 1, tzinfo=UTC)
    facts = result.Facts(
        "toy:<b>", {"torch": "2"}, "cpu", 4, "quick", "", "pytest", "again", begun, begun, 1, 16, (f"worse {EVIL}",),
        interrupted=False, stopped="",
    )  # fmt: skip
    result.write(folder, result.document(result.head(facts), tuple(spec.load().values()), records))
    return result.read(folder)


class Elements(HTMLParser):
    """Counts the elements of a page and keeps what its scripts hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep an element, with its attributes."""
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        """Keep what stands in a script."""
        if self.found and self.found[-1][0] == "script":
            self.scripts.append(data)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of the records."""
    return page.render(report(tmp_path_factory.mktemp("page")))


class TestSafety:
    def test_what_a_backend_says_is_text(self, text: str) -> None:
        """There are the page's own two scripts, no image, and no attribute that runs anything."""
        elements = Elements(text)
        tags = [tag for tag, _ in elements.found]
        assert (2, 0, 0) == (tags.count("script"), tags.count("img"), tags.count("b>"))
        assert not [name for _, attributes in elements.found for name in attributes if name.startswith("on")]
        assert "toy:&lt;b&gt;" in text

    def test_stories_come_back_whole(self, text: str) -> None:
        """Signs of markup are escaped in the script, and are what they were when it is read."""
        stories = json.loads(Elements(text).scripts[0])
        assert f"rank 1 {EVIL}" == stories["EXCH-01 ep2"][0]["message"]
        assert f"Traceback {EVIL}" == stories["EXCH-01 ep2"][0]["detail"]

    def test_it_needs_no_network(self, text: str) -> None:
        """No element names anything outside of the page."""
        assert not re.findall(r"""(?:src|href|url|action)\s*[=(]\s*["']?(?!#)[a-z]+:""", text)
        assert "http" not in text


class TestContent:
    def test_rows_are_what_ran(self, tmp_path: Path) -> None:
        """Requirements in the spec's order, with a cell for each layout on which they ran."""
        shown = content(report(tmp_path))
        assert ("ep2", "ep4") == shown.layouts
        told = {row.id: [cell and (cell.verdict, cell.note) for cell in row.cells] for row in shown.rows}
        expected = {
            "EXCH-01": [("fail", "1"), ("pass", "")],
            "EXCH-02": [("refused", ""), None],
            "EXPT-01": [("pass", ""), None],
        }
        assert expected == told
        assert ("failed", (2, 3, len(spec.load()))) == (shown.verdict, shown.judged)

    def test_a_story_says_what_was_compared(self, tmp_path: Path) -> None:
        """And of a failure the ranks at fault and the command."""
        shown = content(report(tmp_path)).stories
        assert {"elements": 8, "pairs": 4} == shown["EXCH-01 ep4"][0]["compared"]
        failed = shown["EXCH-01 ep2"][0]
        assert ([1], RECORDS[0].reproduce("again")) == (failed["blamed"], failed["reproduce"])

    def test_the_badge_says_of_how_much(self, tmp_path: Path) -> None:
        """With what the adapter excludes by its own word below it; a page of all that was asked says neither."""
        limited = record("EXCH-02", "limit", message="limit, unproved: no", traits=("float16",))
        page_ = page.render(report(tmp_path, (*RECORDS, limited)))
        assert 'class="badge failed">failed, of 75 %</span>' in page_
        excluded = "by its own word not: float16; 1 checks under limits that nothing proves"
        assert f"Of what it is asked, 75 % was judged; {excluded}</p>" in page_
        assert 'class="badge failed">failed</span>' in page.render(report(tmp_path))

    def test_errors_lie_in_tenths_of_their_bounds(self, tmp_path: Path) -> None:
        """By dtype, with the largest."""
        (errors,) = content(report(tmp_path)).errors
        assert ("float32", (0, 0, 1, 0, 0, 0, 0, 1, 0, 0), 0.75) == (errors.dtype, errors.tenths, errors.worst)

    def test_a_comparison_is_shown(self, tmp_path: Path) -> None:
        """What fails now and passed before stands in the page."""
        found = report(tmp_path)
        before = [replace(each, verdict="pass") for each in found.records]
        shown = page.render(found, compare(standings(before), standings(found.records), whole=True))
        assert "new failures: 1" in shown
        assert "EXCH-01, alltoall on ep2: pass -&gt; fail" in shown
