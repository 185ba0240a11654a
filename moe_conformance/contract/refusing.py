"""How a backend says that it cannot do what it is asked for, and that a receive buffer is too small."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from moe_conformance.contract.config import Unsupported


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
