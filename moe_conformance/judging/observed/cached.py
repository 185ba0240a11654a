"""Computing once: what belongs to a reading that does not know it, and the items of an iterator that is costly."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar, cast

from moe_conformance.judging.observed.run import Reading

T = TypeVar("T")


def once(reading: Reading, make: Callable[[Reading], T]) -> T:
    """Return `make(reading)`, computed at the first call and kept where the reading's cached properties are kept."""
    kept, name = vars(reading), f"{make.__module__}.{make.__qualname__}"
    if name not in kept:
        kept[name] = make(reading)
    return cast(T, kept[name])


class Kept(Generic[T]):
    """Iterates over the same items again and again, and computes each of them when it is first asked for.

    >>> squares = Kept(n * n for n in range(3))
    >>> next(iter(squares)), list(squares), list(squares)
    (0, [0, 1, 4], [0, 1, 4])
    """

    def __init__(self, source: Iterator[T]) -> None:
        """Keep the items of `source`, which nobody else may draw from."""
        self._source, self._items = source, list[T]()

    def __iter__(self) -> Iterator[T]:
        """Yield what is kept, then what is left."""
        at = 0
        while True:
            if at == len(self._items):
                try:
                    self._items.append(next(self._source))
                except StopIteration:
                    return
            yield self._items[at]
            at += 1
