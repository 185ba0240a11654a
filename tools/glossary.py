"""The glossary with the options of all chapters: docs/glossary.md, and the options.md of each chapter, in one page."""

from __future__ import annotations

from pathlib import Path

from moe_conformance.discovery import FOLDER, chapters

GLOSSARY = Path(__file__).parents[1] / "docs" / "glossary.md"
_PLACE = "| [options of chapters]"  # the row of the table in the stored page that theirs take the place of


def page() -> str:
    """Return the page."""
    lines = GLOSSARY.read_text("utf-8").splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(_PLACE))
    lines[at : at + 1] = [row for chapter in chapters() for row in rows(chapter)]
    return "\n".join(lines) + "\n"


def rows(chapter: str) -> list[str]:
    """Return the rows of a chapter's table, none if it has no section of `Config`."""
    path = FOLDER / chapter / "options.md"
    lines = path.read_text("utf-8").splitlines() if path.is_file() else []
    return [line for line in lines if line.startswith("| `")]
