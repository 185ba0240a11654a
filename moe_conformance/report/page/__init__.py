"""Writes report.html: a report as one page, which needs no network and fits any width.

All text of backends and ranks is escaped by Jinja, or is JSON that the page's script inserts as text.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import jinja2
from markupsafe import Markup

from moe_conformance.report.comparison import Comparison
from moe_conformance.report.page.content import content
from moe_conformance.report.result import Report

NAME = "report.html"


def render(report: Report, comparison: Comparison | None = None) -> str:
    """Return the page of a report; with a comparison to an earlier run, if there is one."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader(__name__, "."), autoescape=True, undefined=jinja2.StrictUndefined
    )
    shown = content(report)
    changes: dict[str, list[str]] = {}
    for title, of_title in ({} if comparison is None else vars(comparison)).items():
        if of_title:
            changes[title.replace("_", " ")] = [str(change) for change in of_title]
    return environment.get_template("page.html.jinja").render(
        page=shown,
        stories=_json(shown.stories),
        compared=comparison is not None,
        changes=changes,
    )


def write(folder: Path, report: Report, comparison: Comparison | None = None) -> Path:
    """Write the page into a folder atomically, and return its path."""
    path, draft = folder / NAME, folder / f".{NAME}-{os.getpid()}"
    draft.write_text(render(report, comparison), encoding="utf-8")
    draft.replace(path)
    return path


def _json(value: object) -> Markup:
    """Return JSON for a script element: `<`, `>` and `&` are escaped, so that it cannot end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for sign, escaped in {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}.items():
        text = text.replace(sign, escaped)
    return Markup(text)
