"""The exceptions that a backend raises. This module imports nothing of the suite."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal


class Unsupported(Exception):
    """The backend does not support a request of the suite.

    `by="library"`: the code under test itself raised: a *proved* refusal. Its exception is `__cause__`, and was raised
    in the library's frames, not in the adapter's module (see `Backend.library_modules`); else `by` counts as "adapter".
    `by="adapter"`: this adapter has no way to request it; reported as "not adapted", not as a property of the
    library. Raise it only while building: an exception from a running step is a failure.
    """

    def __init__(self, reason: str, by: Literal["library", "adapter"] = "adapter") -> None:
        super().__init__(reason)  # one sentence that names the value asked for
        self.by = by


class Malformed(Exception):
    """What the backend reports is inconsistent, such as counts that exceed the number of rows: a failure."""


class Overflow(RuntimeError):
    """A rank would receive more rows than its receive buffer holds: raised by dispatch on all ranks of the group.

    The dispatch leaves no state behind: the next one works as if it had not been called.
    """


@contextmanager
def refusals(*types: type[Exception], match: str) -> Iterator[None]:
    """Turn an *expected* exception of the library into `Unsupported(by="library")`. Use it around constructors only.

    `match` is a regular expression that the message must contain; any other exception propagates and is a failure.
    """
    try:
        yield
    except types as error:
        if not re.search(match, str(error)):
            raise
        raise Unsupported(str(error), by="library") from error
