"""Every finding in a real library has a script that shows it, and its page states what the script prints.

The scripts of a library run in its tox environment; elsewhere only pages, waivers and the form of scripts are held. A
script may need certain versions of its library, or what only a checkout has: its docstring says "Needs:" and then
"transformers>=5.24", or the dotted name of a function or class. One that finds out itself exits with 77.
"""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import socket
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from packaging.requirements import Requirement

from moe_conformance.backends import registry
from moe_conformance.backends.library import Library as Adapted

ROOT = Path(__file__).parents[2]
FINDINGS = ROOT / "docs" / "findings"
EFFECTS = ("wrong result", "hang", "error", "precision", "not refused", "message", "none")
WITHOUT = 77  # the status of a script whose feature the installed version does not have
LABELS = ("bug", "fixed upstream", "limit", "freedom")


@dataclass(frozen=True)
class Library:
    """A library with findings: it has a page, docs/findings/<name>.md, and scripts beside it."""

    name: str

    @property
    def page(self) -> str:
        """The text of its page."""
        return (FINDINGS / f"{self.name}.md").read_text()

    @property
    def prefix(self) -> str:
        """What the ids of its findings begin with."""
        return self.rows[0][0].split("-")[0]

    @property
    def scripts(self) -> list[Path]:
        """Its scripts, by id."""
        return sorted(FINDINGS.glob(f"{self.prefix}-*.py"))

    @property
    def rows(self) -> list[tuple[str, str, str]]:
        """Id, label and effect of every row of the page's table."""
        return re.findall(r"^\| \[(\S+)\]\(\1\.py\) \| ([^|]+) \| ([^|]+) \|", self.page, re.MULTILINE)

    def printed(self, id: str) -> list[str]:
        """Return what the page says that the script prints: a block of its section, several if versions differ."""
        section = re.search(rf"^## {id} .*?(?=^## |\Z)", self.page, re.MULTILINE | re.DOTALL)
        blocks = re.findall(r"^```\n(.*?)^```$", section[0], re.MULTILINE | re.DOTALL) if section else []
        assert blocks, f"{self.name}.md has no section of {id} with what its script prints"
        return blocks

    @functools.cached_property
    def preload(self) -> list[str]:
        """What its scripts import of it and of torch, in the order of the alphabet."""
        return sorted({name for path in self.scripts for name in imported(path)})

    @property
    def installed(self) -> bool:
        """Whether its scripts can be run here."""
        return all(map(importable, self.preload))

    @property
    def is_checkout(self) -> bool:
        """Whether a checkout is imported in place of what is published."""
        adapted: Adapted = registry.load(self.name).library  # type: ignore[attr-defined]  # every library with a page
        return "+" in adapted.version()


