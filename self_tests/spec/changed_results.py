"""Results of oracles, changed: every number, tensor and name in them has another value, and the form is kept.

A result has several changes, as one may be no change for the reader: an id that is one larger may name no expert, a
list that is reversed may be read as a set. Where an oracle is called on both sides of a comparison, an equal change of
both would not be seen: so it grows from call to call.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping, Set
from dataclasses import fields, is_dataclass
from fractions import Fraction
from functools import wraps
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

Way = Literal["larger", "smaller", "turned", "none", "hollow"]
_FAR = 1000  # what is added to numbers that are no integers
WAYS: tuple[Way, ...] = ("larger", "smaller", "turned", "none", "hollow")


def changed(value: Any, way: Way, hint: Any = None, by: int = 1) -> Any:
    """Return a result with everything in it changed.

    Args:
        value: What an oracle returned.
        way: "larger" adds to numbers, also within text, to the later elements of a row the more; "smaller" takes away;
            "turned" reverses orders, gives the values of a mapping to the next keys, and replaces a set by the other
            names that it may hold; "none" leaves collections empty and tensors zero, and makes None of text that may be
            None; "hollow" does so within a collection, and is otherwise "smaller". Truth values are negated.
        hint: The type that the oracle says it returns: where the value is None, or is empty and is to be larger or
            smaller, an example of it is made.
        by: How much "larger" adds to integers, and a thousandth of what it adds to other numbers; 1 or more.

    >>> changed((3, -1.5, True, "a"), "larger"), changed({"a": (1, 2)}, "turned"), changed((1, 2), "none")
    ((4, 998.5, False, 'a, changed'), {'a': (2, 1)}, ())
    >>> changed(((1, 2), (3,)), "hollow"), changed((), "larger", tuple[int, ...]), changed(None, "larger", str | None)
    (((), ()), (0,), 'changed')
    >>> changed("a", "larger", str | None), changed("a", "none", str | None)
    ('a, changed', None)
    >>> changed(torch.tensor([2, 0]), "larger").tolist(), changed(torch.tensor([2.0, 0.0]), "larger").tolist()
    ([3, 1], [1002.0, 2000.0])
    """
    if isinstance(value, Tensor):
        return _tensor(value, way, by)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float | Fraction):
        return _number(value, way, by)
    if isinstance(value, str):
        if way == "none" and type(None) in get_args(hint):
            return None
        others = [each for each in _parts_of(hint, Literal) if each != value]
        if way == "larger":
            value = re.sub(r"\d+", lambda number: str(int(number[0]) + by), value)
        return others[0] if others else f"{value}, changed"
    if value is None:
        return example(hint)
    if is_dataclass(value) and not isinstance(value, type):
        hints = get_type_hints(type(value))
        made = object.__new__(type(value))  # a check of its fields would end the judgement
        for field in fields(value):
            part = changed(getattr(value, field.name), way, hints[field.name], by)
            object.__setattr__(made, field.name, part)
        return made
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        hints = get_type_hints(type(value))
        return type(value)(
            *(changed(each, way, hints[name], by) for name, each in zip(value._fields, value, strict=True))
        )
    if isinstance(value, Mapping | list | tuple | Set):
        return _collection(value, way, hint, by)
    if callable(value):
        return _function(value, way, by)
    raise TypeError(f"a result of type {type(value).__name__} cannot be changed; add it here")


def example(hint: Any) -> Any:
    """Return a value of a type.

    >>> example(dict[str, tuple[int, float]]), example(frozenset[str]), example(int | None)
    ({'changed': (0, 0.0)}, frozenset({'changed'}), 0)
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return example(next(part for part in parts if part is not type(None)))
    if origin is Literal:
        return parts[0]
    if origin in (list, set, frozenset) or (origin is tuple and Ellipsis in parts):
        return origin([example(parts[0])])
    if origin is tuple:
        return tuple(example(part) for part in parts)
    if origin is not None and issubclass(origin, Mapping):
        return {example(parts[0]): example(parts[1])}
    if isinstance(hint, type) and issubclass(hint, Tensor):
        return torch.ones(1)
    if isinstance(hint, type) and (is_dataclass(hint) or hasattr(hint, "_fields")):
        return hint(**{name: example(part) for name, part in get_type_hints(hint).items()})
    return "changed" if hint is str else hint() if isinstance(hint, type) and issubclass(hint, int | float) else 0


def _parts_of(hint: Any, origin: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) is origin else ()


def _tensor(value: Tensor, way: Way, by: int) -> Tensor:
    if way == "none":
        return torch.zeros_like(value)
    if way == "turned":
        return value.flip(tuple(range(value.dim())))
    if value.dtype is torch.bool:
        return ~value
    if value.is_floating_point():
        finite = torch.nan_to_num(value)
        more = _FAR * by * torch.arange(1, 1 + value.shape[-1]) if value.dim() else torch.tensor(_FAR * by)
        return finite + more.to(value) if way == "larger" else finite - finite.abs() - 1
    return value + by if way == "larger" else (value - 1).clamp(min=0)


def _number(value: float | Fraction, way: Way, by: int) -> float | Fraction:
    if way == "none":
        return type(value)(0)
    if isinstance(value, int):
        return value + by if way == "larger" else max(value - 1, 0)
    if value in (float("inf"), float("-inf")):
        return 0.0
    if isinstance(value, Fraction):
        return value + _FAR * by if way == "larger" else value - abs(value) - 1
    return value + _FAR * by if way == "larger" else value - abs(value) - 1.0


def _collection(value: Any, way: Way, hint: Any, by: int) -> Any:
    made: Callable[..., Any] = type(value)
    inner = get_args(hint)
    if not value:
        return made(example(hint)) if inner and way in ("larger", "smaller") else value
    if way == "none":
        return made()
    if way == "hollow":
        way = "none"  # of what it holds
    if way == "turned" and len(value) > 1:
        if isinstance(value, Mapping):
            return dict(zip(value, [*list(value.values())[1:], next(iter(value.values()))], strict=True))
        if isinstance(value, list | tuple):
            return made(reversed(value))
    if (
        way == "turned"
        and isinstance(value, Set)
        and (others := {*_parts_of(inner[0] if inner else None, Literal)} - value)
    ):
        return made(others)
    if isinstance(value, Mapping):
        return {name: changed(each, way, inner[1] if inner else None, by) for name, each in value.items()}
    uniform = len(inner) == 1 or Ellipsis in inner
    hints = [inner[0]] * len(value) if uniform else [*inner, *([None] * len(value))]
    return made(changed(each, way, part, by) for each, part in zip(value, hints, strict=False))


def _function(value: Callable[..., Any], way: Way, by: int) -> Callable[..., Any]:
    @wraps(value)
    def with_changed_results(*args: Any, **given: Any) -> Any:
        return changed(value(*args, **given), way, by=by)

    return with_changed_results
