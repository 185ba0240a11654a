"""Defines a check that is one call of a judge, as a row of a table in `distributed_tests/`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from moe_conformance.spec import BadSpec, marked

if TYPE_CHECKING:
    from moe_conformance.workloads.records.runs import RunSpec
    from moe_conformance.workloads.records.workload import Workload
    from moe_conformance.workloads.twins import Twin

ARGUMENTS = frozenset({"outcome", "reading", "tally", "twins"})  # the arguments that a check of cases may have
_RAN = "ran"  # the parameter of a judge that takes the results of the equivalent runs of a row


class Row:
    """A check: the requirements that it decides, the run that it reads, and the judge; below is its sentence, a string.

        class TestDispatch:
            test_rows_arrive_unchanged = Row("EXCH-02", ExchangeStep(), judge_rows)
            '''Every row that an expert receives is the hidden state of one token.'''

    Class and name are those of the check in node ids, so that rows stand in classes.
    """

    __name__: str
    __qualname__: str
    __signature__: inspect.Signature

    def __init__(
        self,
        ids: str | tuple[str, ...],
        run: RunSpec,
        judge: Callable[..., None],
        *given: Any,
        when: Callable[[Workload], bool] | None = None,
        twins: Callable[[Workload], Sequence[Twin]] | None = None,
        **named: Any,
    ) -> None:
        """Take the arguments of `requirement`, and the judge.

        Args:
            ids: The requirements that it decides.
            run: It reads the workloads of this run.
            judge: Called with those of `outcome`, `reading`, `tally` and `twins` that are among its parameters.
            given: For its other parameters, in their order.
            when: Whether it reads a workload; None if it reads all.
            twins: Returns the equivalent runs of a workload. They are run if the case itself finished, and the judge
                takes their results as `ran`.
            named: For parameters of the judge, by name.

        Raises:
            BadSpec: an id is not in the spec, or the judge cannot be called so.
        """
        self.ids = (ids,) if isinstance(ids, str) else ids
        self.judge, self.twins, self.named = judge, twins, named
        self.line = sys._getframe(1).f_lineno  # in the file of checks
        self.pytestmark = [marked(*self.ids, run=run, when=when).mark]
        self._passed = self._in_order(given)
        requested = [str(argument) for argument in self._passed if isinstance(argument, _CaseArgument)]
        if twins is not None:
            requested = ["reading", "twins", *(name for name in requested if name not in ("reading", _RAN))]
        keyword = inspect.Parameter.KEYWORD_ONLY
        self.__signature__ = inspect.Signature([inspect.Parameter(name, keyword) for name in requested])

    def _in_order(self, given: Sequence[Any]) -> list[Any]:
        """Return the arguments of the judge that are passed by position."""
        signature = inspect.signature(self.judge)
        offered = ARGUMENTS if self.twins is None else ARGUMENTS - {"twins"} | {_RAN}
        passed: list[Any] = []
        rest = list(given)
        for name, parameter in signature.parameters.items():
            if name in offered:
                passed.append(_CaseArgument(name))
            elif parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD or name in self.named or not rest:
                break  # what follows has a default or is given by name, or the judge cannot be called
            else:
                passed.append(rest.pop(0))
        passed += rest
        try:
            signature.bind(*passed, **self.named)
        except TypeError as error:
            raise BadSpec(f"{', '.join(self.ids)}: {self.judge.__name__} cannot be called by a row: {error}") from None
        if self.twins is not None and _CaseArgument(_RAN) not in passed:
            raise BadSpec(f"{', '.join(self.ids)}: {self.judge.__name__} does not take what equivalent runs returned")
        return passed

    def __set_name__(self, owner: type, name: str) -> None:
        """Set the names that a method would have.

        Raises:
            BadSpec: pytest would not find it under this name.
        """
        if not name.startswith("test_"):
            raise BadSpec(f"{owner.__name__}.{name}: the name of a row begins with test_")
        self.__name__, self.__qualname__, self.__module__ = name, f"{owner.__qualname__}.{name}", owner.__module__

    def __call__(self, **offered: Any) -> None:
        """Call the judge."""
        if self.twins is not None:
            offered[_RAN] = offered["twins"](self.twins(offered["reading"].outcome.workload))
        arguments = [offered[value] if isinstance(value, _CaseArgument) else value for value in self._passed]
        self.judge(*arguments, **self.named)


class _CaseArgument(str):
    """The name of an argument that is passed when the check is called."""

    __slots__ = ()
