"""One pytest item per case, which runs all checks that read the case.

While pytest collects and selects, every check of every case is a node of its own, so that `-k`, `--lf`, `--deselect`
and node ids mean what they always mean. What was selected is then put together by case: a check needs no fixtures and
no protocol of its own, only its arguments, and reports its verdict under its own node id.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from moe_conformance.spec.row import ARGUMENTS, Row
from moe_conformance.waiving import only_should
from moe_conformance.workloads.plan import Case

_OF_A_CASE = ARGUMENTS - {"tally"}  # what only a case has


@dataclass(frozen=True)
class CaseFunction:
    """A check as it is written: a row, or a function of a module or of a class of which each case gets a new object."""

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
        """Where it is written, from 1."""
        return self.function.line if isinstance(self.function, Row) else self.function.__code__.co_firstlineno

    def bound(self) -> Callable[..., None]:
        """Return what is called with the arguments."""
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

    def __init__(self, *, asked: CaseFunction, case: Case | None, **node: Any) -> None:
        """Take what to call and on what."""
        super().__init__(**node)
        self.asked, self.case = asked, case
        self.own_markers.append(asked.mark)
        self._named = super().nodeid  # pytest joins its parts each time

    @property
    def nodeid(self) -> str:
        """For example `distributed_tests/test_x.py::TestX::test_y[alltoall-ep2-even]`."""
        return self._named

    @property
    def originalname(self) -> str:
        """The name of the function."""
        return self.asked.name

    @property
    def function(self) -> Callable[..., None] | None:
        """The function, whose attributes `-k` looks at; a row has none that anybody would select by."""
        return None if isinstance(self.asked.function, Row) else self.asked.function

    def reportinfo(self) -> tuple[Any, int, str]:
        """Say where it is written."""
        names = [node.name for node in self.listchain() if isinstance(node, pytest.Class)]
        return self.path, self.asked.line - 1, ".".join([*names, self.name])

    def runtest(self) -> None:
        """Skip: only one without a case is run by itself."""
        pytest.skip("no case of this run is for it")


class CaseItem(pytest.Item):
    """One case, and the checks that were selected of those that read it."""

    def __init__(self, *, case: Case, run: Callable[[CaseItem], None], **node: Any) -> None:
        """Take the case and what runs the checks."""
        super().__init__(**node)
        self.case = case
        self.checks: list[Check] = []
        self.crashes: set[str] = set()  # the messages of those that were reported under EXCH-09
        self.failed = False  # a check that reads this case alone
        self._run = run
        self._telling: Check | None = None

    @property
    def nodeid(self) -> str:
        """Its own; while a check's report is told that of the check, since xdist wants them to be the same."""
        return super().nodeid if self._telling is None else self._telling.nodeid

    @property
    def fixturenames(self) -> frozenset[str]:
        """The arguments of all checks."""
        return frozenset(argument for check in self.checks for argument in check.asked.arguments)

    @contextmanager
    def telling(self, check: Check) -> Iterator[None]:
        """Let hooks be called for a check; what they print is not captured."""
        capture = self.config.pluginmanager.get_plugin("capturemanager")
        self._telling = check
        try:
            if capture is None:
                yield
            else:
                with capture.global_and_fixture_disabled():
                    yield
        finally:
            self._telling = None

    def end(self) -> None:
        """Let go of the case and its checks."""
        self.checks = []
        del self.case

    def reportinfo(self) -> tuple[Any, None, str]:
        """Say what it is."""
        return self.path, None, self.name

    def runtest(self) -> None:
        """Run the checks."""
        self._run(self)


def checks_of(collector: pytest.Collector, asked: CaseFunction, cases: Sequence[Case]) -> list[pytest.Item]:
    """Return a node for the check on every case; without any case one that says so."""

    def node(parameter: str, case: Case | None) -> Check:
        name = f"{asked.name}[{parameter}]"
        # pytest makes no parameters of a name, and --lf knows an item by them
        return Check.from_parent(collector, name=name, nodeid=f"{collector.nodeid}::{name}", asked=asked, case=case)

    return [node(case.id, case) for case in cases] or [node("NOTSET", None)]


def by_case(items: Iterable[pytest.Item], run: Callable[[CaseItem], None]) -> Iterator[pytest.Item]:
    """Yield one item per case, where the first of its checks was, and all other items where they were.

    Of the checks of a case those of a SHOULD come last, and of one level those that compare runs.
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
    return only_should(check.asked.requirements), check.asked.compares_runs


def each_check(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the checks of items of a case, and all other items as they are."""
    for item in items:
        yield from item.checks if isinstance(item, CaseItem) else (item,)
