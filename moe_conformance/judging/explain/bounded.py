"""Causes of a tensor that is out of its bounds, in the order in which every judge tries them.

1. It is zero where it should not be.
2. It is what one mistake gives: the first candidate `(words, tensor)` of the judge that fits all elements.
3. It is the expected tensor times one factor, with the names of that factor.
4. It has the precision of a narrower dtype.

Values that are not finite have no cause here: the sentence shows the element. A cause is looked for in the whole result
first (`bounded_tokens`, `bounded_gradients`), then in its parts, then in every token or tensor by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from moe_conformance.judging.compare.bounded import Target, compare, factor, too_narrow, within
from moe_conformance.judging.findings import Finding, ratio_words

Candidate = tuple[str, Tensor]  # such as "gate and up were swapped", and the tensor that this mistake gives
Found = tuple[list[Finding], float | None]  # and the factor, if one factor explains all


class Cause(NamedTuple):
    """The cause of a wrong tensor, in words, and the factor if it is one."""

    words: str
    ratio: float | None = None

    def sentence(self, who: str, example: str = "") -> str:
        """Return a sentence with the cause; it contains the example unless the cause is a factor.

        `who` is the name of the result, such as "y" or "the weights".

        >>> Cause("2.000 x the expected value: ep", 2.0).sentence("y")
        'every element of y is 2.000 x the expected value: ep'
        >>> Cause("the gate was left out").sentence("y", "y of rank 0 token 3 is 1 instead of 2")
        'y is wrong; likely cause: the gate was left out; for example y of rank 0 token 3 is 1 instead of 2'
        """
        if self.ratio is not None:
            return f"every element of {who} is {self.words}"
        return f"{who} {is_or_are(who)} wrong; likely cause: {self.words}" + (
            f"; for example {example}" if example else ""
        )


def is_or_are(who: str) -> str:
    """Return "is" or "are", whichever follows the name of a result."""
    return "are" if who.startswith(("the weights", "dweights")) else "is"


def cause_of(
    value: Tensor, target: Target, candidates: Iterable[Candidate], names: Mapping[str, float], dtype: torch.dtype
) -> Cause | None:
    """Return the first cause, in the order of this module, that explains every element of a wrong tensor.

    Args:
        value: the actual tensor.
        target: the expected tensor, and the allowed error.
        candidates: computed one by one until one fits.
        names: factors that have a name (see `findings.ratio_words`).
        dtype: of the tokens.
    """
    if not bool(torch.isfinite(value).all()):
        return None
    for words, candidate in candidates if bool(value.any()) else ():
        if fits(value, candidate, target):
            return Cause(words)
    ratio = factor(value, *target, names)
    if ratio is not None:
        return Cause(ratio_words(ratio, names), ratio)
    narrow = too_narrow(value, target, dtype)
    return Cause(f"it was {narrow}") if narrow else None


def fits(value: Tensor, candidate: Tensor, target: Target) -> bool:
    """Return whether a tensor is what a mistake gives, within the largest error that any element is allowed.

    The bounds are those of the correct value; a mistake may give larger values, for example through larger weights.
    Where the largest error would let the correct value fit too, every element is compared with its own bound.
    """
    if not value.numel():
        return True
    spare = target.allowed.max().expand_as(target.allowed)
    if within(value, target.expected, spare):
        spare = target.allowed
    return within(value, candidate, spare)


def outside(who: str, rank: int, value: Tensor, target: Target) -> Finding:
    """Return a finding that states the worst element of one token or tensor, without a cause."""
    worst, be = compare(value, *target), is_or_are(who)
    if not bool(torch.isfinite(value).all()):
        return Finding("not finite", f"{who} {be} {worst}", (rank,), worst.size, worst.counted)
    ratio = factor(value, *target, {})
    if ratio is None:
        return Finding("outside", f"{who} {be} {worst}", (rank,), worst.size, worst.counted)
    kind = "factor of a token" if ratio else "zero"
    return Finding(kind, f"{who} {be} {ratio_words(ratio, {})}: {worst}", (rank,), worst.size, worst.counted)
