"""What built surfaces report of themselves: what they claim, and what is shown of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from functools import reduce

from moe_conformance.contract import Claims, Malformed


def claims_of(surface: object) -> Claims:
    """Return what a surface claims, `Claims()` where it has no such property.

    Raises:
        Malformed: it is no `Claims`; or `resolved`, which is for display, shows another value of one of its fields.
    """
    claims, name = _claimed(surface), type(surface).__name__
    shown = dict(getattr(surface, "resolved", {}))
    for each in fields(claims):
        claimed = getattr(claims, each.name)
        if each.name in shown and str(shown[each.name]) != str(claimed):
            said = f"{name}.resolved[{each.name!r}] is {shown[each.name]!r}, and {name} claims {claimed!r}"
            raise Malformed(f"{said}: no check reads claims there; use claims = Claims({each.name}=...)")
    return claims


def _claimed(surface: object) -> Claims:
    # An AttributeError inside the property must not read as its absence.
    has_claims = hasattr(type(surface), "claims") or hasattr(surface, "claims")
    claims = surface.claims if has_claims else Claims()  # type: ignore[attr-defined]
    if not isinstance(claims, Claims):
        raise Malformed(f"{type(surface).__name__}.claims is of type {type(claims).__name__}; expected Claims")
    return claims


def without_noise(surface: object) -> None:
    """Put a surface that claims noise in training into evaluation mode, in which it has none; others stay as they are.

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
    """Return what the surfaces of a run claim together.

    Raises:
        Malformed: two of them claim different values of one field, neither of which is the default.
    """
    return reduce(Claims.joined, map(claims_of, surfaces), Claims())


def shown_of(surfaces: Iterable[object], claims: Claims) -> dict[str, str]:
    """Return what a report shows: `resolved` of every surface, and what the claims change."""
    shown = [dict(getattr(surface, "resolved", {})) for surface in surfaces] + [dict(claims.changed)]
    return {key: str(value) for each in shown for key, value in each.items()}


def optional_of(surfaces: Iterable[object]) -> tuple[str, ...]:
    """Return what every surface names of that which it uses and can do without, where it names anything."""
    shown = [getattr(surface, "resolved", {}) for surface in surfaces]
    return tuple(str(each["optional"]) for each in shown if "optional" in each)
