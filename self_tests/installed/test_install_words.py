"""What README and docs say of installing the suite: the checkout or a wheel built from it, since no index has it."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
WHEEL = f"moe_conformance-{PROJECT['version']}-py3-none-any.whl"
VALUED = {"--wheel-dir"}  # options of pip that take a value


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the page and the words behind `pip install` or `pip wheel` of every such command."""
    for page in PAGES:
        for found in re.finditer(r"\bpip (install|wheel) ([^\n`#&]+)", page.read_text("utf-8")):
            yield str(page.relative_to(ROOT)), shlex.split(found[2])


def installed(words: list[str]) -> list[str]:
    """Return what is installed: the words that are neither options nor their values."""
    valued = {place + 1 for place, word in enumerate(words) if word in VALUED}
    return [word for place, word in enumerate(words) if not word.startswith("-") and place not in valued]


def is_ours(name: str) -> bool:
    """Say whether a requirement is this project, under any spelling, with or without a version, or a file of it."""
    return re.sub(r"[-_.]+", "-", Path(name).name).lower().startswith("moe-conformance")


class TestWords:
    def test_no_page_installs_it_from_an_index(self) -> None:
        """What has the project's name is a wheel of the present version, by its file."""
        named = [(page, name) for page, words in commands() for name in installed(words) if is_ours(name)]
        assert named
        assert [] == [(page, name) for page, name in named if Path(name).name != WHEEL]

    def test_readme_says_both_ways(self) -> None:
        """The checkout by its folder, and a wheel that is built there and installed from where it was written."""
        ways = [words for page, words in commands() if page == "README.md"]
        assert ["."] in ways
        assert ["--no-deps", "--wheel-dir", "dist", "."] in ways
        assert [f"dist/{WHEEL}"] in ways

    @pytest.mark.parametrize(
        "name", ["moe-conformance", "moe_conformance==0.1.0", "moe.conformance[all]", "dist/moe_conformance-0.0-x.whl"]
    )
    def test_the_project_is_recognised(self, name: str) -> None:
        """Under each spelling that pip accepts, and as a file."""
        assert is_ours(name)
