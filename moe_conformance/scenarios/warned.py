"""Record the warnings of a block, from the module `warnings` and from logging."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class _Heard(logging.Handler):
    """Appends log messages of level WARNING or above to a list."""

    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.into = into

    def emit(self, record: logging.LogRecord) -> None:
        self.into.append(record.getMessage())


@contextmanager
def recorded() -> Iterator[Sequence[str]]:
    """Yield a list to which the warnings of the block are added when it ends."""
    said: list[str] = []
    heard = _Heard(said)
    root = logging.getLogger()
    root.addHandler(heard)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield said
        said += [str(warning.message) for warning in caught]
    finally:
        root.removeHandler(heard)
