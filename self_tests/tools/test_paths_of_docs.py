"""The files and folders that README and docs name exist.

A name is the target of a link, a word in backticks, or a word in a block of code. A word counts as a path

* with a slash, if its first part is a folder at the top of the repository or, in backticks, beside the page, or if it
  ends in a slash or in the ending of a kind of file that the repository has;
* without a slash, in backticks, if it has such an ending: then some file of the repository has this name.

It is looked for from the top and from the page. `<chapter>`, NAME, `*` and `…` stand for any text; where they are all
of the first part, the folder is the reader's, and the word does not count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "self_tests/README.md", "goldens/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
ENDINGS = (".py", ".toml", ".md", ".safetensors")
# Packages of which a page names a file: those with a page of findings of their name, and others.
OTHERS = {"megatron", "torchao"}
ELSEWHERE = OTHERS | {page.stem for page in (ROOT / "docs" / "findings").glob("*.md")}

_LINK = re.compile(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)")
_CODE = re.compile(r"`([^`\n]+)`")
_BLOCK = re.compile(r"^```(?:.|\n)*?^```|(?:^    .*\n)+", re.MULTILINE)
_PATH = re.compile(r"[\w.<>*…/-]+")
_ANY = re.compile(r"<[^>]*>|…|\*+|\b[A-Z_]+\b(?!\.md)")


def missing(page: Path, text: str) -> list[str]:
    """Return the names in the text of a page that nothing in the repository has."""
    prose, blocks = _BLOCK.sub("", text), _BLOCK.findall(text)
    dead = [target for target in _LINK.findall(prose) if not (page.parent / target).exists()]
    quoted = [path for code in _CODE.findall(prose) for path in _paths(code) if counts(path, page)]
    typed = [path for block in blocks for path in _paths(block) if _at_top(path)]
    return dead + [path for path in (*quoted, *typed) if not exists(path, page)]


def counts(path: str, page: Path) -> bool:
    """Say whether a word in backticks is meant as a path of this repository."""
    first, slash, _ = path.partition("/")
    if not slash:
        return path.endswith(ENDINGS) and path not in ENDINGS
    if first in ELSEWHERE or not _ANY.sub("", first):
        return False
    return path.endswith(("/", *ENDINGS)) or _at_top(path) or (page.parent / first).is_dir()


def exists(path: str, page: Path) -> bool:
    """Say whether a file or folder has this path, from the top or from the page; without a slash, this name."""
    wanted = _ANY.sub("*", path).rstrip("/")
    if "/" not in path:
        return any(fnmatchcase(name, wanted) for name in _names())
    return any(next(folder.glob(wanted), None) is not None for folder in (ROOT, page.parent))


def _paths(text: str) -> Iterator[str]:
    """Yield the words that have the form of a path, without the line or the test that is named behind it."""
    for word in text.split():
        path = word.strip("`'\"()[],;").partition(":")[0]
        if _PATH.fullmatch(path):
            yield path


def _at_top(path: str) -> bool:
    """Say whether the first part of a path of several is a folder at the top."""
    first, slash, _ = path.partition("/")
    return bool(slash and first and not first.startswith(".") and (ROOT / first).is_dir())


@cache
def _names() -> frozenset[str]:
    """Return the names of all files of the repository."""
    tops = [top for top in ROOT.iterdir() if not top.name.startswith(".")]
    inside = (path for top in tops if top.is_dir() for path in top.rglob("*"))
    return frozenset(path.name for path in (*tops, *inside) if path.is_file())


class TestPages:
    @pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
    def test_what_a_page_names_exists(self, page: Path) -> None:
        """Every link, and every path in backticks or in a block of code, leads to a file or folder."""
        assert [] == missing(page, page.read_text("utf-8"))

    def test_names_are_found(self) -> None:
        """In all pages together there are many, which lead to files of every kind and to folders."""
        found = {
            path
            for page in PAGES
            for code in _CODE.findall(_BLOCK.sub("", page.read_text("utf-8")))
            for path in _paths(code)
            if counts(path, page)
        }
        assert len(found) > 60
        assert set() == {"/", ".py", ".toml", ".md"} - {
            ending for ending in ("/", *ENDINGS) for path in found if path.endswith(ending)
        }

    def test_exceptions_are_needed(self) -> None:
        """Each package that is listed is named on some page, and there is no folder of the name of one here."""
        text = " ".join(page.read_text("utf-8") for page in PAGES)
        assert [] == [name for name in OTHERS if f"`{name}/" not in text]
        assert [] == [name for name in ELSEWHERE if (ROOT / name).exists()]


class TestMissing:
    PAGE = ROOT / "self_tests" / "README.md"

    @pytest.mark.parametrize(
        "text",
        [
            "[a link](../tox.ini#anchor) and [an address](https://example.org/a.md)",
            "`tox.ini`, `moe_conformance/`, `engine/test_*.py`, `self_tests/engine`",
            "`chapters/<chapter>/test_pair.py`, `self_tests/engine/test_engine.py::TestRun`, `tools/site.py:12`",
            "`moe-conformance explain`, `a/b`, `x / y`, `megatron/core/transformer`, `DIR/reproduce/<requirement>.py`",
            "    python -m pytest self_tests/engine nowhere/else.py\n",
        ],
    )
    def test_what_exists_or_is_no_path_passes(self, text: str) -> None:
        """From the top, from the page, by name alone, with placeholders; other words do not count."""
        assert [] == missing(self.PAGE, text)

    @pytest.mark.parametrize(
        ("text", "name"),
        [
            ("[a link](engine/test_moved.py)", "engine/test_moved.py"),
            ("`test_moved.py`", "test_moved.py"),
            ("`pairs/`", "pairs/"),
            ("`pairs/test_<chapter>.py`", "pairs/test_<chapter>.py"),
            ("`engine/moved`", "engine/moved"),
            ("`python -m pytest self_tests/moved`", "self_tests/moved"),
            ("```\npytest self_tests/moved\n```", "self_tests/moved"),
            ("    pytest self_tests/moved.py::TestRun\n", "self_tests/moved.py"),
            ("    pytest self_tests\n\nand `self_tests/moved.py`", "self_tests/moved.py"),
        ],
    )
    def test_what_does_not_exist_is_found(self, text: str, name: str) -> None:
        """As a link, in backticks, in a fenced and in an indented block."""
        assert [name] == missing(self.PAGE, text)
