"""Caches: results per run, and an iterable that computes its items once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, cast

from moe_conformance.judging.observed.run import Reading
from moe_conformance.scenarios.outcome import Outcome

T = TypeVar("T")
Run = TypeVar("Run", Reading, Outcome)


def once(run: Run, make: Callable[[Run], T]) -> T:
    """Return `make(run)` of a reading or an outcome, computed at the first call and cached on `run`.

    Many checks read the same run. The cache is freed together with the run.
    """
    kept, name = vars(run), f"{make.__module__}.{make.__qualname__}"
    if name not in kept:
        kept[name] = make(run)
    return cast(T, kept[name])


class Kept(Generic[T]):
    """An iterable over the items of an iterator, each computed when it is first needed and kept for later iterations.

    >>> squares = Kept(n * n for n in range(3))
    >>> next(iter(squares)), list(squares), list(squares)
    (0, [0, 1, 4], [0, 1, 4])
    """

    def __init__(self, source: Iterator[T]) -> None:
        """Keep the items of `source`, which must not be used by anything else."""
        self._source, self._items = source, list[T]()

    def __iter__(self) -> Iterator[T]:
        """Yield the kept items, then the remaining ones."""
        at = 0
        while True:
            if at == len(self._items):
                try:
                    self._items.append(next(self._source))
                except StopIteration:
                    return
            yield self._items[at]
            at += 1
