"""What is warned of while something runs, by the module `warnings` or in a log."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class _Heard(logging.Handler):
    """Keeps the messages of warnings and worse."""

    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.into = into

    def emit(self, record: logging.LogRecord) -> None:
        self.into.append(record.getMessage())


@contextmanager
def recorded() -> Iterator[Sequence[str]]:
    """Yield a list that has, in the end, what was warned of inside."""
    said: list[str] = []
    heard = _Heard(said)
    root = logging.getLogger()
    root.addHandler(heard)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
        said += [str(each.message) for each in caught]
    finally:
        root.removeHandler(heard)
