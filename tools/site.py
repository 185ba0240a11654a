"""What MkDocs is told beyond mkdocs.yml: pages from the top of the repository, and links to source files.

In the repository a page links to source files. A site has none of them: there the link becomes the file's path. A path
that does not exist is a warning, and so an error of `tox run -e docs`.
"""

from __future__ import annotations

import logging
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

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
                entry[title] = [pages + name for name in _pages(Path(config.docs_dir) / pages)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the top of the repository."""
    for name, page in MOVED.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turn links around: to pages at the top, and to source files, which become their path."""
    here = page.file.src_uri
    at_top = {page: name for name, page in MOVED.items()}
    folder = "" if here in at_top else posixpath.dirname(posixpath.join("docs", here))

    def link(found: re.Match[str]) -> str:
        words, target, anchor = found[1], found[2], found[3] or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if not (ROOT / path).exists():
            _log.warning("%s links to %s, which does not exist", here, path)
        if path in MOVED:
            return f"[{words}]({posixpath.relpath(MOVED[path], posixpath.dirname(here) or '.')}{anchor})"
        if not path.startswith("docs/"):
            return f"`{path}`" if words.strip("`/") in path else f"{words} (`{path}`)"
        if (ROOT / path).is_dir():
            path += f"/{_pages(ROOT / path)[0]}"
        own = posixpath.relpath(path, posixpath.join("docs", posixpath.dirname(here)))
        return f"[{words}]({own}{anchor})"

    return _LINK.sub(link, markdown)


def _pages(folder: Path) -> list[str]:
    """Return the names of the pages of a folder, its README first."""
    return sorted((path.name for path in folder.glob("*.md")), key=lambda name: (name != "README.md", name))
