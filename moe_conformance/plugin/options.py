"""The options of a run, in one place: `--moe-NAME` for pytest, `--NAME` for the command line. Imports nothing heavy."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

MOST_RANKS = 64  # group construction is checked against its oracle up to here


@dataclass(frozen=True)
class Option:
    """One option; its name is the field of `Options` that it sets."""

    name: str
    metavar: str
    help: str
    choices: tuple[str, ...] | None = None


OPTIONS = (
    Option("backend", "NAME|pkg.mod:Class", "the implementation under test (default: native)"),
    Option("ranks", "N", f"the largest world, 1 to {MOST_RANKS}; larger layouts are not applicable (default: 4)"),
    Option("device", "cpu|cuda", "where the ranks' tensors live (default: cpu)", ("cpu", "cuda")),
    Option("profile", "quick|full", "how many layouts and workloads (default: quick)", ("quick", "full")),
    Option("only", "ID,ID", "judge these requirements only"),
    Option("plant", "NAME", "judge native with a planted bug, which must be caught"),
    Option("waivers", "FILE", "waivers of a backend that is given by dotted path"),
    Option("report", "DIR", "write result.json into this folder"),
)


class Unusable(Exception):
    """The run cannot start: wrong usage, or something that this machine lacks. One sentence with the remedy."""


@dataclass(frozen=True)
class Options:
    """What was asked for, as text; `only` and the paths are resolved by whoever uses them."""

    backend: str = "native"
    ranks: int = 4
    device: str = "cpu"
    profile: str = "quick"
    only: str = ""
    plant: str = ""
    waivers: str = ""
    report: str = ""

    def __post_init__(self) -> None:
        """Refuse values that no run could have.

        Raises:
            Unusable: says which.
        """
        for option in OPTIONS:
            value = getattr(self, option.name)
            if option.choices and value not in option.choices:
                raise Unusable(f"unknown {option.name} {value!r}; choose {' or '.join(option.choices)}")
        if not 1 <= self.ranks <= MOST_RANKS:
            raise Unusable(f"no layout fits {self.ranks} ranks; give 1 to {MOST_RANKS}")
        if self.plant and self.backend != "native":
            raise Unusable(f"bugs are planted in native, not in {self.backend}; leave --backend out")

    @property
    def ids(self) -> tuple[str, ...]:
        """The requirement ids of `only`; empty if all are wanted."""
        return tuple(part.strip() for part in self.only.split(",") if part.strip())

    def arguments(self, prefix: str, leave_out: tuple[str, ...] = ()) -> Iterator[str]:
        """Yield what differs from the defaults as command line arguments, `prefix` being `--` or `--moe-`."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default and field.name not in leave_out:
                yield from (f"{prefix}{field.name}", str(value))

    def command(self, pytest_arguments: tuple[str, ...] = (), only: tuple[str, ...] = ()) -> str:
        """Return a pasteable command that repeats the run, or a part of it."""
        words = ["moe-conformance", "run", *self.arguments("--", ("only", "report"))]
        if self.backend == Options.backend and not self.plant:
            words[2:2] = ["--backend", self.backend]
        if wanted := only or self.ids:
            words += ["--only", ",".join(wanted)]
        return shlex.join([*words, *(("--", *pytest_arguments) if pytest_arguments else ())])


def from_mapping(given: dict[str, Any]) -> Options:
    """Return the options that are not None, the others at their defaults.

    Raises:
        Unusable: a value is out of range or not a number.
    """
    values = {name: value for name, value in given.items() if value is not None}
    if "ranks" in values:
        try:
            values["ranks"] = int(values["ranks"])
        except ValueError as error:
            raise Unusable(f"--ranks wants a number, not {values['ranks']!r}") from error
    return Options(**values)
