"""Kinds of fault as exception types: Hypothesis follows one type, and so one fault, to its smallest batch.

A class of `verdict` names what is wrong, and several judges raise the same class. Two wrong gradients are two faults
all the same, and so are exceptions that ranks raised in different lines.
"""

from __future__ import annotations

from functools import cache

from moe_conformance.judging.verdict import Mismatch


def of_its_own_kind(mismatch: Mismatch, judge: str) -> Mismatch:
    """Return the mismatch in the type that only this judge raises, and only for faults of the same place.

    Its class is a subclass of the mismatch's, of the same name, and the same one for the same fault.
    """
    kind = _kind(type(mismatch), judge, mismatch.place)  # type: ignore[arg-type]  # mypy takes no class for hashable
    own = kind(mismatch.stage, mismatch.sentence, ranks=mismatch.ranks, ratio=mismatch.ratio)
    own.place, own.size = mismatch.place, mismatch.size
    return own


@cache
def _kind(base: type[Mismatch], judge: str, place: str) -> type[Mismatch]:
    return type(base.__name__, (base,), {"__doc__": base.__doc__})
