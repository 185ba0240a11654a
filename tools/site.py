"""What MkDocs is told beyond mkdocs.yml: pages from elsewhere, and links to source files.

The pages of the spec and of planted bugs are made here, from what they describe; no file holds them. The glossary is
put together of parts.

In the repository a page links to source files. A site has none of them: there the link becomes the file's path. A path
that does not exist is a warning, and so an error of `tox run -e docs`.
"""

from __future__ import annotations

import logging
import posixpath
import re
from functools import cache
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from tools import plant_pages, spec_pages

ROOT = Path(__file__).parents[1]
MOVED = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}  # at the top of the repository: on the site

_LINK = re.compile(r"\[([^\]\[]*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")
_log = logging.getLogger("mkdocs.site")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of a folder where the navigation names it, its README first."""
    assert config.nav is not None
    for entry in config.nav:
        for title, pages in entry.items():
            if isinstance(pages, str) and pages.endswith("/"):
                entry[title] = [pages + name for name in _pages(pages)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the top of the repository and those that are made here, in place of a stored part of one."""
    moved = {page: (ROOT / name).read_text("utf-8") for name, page in MOVED.items()}
    for page, content in {**moved, **made()}.items():
        if (stored := files.get_file_from_path(page)) is not None:
            files.remove(stored)
        files.append(File.generated(config, page, content=content))
    return files


@cache
def made() -> dict[str, str]:
    """Return the pages that are made here, by their path below docs."""
    spec = {f"spec/{name}": text for name, text in spec_pages.pages().items()}
    return {**spec, "glossary.md": spec_pages.glossary(), "planted_bugs.md": plant_pages.page()}


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links around: to pages at the top, and to source files, which become their path."""
    here = page.file.src_uri
    at_top = {page: name for name, page in MOVED.items()}
    folder = "" if here in at_top else posixpath.dirname(posixpath.join("docs", here))

    def link(found: re.Match[str]) -> str:
        words, target, anchor = found[1], found[2], found[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if not (ROOT / path).exists() and path.removeprefix("docs/") not in made():
            _log.warning("%s links to %s, which does not exist", here, path)
        if path in MOVED:
            return f"[{words}]({posixpath.relpath(MOVED[path], posixpath.dirname(here) or '.')}{anchor})"
        if not path.startswith("docs/"):
            return f"`{path}`" if words.strip("`/") in path else f"{words} (`{path}`)"
        if (ROOT / path).is_dir():
            path += f"/{_pages(path.removeprefix('docs/') + '/')[0]}"
        own = posixpath.relpath(path, posixpath.join("docs", posixpath.dirname(here)))
        return f"[{words}]({own}{anchor})"

    return _LINK.sub(link, markdown)


def _pages(folder: str) -> list[str]:
    """Return the names of the pages of a folder below docs, its README first."""
    stored = {path.name for path in (ROOT / "docs" / folder).glob("*.md")}
    ours = {page.removeprefix(folder) for page in made() if page.startswith(folder)}
    return sorted(stored | ours, key=lambda name: (name != "README.md", name))
