"""A report to a library's maintainers says what the finding's page, table and script say, in sections of one order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from moe_conformance import spec
from self_tests.backends.test_findings import FINDINGS, LIBRARIES, Library

UPSTREAM = FINDINGS / "upstream"
REPORTS = sorted(UPSTREAM.glob("*-*.md"))
SECTIONS = ["Affected versions", "Script", "Observed", "Expected", "Cause", "Suggested direction", "Requirement"]
SEVERE = ("wrong result", "hang")
LINES_OF_A_CORE = 25


def library_of(path: Path) -> Library:
    """Return the library whose ids begin as the report's."""
    return next(library for library in LIBRARIES if path.stem.startswith(f"{library.prefix}-"))


def section(path: Path, title: str) -> str:
    """Return the text of a report's section."""
    found = re.search(rf"^## {title}\n\n(.*?)(?=^## |\Z)", path.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None, f"{path.name} has no section {title}"
    return found[1]


def block(path: Path, title: str) -> list[str]:
    """Return the lines of the only block of code in a section."""
    blocks: list[str] = re.findall(r"^```(?:python)?\n(.*?)^```$", section(path, title), re.MULTILINE | re.DOTALL)
    (found,) = blocks
    return found.splitlines()


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
class TestReports:
    def test_it_has_the_sections_in_their_order(self, path: Path) -> None:
        """Its title begins with the id, and each section stands once."""
        text = path.read_text()
        assert text.startswith(f"# {path.stem}: ")
        assert re.findall(r"^## (.+)$", text, re.MULTILINE) == SECTIONS

    def test_it_is_of_a_bug_with_a_severe_effect(self, path: Path) -> None:
        """The table of its library's page has the id as a bug, with a wrong result or a hang."""
        ((_, label, effect),) = [row for row in library_of(path).rows if row[0] == path.stem]
        assert (label, effect in SEVERE) == ("bug", True)

    def test_it_says_what_the_script_prints(self, path: Path) -> None:
        """What is observed and expected are the lines of the page that the script is held to."""
        printed = library_of(path).printed(path.stem)[0].splitlines()
        assert [*block(path, "Observed"), *block(path, "Expected")] == printed

    def test_it_quotes_the_script(self, path: Path) -> None:
        """The core is short, and made of lines of the script."""
        lines = {line.strip() for line in (FINDINGS / f"{path.stem}.py").read_text().splitlines()}
        core = block(path, "Script")
        assert len(core) <= LINES_OF_A_CORE
        assert {line.strip() for line in core} <= lines | {"..."}

    def test_it_names_versions_a_cause_and_requirements(self, path: Path) -> None:
        """A row for each version, a file with a line, and requirements as they are in the spec."""
        assert len(re.findall(r"^\| .* \| shows it \|$", section(path, "Affected versions"), re.MULTILINE)) >= 2
        assert re.search(r"`\S+\.py:\d+`", section(path, "Cause"))
        required = " ".join(section(path, "Requirement").split()).removeprefix("* ").split(" * ")
        ids = [each.partition(":")[0] for each in required]
        assert required == [f"{id}: {spec.load()[id].sentence}" for id in ids]


@pytest.mark.parametrize("path", [*REPORTS, UPSTREAM / "README.md"], ids=lambda path: path.stem)
def test_links_resolve(path: Path) -> None:
    """Every link leads to a file of the repository."""
    links = re.findall(r"\]\(([^)#\s]+\.\w+)\)", path.read_text())
    assert [link for link in links if not (UPSTREAM / link).is_file()] == []


def test_the_index_has_a_row_for_every_report() -> None:
    """With its id, library, title and requirements, as in the report itself."""
    rows = re.findall(
        r"^\| \[(\S+)\]\(\1\.md\) \| (\S+) \| (.+?) \| .+? \| (.+?) \|$",
        (UPSTREAM / "README.md").read_text(),
        re.MULTILINE,
    )
    found = {
        path.stem: (
            library_of(path).name,
            path.read_text().splitlines()[0].partition(": ")[2],
            ", ".join(re.findall(r"^\* (\S+):", section(path, "Requirement"), re.MULTILINE)),
        )
        for path in REPORTS
    }
    assert {id: tuple(rest) for id, *rest in rows} == found
