"""Check the values of options against the annotations of their class."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints


@cache
def _fields(kind: type[Any]) -> list[tuple[str, Any, Callable[[object], bool]]]:
    """Return the name of every option of a class, its annotation, and a test of values against the annotation."""
    return [(name, hint, _test_of(hint)) for name, hint in get_type_hints(kind).items()]


def _fits(value: object, hint: Any) -> bool:
    """Return whether a value matches an annotation: a class, `Literal`, union or tuple of these. Floats are finite."""
    return _test_of(hint)(value)


@cache
def _test_of(hint: Any) -> Callable[[object], bool]:
    """Return a function that tests whether a value matches an annotation.

    The annotation is analysed once, since thousands of values are tested.
    """
    choices = get_args(hint)
    if get_origin(hint) is Literal:
        return lambda value: isinstance(value, str) and value in choices
    if get_origin(hint) is UnionType:
        tests = [_test_of(choice) for choice in choices]
        return lambda value: any(test(value) for test in tests)
    if get_origin(hint) is tuple:
        return partial(_fits_tuple, choices)
    if hint is int or hint is float:
        kinds = (int, float) if hint is float else int
        return lambda value: isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
    return lambda value: hint is Any or isinstance(value, hint)


def _fits_tuple(choices: tuple[Any, ...], value: object) -> bool:
    if not isinstance(value, tuple):
        return False
    hints = choices[:1] * len(value) if choices[1:] == (...,) else choices
    return len(value) == len(hints) and all(map(_fits, value, hints))


def _allowed(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return f"one of {', '.join(map(repr, get_args(hint)))}"
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")


def check(options: Any, section: str = "", **least: int) -> None:
    """Raise ValueError for a value that its annotation does not allow, or for a number (of a tuple, any) below `least`.

    `section` begins the name of the option, as in "capacity.factor". Values that are wrong only together, such as
    more selected experts than experts, are refused by a backend.
    """
    for name, hint, fits in _fields(type(options)):  # type: ignore[arg-type]  # it takes __hash__ of instances for it
        value = getattr(options, name)
        if not fits(value):
            raise ValueError(f"{section}{name} = {value!r}; allowed: {_allowed(hint)}")
    for name, allowed in least.items():
        value = getattr(options, name)
        numbers = value if isinstance(value, tuple) else () if value is None else (value,)
        if any(number < allowed for number in numbers):
            raise ValueError(f"{section}{name} = {value!r}; allowed: {allowed} or more")
