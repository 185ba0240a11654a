"""Read what built surfaces report: their claims, and what they resolved to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from functools import reduce

from moe_conformance.contract import Claims, Malformed


def claims_of(surface: object) -> Claims:
    """Return the claims of a surface; `Claims()` if it has no property `claims`.

    Raises:
        Malformed: the property is no `Claims`; or `resolved`, which is for display, shows another value of a field.
    """
    claims, name = _claimed(surface), type(surface).__name__
    shown = dict(getattr(surface, "resolved", {}))
    for field in fields(claims):
        claimed = getattr(claims, field.name)
        if field.name in shown and str(shown[field.name]) != str(claimed):
            said = f"{name}.resolved[{field.name!r}] is {shown[field.name]!r}, and {name} claims {claimed!r}"
            raise Malformed(f"{said}: no check reads claims there; use claims = Claims({field.name}=...)")
    return claims


def _claimed(surface: object) -> Claims:
    # An AttributeError inside the property must not read as its absence.
    has_claims = hasattr(type(surface), "claims") or hasattr(surface, "claims")
    claims = surface.claims if has_claims else Claims()  # type: ignore[attr-defined]
    if not isinstance(claims, Claims):
        raise Malformed(f"{type(surface).__name__}.claims is of type {type(claims).__name__}; expected Claims")
    return claims


def without_noise(surface: object) -> None:
    """Put a surface that claims noise in training into evaluation mode; leave other surfaces unchanged.

    Raises:
        Malformed: it claims noise and has no `train(mode)`.
    """
    if _claimed(surface).noise == "no":
        return
    train = getattr(surface, "train", None)
    if not callable(train):
        sentence = f"{type(surface).__name__} claims noise = 'training' and has no method train(mode)"
        raise Malformed(f"{sentence}; expected one, as nn.Module has, with which noise is switched off")
    train(False)


def claims_of_all(surfaces: Iterable[object]) -> Claims:
    """Return the claims of all surfaces of a run as one.

    Raises:
        Malformed: two of them claim different values of one field, neither of which is the default.
    """
    return reduce(Claims.joined, map(claims_of, surfaces), Claims())


def shown_of(surfaces: Iterable[object], claims: Claims) -> dict[str, str]:
    """Return the entries for a report: `resolved` of every surface, and the claims other than defaults."""
    shown = [dict(getattr(surface, "resolved", {})) for surface in surfaces] + [dict(claims.changed)]
    return {key: str(value) for entries in shown for key, value in entries.items()}


def optional_of(surfaces: Iterable[object]) -> tuple[str, ...]:
    """Return the optional parts that surfaces use: `resolved["optional"]` of every surface that has it."""
    shown = [getattr(surface, "resolved", {}) for surface in surfaces]
    return tuple(str(entries["optional"]) for entries in shown if "optional" in entries)
