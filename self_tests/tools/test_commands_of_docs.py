"""The commands in README and docs exist, with the options that they are shown with."""

from __future__ import annotations

import configparser
import functools
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from moe_conformance.cli import main
from moe_conformance.plugin.options import OPTIONS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"^(moe-conformance \w|tox run|python -m|torchrun|pytest --moe|pytest distributed_tests).*")


def commands() -> Iterator[tuple[str, str]]:
    """Yield every command with its page: lines of blocks of code, and code within a sentence."""
    for page in PAGES:
        inside = False
        for line in page.read_text("utf-8").splitlines():
            inside ^= line.startswith("```")
            whole = [line.strip()] if inside or line.startswith("    ") else re.findall(r"`([^`]+)`", line)
            for text in (part.split(" #")[0].strip() for each in whole for part in each.split(" && ")):
                if COMMAND.match(text):
                    yield page.name, text


FOUND = sorted(set(commands()))


def words_of(command: str) -> list[str]:
    """Return the words of a command, the first of alternatives (A|B), without what stands for more."""
    words = [re.sub(r"\|.*", "", word) for word in shlex.split(command.rstrip("\\"))]
    return [word.removesuffix("...") for word in words if word not in ("...", "PYTEST", "ARGS", ";")]


def complaint(words: list[str]) -> str:
    """Return what is wrong with a command; empty if it exists."""
    if words[0] == "moe-conformance":
        return complaint_of_ours(words[1:])
    if words[0] == "tox":
        names = words[words.index("-e") + 1].split(",") if "-e" in words else []
        return "".join(f"no environment {name}" for name in names if name not in environments())
    if "moe-conformance" in words:  # torchrun --no-python
        return complaint_of_ours(words[words.index("moe-conformance") + 1 :])
    module = words[words.index("-m") + 1] if "-m" in words else "pytest"
    if importlib.util.find_spec(module) is None:
        return f"no module {module}"
    known = {f"--moe-{option.name}" for option in OPTIONS}
    return "".join(f"no option {word}" for word in words if word.startswith("--moe") and word not in known)


@functools.cache
def environments() -> frozenset[str]:
    """Return the environments of tox.ini, those of a section such as [testenv:a{,-older}] one by one."""
    tox = configparser.ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini", encoding="utf-8")
    found = set()
    for section in tox.sections():
        kind, _, name = section.partition(":")
        stem, _, endings = name.rstrip("}").partition("{")
        if kind == "testenv":
            found |= {stem + ending for ending in endings.split(",")}
    return frozenset(found)


def complaint_of_ours(words: list[str]) -> str:
    """Return what is wrong with the words behind moe-conformance."""
    command = main.commands.get(words[0]) if words else None
    if command is None:
        return f"no command {words[:1]}"
    try:
        command.make_parser(click.Context(command)).parse_args(words[1:])
    except click.UsageError as error:
        return error.format_message()
    return ""


class TestCommands:
    @pytest.mark.parametrize(("page", "command"), FOUND, ids=[f"{page}: {command[:60]}" for page, command in FOUND])
    def test_a_command_exists(self, page: str, command: str) -> None:
        """So do its subcommand, its options, the environment of tox, and the module that is run."""
        assert "" == complaint(words_of(command)), page

    def test_commands_are_found(self) -> None:
        """In blocks and in sentences, of every kind."""
        kinds = {command.split()[0] for _, command in FOUND}
        assert {"moe-conformance", "tox", "python", "torchrun", "pytest"} == kinds
        assert len(FOUND) > 60

    @pytest.mark.parametrize(
        ("command", "told"),
        [
            ("moe-conformance run --bakend native", "No such option '--bakend'"),
            ("moe-conformance walk", "no command ['walk']"),
            ("tox run -e nativ", "no environment nativ"),
            ("tox run -e native-older", "no environment native-older"),
            ("python -m benchmarks.nothing", "no module benchmarks.nothing"),
            ("pytest --moe-bakend native", "no option --moe-bakend"),
        ],
    )
    def test_a_wrong_one_is_told(self, command: str, told: str) -> None:
        """Each kind of mistake has its sentence."""
        assert told in complaint(words_of(command))
