"""Whether an oracle decides: where its result is changed, or refused, a check must come to another verdict on a run.

A run is taken once and judged again for every change. Nothing that a judgement keeps is used by the next one: each has
copies of the outcome and of the runs of twins, and the caches of functions are emptied.
"""

from __future__ import annotations

import importlib
import pickle
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import count
from types import CodeType, FunctionType, ModuleType
from typing import Any, get_type_hints

from moe_conformance import reference
from moe_conformance.judging.shared.equivalence.runs import Ran
from moe_conformance.judging.verdict import Mismatch, Tally
from moe_conformance.reproducing.alongside import Twins
from moe_conformance.spec.checks import Check
from moe_conformance.workloads.twins import Twin
from self_tests.checks import judge
from self_tests.spec.changed_results import WAYS, Way, changed

Verdict = Mismatch | Tally | Exception  # an exception that is no mismatch: the check could not judge

_REFUSING = frozenset({"gradients.shards:whole", "gradients.shards:copies"})  # whose errors a judge makes a verdict of
_CACHING = ("moe_conformance.judging", "moe_conformance.chapters", "moe_conformance.reference")


class KeptTwins:
    """Runs the twins of a case once, and gives everyone who asks copies of what they brought back."""

    def __init__(self, twins: Twins) -> None:
        """Run nothing yet. `twins`: what runs them; nothing else asks it."""
        self._twins = twins
        self._kept: dict[str, bytes] = {}

    @property
    def variants(self) -> tuple[str, ...]:
        """All variants of the backend."""
        return self._twins.variants

    def __call__(self, asked: Sequence[Twin]) -> list[Ran]:
        """Return the runs of twins."""
        for ran in self._twins([twin for twin in asked if twin.how not in self._kept]):
            self._kept[ran.twin.how] = pickle.dumps(ran)
        self._twins.taken.clear()
        return [replace(pickle.loads(self._kept[twin.how]), twin=twin) for twin in asked]


@dataclass(frozen=True)
class Judgement:
    """A check and what it reads, to be judged again and again.

    Attributes:
        check: The check.
        stored: Its fixtures, without `twins`, as they were before anything read them.
        twins: What runs twins, where the check asks for any.
    """

    check: Check
    stored: bytes
    twins: KeptTwins | None = None

    def verdict(self) -> Verdict:
        """Return what the check makes of copies of its fixtures."""
        _forget()
        fixtures = pickle.loads(self.stored)
        try:
            return judge(self.check, **fixtures, twins=self.twins)
        except Exception as error:
            return error

    def called(self, names: Iterable[str]) -> frozenset[str]:
        """Return those of some oracles that the check calls, by others too."""
        found = set[str]()
        with ExitStack() as stack:
            for name in names:
                for function in oracles()[name]:
                    stack.enter_context(_replaced(function, partial(_noted, name=name, found=found)))
            vars(self)["unchanged"] = self.verdict()  # nothing is changed by noting
        return frozenset(found)

    @cached_property
    def unchanged(self) -> Verdict:
        """What the check makes of them where no oracle is changed."""
        return self.verdict()

    def decided_by(self, oracle: str) -> bool:
        """Return whether a run that passes fails where the oracle's result is changed, or the other way round."""
        before = self.unchanged
        if isinstance(before, Tally):
            return not before.vacuous and any(isinstance(each, Mismatch) for each in self._changed(oracle))
        passed = (each for each in self._changed(oracle) if isinstance(each, Tally))
        return isinstance(before, Mismatch) and any(not each.vacuous for each in passed)

    def _changed(self, oracle: str) -> Iterator[Verdict]:
        for way in (*WAYS, None) if oracle in _REFUSING else WAYS:
            with ExitStack() as stack:
                for function in oracles()[oracle]:
                    change = partial(_changed, way=way, hint=get_type_hints(function).get("return"), calls=count(1))
                    stack.enter_context(_replaced(function, change))
                found = self.verdict()
            yield found


@cache
def oracles() -> Mapping[str, tuple[FunctionType, ...]]:
    """Return the public functions of reference/ by name, `exchange.layer:gradients`, and those of rows of its tables.

    A table is a tuple of rows that begin with the id of a requirement: `config_rules.rules:RULES[RULE-06]`.
    """
    found: dict[str, tuple[FunctionType, ...]] = {}
    for info in pkgutil.walk_packages(reference.__path__, f"{reference.__name__}."):
        module, short = importlib.import_module(info.name), info.name.removeprefix(f"{reference.__name__}.")
        for name, value in vars(module).items():
            function = getattr(value, "__wrapped__", value)
            if isinstance(function, FunctionType) and function.__module__ == info.name and not name.startswith("_"):
                found[f"{short}:{name}"] = (function,)
        for name, functions in _rows(module):
            found[f"{short}:{name}"] = found.get(f"{short}:{name}", ()) + functions
    return found


def _rows(module: ModuleType) -> Iterator[tuple[str, tuple[FunctionType, ...]]]:
    for name, value in vars(module).items():
        rows = value if isinstance(value, tuple) and name.isupper() else ()
        for row in (row for row in rows if isinstance(row, tuple)):
            if functions := tuple(part for part in row if isinstance(part, FunctionType)):
                yield f"{name}[{row[0]}]", functions


def _noted(result: Any, name: str, found: set[str]) -> Any:
    found.add(name)
    return result


def _changed(result: Any, way: Way | None, hint: Any, calls: Iterator[int]) -> Any:
    if way is None:
        raise ValueError("the oracle refuses what it is asked")  # which some judges make a verdict of
    return changed(result, way, hint, next(calls))


@contextmanager
def _replaced(function: FunctionType, change: Callable[[Any], Any]) -> Iterator[None]:
    """Change what a function returns, whoever calls it: its code is another one, so that it may be held anywhere."""
    code = function.__code__
    original = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    function.__code__ = _calling(lambda *args, **given: change(original(*args, **given)), code)
    try:
        yield
    finally:
        function.__code__ = code
        _forget()


def _calling(replacement: Callable[..., Any], code: CodeType) -> CodeType:
    """Return code that calls something else, for a function that has this code and its closure."""
    template = _call.__code__
    constants = tuple(replacement if each == _PLACEHOLDER else each for each in template.co_consts)
    return template.replace(co_consts=constants, co_freevars=code.co_freevars)


_PLACEHOLDER = "what is called"


def _call(*args: Any, **given: Any) -> Any:
    called: Any = "what is called"
    return called(*args, **given)


def _forget() -> None:
    """Empty the caches of all functions that judge."""
    for name, module in list(sys.modules.items()):
        if name.startswith(_CACHING):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
