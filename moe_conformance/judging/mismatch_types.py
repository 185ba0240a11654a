"""Exception types per fault, by which Hypothesis shrinks one fault at a time.

Hypothesis follows one exception type to its smallest batch. A class of `verdict` names what is wrong, and several
judges raise the same class; but two different wrong gradients are two faults, and so are exceptions that ranks raised
in different lines.
"""

from __future__ import annotations

from functools import cache

from moe_conformance.judging.verdict import Mismatch


def of_its_own_kind(mismatch: Mismatch, judge: str) -> Mismatch:
    """Return the mismatch in a subclass of its type that stands for this judge and this place of failure.

    The subclass has the name of its base class, and is the same one for the same fault.
    """
    kind = _kind(type(mismatch), judge, mismatch.place)  # type: ignore[arg-type]  # mypy takes no class for hashable
    return mismatch.retold(kind)


@cache
def _kind(base: type[Mismatch], judge: str, place: str) -> type[Mismatch]:
    return type(base.__name__, (base,), {"__doc__": base.__doc__})
