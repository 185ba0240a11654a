"""The checks of `distributed_tests`, found by name.

Nothing imports them (docs/decisions/0001): the plug-in collects them, and all others that need them, to list them or to
call them on an outcome without pytest, take them from here.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from moe_conformance.discovery import CHECKS
from moe_conformance.spec.row import ARGUMENTS

if TYPE_CHECKING:
    from moe_conformance.workloads.records.runs import RunSpec
    from moe_conformance.workloads.records.workload import Workload


@dataclass(frozen=True)
class Check:
    """A check, ready to be called with its arguments."""

    file: str  # without its ending: test_exchange
    name: str  # of the function, after its class if it has one: TestDispatch.test_rows_arrive_unchanged
    function: Callable[..., None]  # bound
    requirements: tuple[str, ...]
    run: RunSpec
    when: Callable[[Workload], bool] | None

    @property
    def path(self) -> str:
        """The name by which `find` finds it."""
        return f"{self.file}:{self.name}"

    @property
    def arguments(self) -> frozenset[str]:
        """The names of its arguments."""
        return frozenset(inspect.signature(self.function).parameters)

    @property
    def of_cases(self) -> bool:
        """Whether it reads cases, and nothing else."""
        return bool(self.arguments - {"tally"}) and self.arguments <= ARGUMENTS

    def reads(self, workload: Workload) -> bool:
        """Whether it judges runs of this workload."""
        return self.run == workload.run and (self.when is None or self.when(workload))


@cache
def checks() -> tuple[Check, ...]:
    """Return all checks, in the order of their files."""
    found = (each.name for each in pkgutil.iter_modules(importlib.import_module(CHECKS).__path__))
    return tuple(check for file in sorted(found) if file.startswith("test_") for check in of_file(file))


@cache
def by_requirement() -> Mapping[str, tuple[Check, ...]]:
    """Return all checks by the requirement that they decide."""
    found: dict[str, list[Check]] = {}
    for check in checks():
        for each in check.requirements:
            found.setdefault(each, []).append(check)
    return {requirement: tuple(some) for requirement, some in found.items()}


@cache
def of_file(file: str) -> tuple[Check, ...]:
    """Return the checks of a file.

    Raises:
        ImportError: there is no such file, or it cannot be imported.
    """
    module = importlib.import_module(f"{CHECKS}.{file}")
    return tuple(
        Check(file, name, function, tuple(mark.args), mark.kwargs["run"], mark.kwargs["when"])
        for name, function in _functions(vars(module))
        for mark in getattr(function, "pytestmark", ())
        if mark.name == "requirement"
    )


def find(path: str) -> Check:
    """Return the check of a path.

    Raises:
        LookupError: there is none.
    """
    file, _, name = path.partition(":")
    try:
        return next(check for check in of_file(file) if check.name == name)
    except (ImportError, StopIteration) as error:
        reason = error if isinstance(error, ImportError) else f"{file} has no {name}"
        raise LookupError(f"there is no check {path} in this suite: {reason}") from None


def _functions(names: Mapping[str, object]) -> Iterator[tuple[str, Callable[..., None]]]:
    """Yield test functions with their names, those of classes bound."""
    for name, value in list(names.items()):
        if inspect.isclass(value) and name.startswith("Test"):
            instance = value()
            yield from ((f"{name}.{each}", getattr(instance, each)) for each in vars(value) if each.startswith("test_"))
        elif inspect.isfunction(value) and name.startswith("test_"):
            yield name, value
