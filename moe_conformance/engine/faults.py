"""An exception on a rank, put into plain words there, so that the driver never unpickles an exception."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# How gloo, the store and NCCL speak of a peer that is gone or keeps silent.
_CONNECTION_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|remote process exited"
    r"|failed to (recv|send), got \d+ bytes|connectFullMesh failed|timed out waiting \d+ ?ms for",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Fault:
    """An exception in words; `connection_lost`: it, or what caused it, says that a peer has gone away."""

    error: str
    error_type: str
    error_attributes: Mapping[str, str | int | float | bool]
    traceback: str
    connection_lost: bool


def describe(error: BaseException) -> Fault:
    """Puts an exception into words; its traceback begins below the frame that caught it."""
    below = error.__traceback__.tb_next if error.__traceback__ else None
    return Fault(
        error=one_line(error),
        error_type=type_name(type(error)),
        error_attributes=_plain_attributes(error),
        traceback="".join(traceback.format_exception(type(error), error, below)),
        connection_lost=any(_CONNECTION_LOST.search(_message(link)) for link in _chain(error)),
    )


def one_line(error: BaseException) -> str:
    """Returns `"ValueError: first line of the message"`."""
    lines = [line.strip() for line in _message(error).splitlines() if line.strip()]
    return f"{type(error).__qualname__}: {lines[0]}" if lines else type(error).__qualname__


def type_name(kind: type[BaseException]) -> str:
    """Returns the qualified name of a class, without the module for a builtin one."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"(its message cannot be made: {type(broken).__qualname__})"


def _plain_attributes(error: BaseException) -> dict[str, str | int | float | bool]:
    # Exact types: a subclass of str or int need not be known to the driver.
    with contextlib.suppress(Exception):  # a class may make of __dict__ what it likes
        return {name: value for name, value in vars(error).items() if type(value) in (str, int, float, bool)}
    return {}


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__ or link.__context__