def imported(path: Path) -> set[str]:
    """Return the modules that a script imports, but those of Python."""
    tree = ast.parse(path.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    return {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}


def importable(module: str) -> bool:
    """Return whether there is a package of that name, without importing it."""
    return find_spec(module.split(".")[0]) is not None


@functools.cache
def version(distribution: str) -> str:
    """Return the version of a library under test, installed or a checkout in front of that, with its commit."""
    attributes = [getattr(registry.load(name), "library", None) for name in registry.names()]
    libraries = [each for each in attributes if isinstance(each, Adapted)]
    return next(each.version() for each in libraries if each.distribution == distribution)


def needed(path: Path) -> str | None:
    """Return what the docstring of a script says that it needs, None if it says nothing."""
    needs = re.search(r"^Needs: (\S+)", path.read_text(), re.MULTILINE)
    return None if needs is None else needs[1]


def lacks(path: Path) -> str | None:
    """Return what a script needs and is not here, of what its docstring names; None if there is nothing to miss."""
    needs = needed(path)
    if needs is None:
        return None
    if re.search("[<>=]", needs):
        requirement = Requirement(needs)
        there = requirement.specifier.contains(version(requirement.name), prereleases=True)
    else:
        module, _, name = needs.rpartition(".")
        package, *parts = module.split(".")
        spec = find_spec(package)
        folders = spec.submodule_search_locations or () if spec is not None else ()
        files = [Path(folder, *parts).with_suffix(".py") for folder in folders]
        there = any(re.search(rf"^(def|class) {name}\b", file.read_text(), re.M) for file in files if file.is_file())
    return None if there else needs


LIBRARIES = [Library(page.stem) for page in sorted(FINDINGS.glob("*.md"))]
HERE = [library for library in LIBRARIES if library.installed]


@functools.cache
def ran(library: Library) -> dict[str, tuple[int, str, str]]:
    """Run all scripts of a library, two at a time; return exit status, output and errors of each, by id."""
    loopback = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    environment = os.environ | ({"GLOO_SOCKET_IFNAME": loopback[0]} if loopback else {})
    runner = Path(__file__).with_name("run_scripts.py")
    # Those that wait for gloo's timeout need no processor meanwhile.
    scripts = [path for path in library.scripts if lacks(path) is None]
    waiting_first = sorted(scripts, key=lambda path: "end.wait" not in path.read_text())
    with TemporaryDirectory() as folder:
        command = [sys.executable, str(runner), ",".join(library.preload), folder, *map(str, waiting_first)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert 0 == done.returncode, done.stderr
        read = {path.name: path.read_text() for path in Path(folder).iterdir()}
        statuses = json.loads(done.stdout.splitlines()[-1])
        return {id: (status, read[f"{id}.out"], read[f"{id}.err"]) for id, status in statuses.items()}


class TestScripts:
    @pytest.mark.parametrize(
        ("library", "id"), [pytest.param(each, path.stem, id=path.stem) for each in HERE for path in each.scripts]
    )
    def test_it_shows_what_its_page_says(self, library: Library, id: str) -> None:
        """The script exits 1, since the finding is there, and prints what stands in its page.

        A checkout may have mended it: then the script exits 0, and the page can say so.
        """
        if wanted := lacks(FINDINGS / f"{id}.py"):
            pytest.skip(f"it needs {wanted}")
        status, out, errors = ran(library)[id]
        if status == WITHOUT:
            pytest.skip(f"{id}: {out.strip()}")
        if status == 0 and library.is_checkout:
            pytest.skip(f"{id}: mended in this checkout")
        assert (1, True) == (status, out in library.printed(id)), out + errors[-4000:]


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda library: library.name)
class TestPages:
    def test_every_finding_has_a_script_a_row_and_a_section(self, library: Library) -> None:
        """Scripts, rows of the table and sections have the same ids; the sections stand in the order of the table."""
        ids = [id for id, _, _ in library.rows]
        sections = re.findall(rf"^## ({library.prefix}-\d+) .* · (.+)$", library.page, re.MULTILINE)
        assert [path.stem for path in library.scripts] == sorted(ids)
        assert [(id, label) for id, label, _ in library.rows] == sections

    def test_what_is_fixed_is_looked_for_below_that_version(self, library: Library) -> None:
        """The docstring of its script says what version it needs, as in "Needs: megatron-core<0.19"."""
        fixed = {id: label.split()[-1] for id, label, _ in library.rows if label.startswith("fixed upstream in ")}
        needs = {id: needed(FINDINGS / f"{id}.py") or library.name for id in fixed}
        wrong = {id for id, version in fixed.items() if Requirement(needs[id]).specifier.contains(version)}
        assert wrong == set()

    def test_the_table_is_sorted_by_severity(self, library: Library) -> None:
        """Effects stand from the most severe on, and within an effect bugs before limits before freedoms."""
        ranks = [
            (EFFECTS.index(effect), LABELS.index(re.sub(r" in \d+\.\d+\.\d+$", "", label)))
            for _, label, effect in library.rows
        ]
        assert sorted(ranks) == ranks

    def test_every_waiver_names_a_finding_of_the_page(self, library: Library) -> None:
        """The id of a waiver begins with that of a finding, and its evidence with the page and this id.

        The page is that of the backend, or of the one that it is a part of.
        """
        waivers = tomllib.loads((ROOT / "waivers" / f"{library.name}.toml").read_text())["waiver"]
        pages = [each for each in LIBRARIES if f"{library.name}-".startswith(f"{each.name}-")]
        of = {path.stem: each.name for each in pages for path in each.scripts}
        ids = ["-".join(each["id"].split("-")[:2]) for each in waivers]
        expected = [(id in of, f"docs/findings/{of.get(id)}.md, {id}") for id in ids]
        found = [(True, ":".join(each["evidence"].split(":")[:1])) for each in waivers]
        assert expected == found


@pytest.mark.parametrize("path", [path for each in LIBRARIES for path in each.scripts], ids=lambda path: path.stem)
class TestForm:
    def test_it_can_be_pasted(self, path: Path) -> None:
        """A script says which it shows; it imports Python, torch, one library, and stand-ins for kernels alone."""
        assert str(ast.get_docstring(ast.parse(path.read_text()))).startswith(f"{path.stem}: ")
        others = {name.split(".")[0] for name in imported(path)} - {"torch", "moe_conformance"}
        ours = {name for name in imported(path) if name.startswith("moe_conformance")}
        assert all(name.startswith("moe_conformance.stand_ins.") for name in ours)
        assert len(others) <= 1, "a script is of one library"
