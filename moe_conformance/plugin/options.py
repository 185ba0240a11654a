"""The options of a run, in one place: `--moe-NAME` for pytest, `--NAME` for the command line. Imports nothing heavy."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from moe_conformance.workloads.selection import shards
from moe_conformance.workloads.selection.shards import Shard

REPLAYED = ("backend", "library", "device", "plant", "profile")  # the options of `replay`
# Options that select a part of a run, or how it is reported; a command that repeats a failure has none of them.
_OF_ONE_RUN = ("only", "against", "report", "matrix", "propose_waivers", "shard", "time_limit")
MOST_RANKS = 64  # group construction is checked against its oracle up to here
FEWEST_VIRTUAL, MOST_VIRTUAL = 8, 512  # ranks of the profile "virtual"


@dataclass(frozen=True)
class Option:
    """One option; it sets the field of `Options` of its name, with `_` for `-`."""

    name: str
    metavar: str
    help: str
    choices: tuple[str, ...] | None = None
    flag: bool = False  # it has no value
    lists: bool = False  # may be given several times: the values are joined by commas

    @property
    def field(self) -> str:
        """The name of its field in `Options`."""
        return self.name.replace("-", "_")


OPTIONS = (
    Option("backend", "NAME|pkg.mod:Class", "the implementation under test (default: native)"),
    Option("library", "PATH", "a checkout of the library under test, imported in place of the installed one"),
    Option("ranks", "N", f"the largest world, 1 to {MOST_RANKS}; larger layouts are not applicable (default: 4)"),
    Option("device", "cpu|cuda", "device of the ranks' tensors (default: cpu)", ("cpu", "cuda")),
    Option(
        "profile",
        "quick|full|virtual|smoke",
        f"how many layouts and workloads, or {FEWEST_VIRTUAL} to {MOST_VIRTUAL} ranks as threads, or quick's first ten "
        "seconds (default: quick)",
        ("quick", "full", "virtual", "smoke"),
    ),
    Option(
        "rotation",
        "I/N",
        "run the I-th of N parts of what the profile leaves out, and nothing else; 1/1 is all of it",
    ),
    Option(
        "asynchrony",
        "plain|poisoned|watched",
        "mode of asynchronous collectives in every case; some always run poisoned and watched (default: plain)",
        ("plain", "poisoned", "watched"),
    ),
    Option("only", "ID,ID", "check these requirements only", lists=True),
    Option("strict", "", "fail also where a requirement of the level SHOULD is not kept", flag=True),
    Option("plant", "NAME", "run native with a planted bug, which must be detected"),
    Option("waivers", "FILE", "waivers of a backend that is given by dotted path"),
    Option("against", "DIR", "fail if less passes or is judged than in the report in this folder"),
    Option(
        "report",
        "DIR",
        "write result.json and scripts that reproduce failures into this folder, and records.jsonl while the run lasts",
    ),
    Option("deadline", "SECONDS", "give a case up as hanging after this time (default: 60)"),
    Option(
        "matrix",
        "chapters|all",
        "a row for each chapter and for what fails, or for every requirement (default: chapters)",
        ("chapters", "all"),
    ),
    Option("propose-waivers", "", "print a proposal for a waiver beside each kind of failure", flag=True),
    Option("shard", "I/N", "run the I-th of N parts only; `moe-conformance merge` puts the parts together"),
    Option("time-limit", "SECONDS", "stop in order before this time is up, the start included; exit status 124"),
)


class Unusable(Exception):
    """The run cannot start: wrong usage, or something that this machine lacks. One sentence with the remedy."""


@dataclass(frozen=True)
class Options:
    """The options of a run; requirement ids and paths are text that its users resolve."""

    backend: str = "native"
    library: str = ""
    ranks: int = 4
    device: str = "cpu"
    profile: str = "quick"
    rotation: str = ""
    asynchrony: str = "plain"
    only: str = ""
    strict: bool = False
    plant: str = ""
    waivers: str = ""
    against: str = ""
    report: str = ""
    deadline: float = 60.0  # seconds
    matrix: str = "chapters"
    propose_waivers: bool = False
    shard: str = ""
    time_limit: float = 0.0  # seconds; 0 is none

    def __post_init__(self) -> None:
        """Refuse values that no run can have.

        Raises:
            Unusable: a value is out of range, or two values exclude each other.
        """
        for option in OPTIONS:
            value = getattr(self, option.field)
            if option.choices and value not in option.choices:
                raise Unusable(f"unknown {option.name} {value!r}; give {' or '.join(option.choices)}")
        fewest, most = (FEWEST_VIRTUAL, MOST_VIRTUAL) if self.profile == "virtual" else (1, MOST_RANKS)
        if not fewest <= self.ranks <= most:
            raise Unusable(f"no layout fits {self.ranks} ranks; give --ranks {fewest} to {most}")
        if self.profile == "virtual" and self.asynchrony != "plain":
            raise Unusable(f"virtual ranks have no {self.asynchrony} collectives; leave --asynchrony out")
        if self.plant and self.backend != "native":
            raise Unusable(f"bugs are planted in native, not in {self.backend}; leave --backend out")
        if not 0 <= self.time_limit < float("inf"):
            raise Unusable(f"--time-limit needs seconds, not {self.time_limit}")
        if not 0 < self.deadline < float("inf"):
            raise Unusable(f"--deadline needs seconds, more than 0, not {self.deadline}")
        for name in ("shard", "rotation"):
            try:
                self._part(name)
            except ValueError as error:
                raise Unusable(str(error)) from None
        if self.rotation and self.profile == "virtual":
            raise Unusable("the profile virtual leaves nothing out; leave --rotation out")
        if self.rotation and self.profile == "smoke":
            raise Unusable("what the profile smoke leaves out is in quick; leave --rotation out")

    @property
    def part(self) -> Shard | None:
        """The requested shard."""
        return self._part("shard")

    @property
    def rotated(self) -> Shard | None:
        """The requested part of the cases that the profile leaves out."""
        return self._part("rotation")

    def _part(self, name: str) -> Shard | None:
        text = getattr(self, name)
        return shards.parse(text, f"--{name}") if text else None

    @property
    def ids(self) -> tuple[str, ...]:
        """The requirement ids of `only`; empty if all are wanted."""
        return tuple(part.strip() for part in self.only.split(",") if part.strip())

    def arguments(self, prefix: str, leave_out: tuple[str, ...] = ()) -> Iterator[str]:
        """Yield what differs from the defaults as command line arguments, `prefix` being `--` or `--moe-`."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default and field.name not in leave_out:
                name = f"{prefix}{field.name.replace('_', '-')}"
                yield from (name,) if value is True else (name, str(value))

    @property
    def again(self) -> str:
        """The command that repeats the run, without the options that select a part of it."""
        words = ["moe-conformance", "run", *self.arguments("--", _OF_ONE_RUN)]
        if self.backend == Options.backend and not self.plant:
            words[2:2] = ["--backend", self.backend]
        return shlex.join(words)

    def replay(self, example: Path) -> str:
        """Return the command that runs an example in a file on the same implementation and kind of ranks."""
        others = tuple(field.name for field in fields(self) if field.name not in REPLAYED)
        others += () if self.profile == "virtual" else ("profile",)
        return shlex.join(["moe-conformance", "replay", str(example), *self.arguments("--", others)])


def from_mapping(given: dict[str, Any]) -> Options:
    """Return the options that are given, the others at their defaults; None is not given.

    Raises:
        Unusable: a value is out of range or not a number.
    """
    values = {name: _joined(value) for name, value in given.items() if value is not None}
    numbers: dict[str, Callable[[Any], float]] = {"ranks": int, "time_limit": float, "deadline": float}
    for name in numbers.keys() & values.keys():
        try:
            values[name] = numbers[name](values[name])
        except ValueError as error:
            raise Unusable(f"--{name.replace('_', '-')} needs a number, not {values[name]!r}") from error
    return Options(**values)


def _joined(value: Any) -> Any:
    return ",".join(value) if isinstance(value, (list, tuple)) else value
