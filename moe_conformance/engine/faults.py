"""Turns an exception on a rank into text there, so that the driver never unpickles an exception."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# How gloo, the store and NCCL report a peer that has exited or does not respond.
_CONNECTION_LOST = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|socket closed|remote process exited"
    r"|failed to (recv|send), got \d+ bytes|connectFullMesh failed|timed out waiting \d+ ?ms for",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Fault:
    """An exception as text; `connection_lost` is True if it, or its cause, reports a lost peer."""

    error: str
    error_type: str
    error_attributes: Mapping[str, str | int | float | bool]
    traceback: str
    connection_lost: bool


def describe(error: BaseException) -> Fault:
    """Returns an exception as a Fault, without the frame that caught it."""
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
    """Returns the qualified name of a class; for a builtin class without its module."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:
        return f"(str() of the exception raised {type(broken).__qualname__})"


def _plain_attributes(error: BaseException) -> dict[str, str | int | float | bool]:
    # Exact types: the driver may not be able to import a subclass of str or int.
    with contextlib.suppress(Exception):  # a class may define __dict__ as anything
        return {name: value for name, value in vars(error).items() if type(value) in (str, int, float, bool)}
    return {}


def _chain(error: BaseException) -> Iterator[BaseException]:
    link: BaseException | None = error
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        yield link
        seen.add(id(link))
        link = link.__cause__ or link.__context__
