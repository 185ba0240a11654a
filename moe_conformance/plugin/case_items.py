"""One pytest item per case, which runs all checks that read the case.

While pytest collects and selects, every check of every case is a node of its own, so that `-k`, `--lf`, `--deselect`
and node ids work as in any pytest run. Selected checks of a case are then put into one item: they need no fixtures and
no protocol of pytest, only their arguments, and report their verdicts under their node ids.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from moe_conformance.plugin.trial import trial_of
from moe_conformance.spec.row import ARGUMENTS, Row
from moe_conformance.waiving import only_should
from moe_conformance.workloads.plan import Case

_OF_A_CASE = ARGUMENTS - {"tally"}  # what only a case has


@dataclass(frozen=True)
class CaseFunction:
    """A check as it is written: a row, or a function of a module, or of a class that is instantiated for every case."""

    name: str
    function: Callable[..., None]
    owner: type | None
    arguments: tuple[str, ...]
    mark: pytest.Mark

    @property
    def requirements(self) -> tuple[str, ...]:
        """The ids of the requirements that it decides."""
        return tuple(self.mark.args)

    @property
    def compares_runs(self) -> bool:
        """Whether it compares the case with other runs, so that it cannot say what is wrong in either."""
        return "twins" in self.arguments

    @property
    def line(self) -> int:
        """Its line number, from 1."""
        return self.function.line if isinstance(self.function, Row) else self.function.__code__.co_firstlineno

    def bound(self) -> Callable[..., None]:
        """Return the callable that takes the arguments."""
        return self.function if self.owner is None else getattr(self.owner(), self.name)


def case_function(collector: pytest.Collector, name: str, found: object) -> CaseFunction | None:
    """Return the check of cases that a name of a module or class stands for, or None if it is something else.

    Raises:
        CollectError: it asks for more than a check of cases can have.
    """
    marks = [mark for mark in getattr(found, "pytestmark", ()) if mark.name == "requirement"]
    if not marks or not (isinstance(found, Row) or inspect.isfunction(found)):
        return None
    in_class = isinstance(collector, pytest.Class)
    if isinstance(found, Row) and not in_class:
        raise pytest.Collector.CollectError(f"{name} is a row, and rows stand in a class")
    owner = getattr(collector, "obj", None) if in_class and inspect.isfunction(found) else None
    arguments = tuple(inspect.signature(found).parameters)[owner is not None :]
    if not _OF_A_CASE & set(arguments):
        return None
    others = sorted(set(arguments) - ARGUMENTS)
    others += [f"@pytest.mark.{mark.name}" for mark in getattr(found, "pytestmark", ()) if mark not in marks]
    if others:
        raise pytest.Collector.CollectError(
            f"{name} reads cases, and such a check has the arguments {', '.join(sorted(ARGUMENTS))} and no mark but "
            f"@requirement; it also has {', '.join(others)}"
        )
    return CaseFunction(name, found, owner, arguments, marks[0])


class Check(pytest.Item):
    """A check on one case, as pytest names and selects it; the item of its case runs it.

    One without a case stands for a check that this run has no case for.
    """

    def __init__(self, *, definition: CaseFunction, case: Case | None, **node: Any) -> None:
        """Take what to call and on what."""
        super().__init__(**node)
        self.definition, self.case = definition, case
        self.own_markers.append(definition.mark)
        self._full_nodeid = super().nodeid  # pytest joins its parts each time

    @property
    def nodeid(self) -> str:
        """For example `distributed_tests/test_x.py::TestX::test_y[alltoall-ep2-even]`."""
        return self._full_nodeid

    @property
    def originalname(self) -> str:
        """The name of the function."""
        return self.definition.name

    @property
    def function(self) -> Callable[..., None] | None:
        """The function, whose attributes `-k` matches; None for a row."""
        return None if isinstance(self.definition.function, Row) else self.definition.function

    def reportinfo(self) -> tuple[Any, int, str]:
        """Return file, line from 0 and name."""
        names = [node.name for node in self.listchain() if isinstance(node, pytest.Class)]
        return self.path, self.definition.line - 1, ".".join([*names, self.name])

    def runtest(self) -> None:
        """Skip: only one without a case is run by itself."""
        trial_of(self).skip("not run", "no case of this run is for it")


class CaseItem(pytest.Item):
    """One case, and the checks that were selected of those that read it."""

    def __init__(self, *, case: Case, run: Callable[[CaseItem], None], **node: Any) -> None:
        """Take the case and what runs the checks."""
        super().__init__(**node)
        self.case = case
        self.checks: list[Check] = []
        self.faults: set[str] = set()  # the messages of faults of the whole case that a check has reported
        self.failed = False  # a check that reads this case alone
        self._run = run
        self._reported: Check | None = None

    @property
    def nodeid(self) -> str:
        """That of the item; while a check is reported that of the check, since xdist requires them to be equal."""
        return super().nodeid if self._reported is None else self._reported.nodeid

    @property
    def fixturenames(self) -> frozenset[str]:
        """The arguments of all checks."""
        return frozenset(argument for check in self.checks for argument in check.definition.arguments)

    @contextmanager
    def reporting(self, check: Check) -> Iterator[None]:
        """Give the item the node id of a check while its hooks are called; what they print is not captured."""
        capture = self.config.pluginmanager.get_plugin("capturemanager")
        self._reported = check
        try:
            if capture is None:
                yield
            else:
                with capture.global_and_fixture_disabled():
                    yield
        finally:
            self._reported = None

    def end(self) -> None:
        """Release the case and its checks."""
        self.checks = []
        del self.case

    def reportinfo(self) -> tuple[Any, None, str]:
        """Return file and name; it has no line."""
        return self.path, None, self.name

    def runtest(self) -> None:
        """Run the checks."""
        self._run(self)


def checks_of(collector: pytest.Collector, definition: CaseFunction, cases: Sequence[Case]) -> list[pytest.Item]:
    """Return a node for the check on every case; without any case one node that is skipped."""

    def node(parameter: str, case: Case | None) -> Check:
        name = f"{definition.name}[{parameter}]"
        # pytest makes no parameters of a name, and --lf knows an item by them
        return Check.from_parent(
            collector, name=name, nodeid=f"{collector.nodeid}::{name}", definition=definition, case=case
        )

    return [node(case.id, case) for case in cases] or [node("NOTSET", None)]


def by_case(items: Iterable[pytest.Item], run: Callable[[CaseItem], None]) -> Iterator[pytest.Item]:
    """Yield one item per case, at the position of its first check, and all other items at theirs.

    Of the checks of a case those of a SHOULD come last, and within a level those that compare runs.
    """
    found: dict[str, CaseItem] = {}
    grouped: list[pytest.Item] = []
    for item in items:
        if not isinstance(item, Check) or item.case is None:
            grouped.append(item)
            continue
        if item.case.id not in found:
            file = item.getparent(pytest.Module)
            assert file is not None  # checks are collected from modules
            made = CaseItem.from_parent(file, name=f"case[{item.case.id}]", case=item.case, run=run)
            found[item.case.id] = made
            grouped.append(made)
        found[item.case.id].checks.append(item)
    for made in found.values():  # -x ends a case with its first failure
        made.checks.sort(key=_last)
    yield from grouped


def _last(check: Check) -> tuple[bool, bool]:
    return only_should(check.definition.requirements), check.definition.compares_runs


def checks_of_items(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the checks of items of a case, and all other items as they are."""
    for item in items:
        yield from item.checks if isinstance(item, CaseItem) else (item,)
