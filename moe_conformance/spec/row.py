"""A check that calls one judge, or some in turn: a row of a table in `distributed_tests/`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from moe_conformance.judging.verdict import in_turn
from moe_conformance.spec import BadSpec, marked

if TYPE_CHECKING:
    from moe_conformance.workloads.records.runs import RunSpec
    from moe_conformance.workloads.records.workload import Workload
    from moe_conformance.workloads.twins import Twin

ARGUMENTS = frozenset({"outcome", "reading", "tally", "twins"})  # the arguments that a check of cases may have
Judge = Callable[..., None]

_RAN = "ran"  # the parameter of a judge that takes the results of the equivalent runs of a row


class Row:
    """A check: what it decides, the runs that it reads, and the judge. Below it stands a string, its sentence.

        class TestDispatch:
            test_rows_arrive_unchanged = Row("EXCH-02", ExchangeStep(), judge_rows)
            '''Every row that an expert receives is the hidden state of one token.'''

    Several judges are called in turn. The first that raises ends the check, also by `NotOffered`: a judge whose subject
    may not be offered comes last. What is given is for the last.

    Class and name are those of the check in node ids, so that rows stand in classes.
    """

    __name__: str
    __qualname__: str
    __signature__: inspect.Signature

    def __init__(
        self,
        ids: str | tuple[str, ...],
        run: RunSpec,
        judge: Judge | tuple[Judge, ...],
        *given: Any,
        when: Callable[[Workload], bool] | None = None,
        twins: Callable[[Workload], Sequence[Twin]] | None = None,
        **named: Any,
    ) -> None:
        """Take the arguments of `requirement`, and the judge, or several.

        Args:
            ids: The requirements that it decides.
            run: It reads the workloads of this run.
            judge: Is called with what its parameters name of `outcome`, `reading`, `tally` and `twins`.
            given: For the other parameters of the judge, the last if there are some, in their order.
            when: Whether it reads a workload; None if it reads all.
            twins: Returns the equivalent runs of a workload. They run if the case itself finished, for the first
                judge that takes their results as `ran`.
            named: For parameters of the same judge, by name.

        Raises:
            BadSpec: an id is not in the spec, or a judge cannot be called so.
        """
        self.ids = (ids,) if isinstance(ids, str) else ids
        self.twins = twins
        self.line = sys._getframe(1).f_lineno  # in the file of checks
        self.pytestmark = [marked(*self.ids, run=run, when=when).mark]
        *before, last = judge if isinstance(judge, tuple) else (judge,)
        self._calls = [(each, self._in_order(each, (), {})) for each in before]
        self._calls.append((partial(last, **named), self._in_order(last, given, named)))
        every = [each for _, passed in self._calls for each in passed if isinstance(each, _CaseArgument)]
        requested: list[str] = list(dict.fromkeys(every))
        if twins is not None:
            if _RAN not in requested:
                raise BadSpec(f"{', '.join(self.ids)}: no judge takes what equivalent runs returned")
            requested = ["reading", "twins", *(name for name in requested if name not in ("reading", _RAN))]
        keyword = inspect.Parameter.KEYWORD_ONLY
        self.__signature__ = inspect.Signature([inspect.Parameter(name, keyword) for name in requested])

    def _in_order(self, judge: Judge, given: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """Return what a judge is passed by position."""
        signature = inspect.signature(judge)
        offered = ARGUMENTS if self.twins is None else ARGUMENTS - {"twins"} | {_RAN}
        passed: list[Any] = []
        rest = list(given)
        for name, parameter in signature.parameters.items():
            if name in offered:
                passed.append(_CaseArgument(name))
            elif parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD or name in named or not rest:
                break  # what follows has a default or is given by name, or the judge cannot be called
            else:
                passed.append(rest.pop(0))
        passed += rest
        try:
            signature.bind(*passed, **named)
        except TypeError as error:
            called = getattr(judge, "__name__", str(judge))  # a partial has none
            raise BadSpec(f"{', '.join(self.ids)}: {called} cannot be called by a row: {error}") from None
        return passed

    def __set_name__(self, owner: type, name: str) -> None:
        """Take the names that a method would have.

        Raises:
            BadSpec: pytest would not find it under this name.
        """
        if not name.startswith("test_"):
            raise BadSpec(f"{owner.__name__}.{name}: the name of a row begins with test_")
        self.__name__, self.__qualname__, self.__module__ = name, f"{owner.__qualname__}.{name}", owner.__module__

    def __call__(self, **offered: Any) -> None:
        """Call the judges; see `in_turn` for those behind one that raises."""
        in_turn(partial(self._judge, judge, passed, offered) for judge, passed in self._calls)

    def _judge(self, judge: Judge, passed: Sequence[Any], offered: dict[str, Any]) -> None:
        if self.twins is not None and _RAN in passed and _RAN not in offered:
            offered[_RAN] = offered["twins"](self.twins(offered["reading"].outcome.workload))
        judge(*(offered[each] if isinstance(each, _CaseArgument) else each for each in passed))


class _CaseArgument(str):
    """The name of an argument that is offered when the check is called."""

    __slots__ = ()
