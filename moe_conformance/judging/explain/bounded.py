"""Why a tensor is out of its bounds: one order of causes, whichever judge asks.

1. It is zero where it should not be.
2. A candidate of the judge: what one mistake would have given, `(words, tensor)`, the first that fits all elements.
3. One factor, with the names that it has.
4. The precision of a narrower dtype.

What is not finite has no cause here: the sentence shows the element. The widest scope that has a cause is told: the
whole result (`bounded_tokens`, `bounded_gradients`), then its parts, then every token or tensor by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from moe_conformance.judging.compare.bounded import Target, compare, factor, too_narrow, within
from moe_conformance.judging.findings import Finding, ratio_words

Candidate = tuple[str, Tensor]  # "gate and up were swapped", and what that gives
Found = tuple[list[Finding], float | None]  # and the factor if there is one for all


class Cause(NamedTuple):
    """Why something is wrong: by a factor that it has, or as the words say."""

    words: str
    ratio: float | None = None

    def sentence(self, who: str, example: str = "") -> str:
        """Tell it of "y", say, or of "the weights", with an example where a factor does not say it all.

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
    """Return the verb of "y", "dx" and "a gradient", or that of "the weights"."""
    return "are" if who.startswith(("the weights", "dweights")) else "is"


def cause_of(
    value: Tensor, target: Target, candidates: Iterable[Candidate], names: Mapping[str, float], dtype: torch.dtype
) -> Cause | None:
    """Return the first cause, in the order above, that explains every element of a wrong tensor.

    Args:
        value: what came back.
        target: what should have come back, and the error allowed.
        candidates: computed one by one, as far as they are asked for.
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
    """Whether a value is what a mistake gives, within the largest error that any element is allowed.

    The bounds are those of the right value; what a mistake gives may be larger, by larger weights, say. Where that
    bound would let the right value pass as well, every element keeps its own.
    """
    if not value.numel():
        return True
    spare = target.allowed.max().expand_as(target.allowed)
    if within(value, target.expected, spare):
        spare = target.allowed
    return within(value, candidate, spare)


def outside(who: str, rank: int, value: Tensor, target: Target) -> Finding:
    """Tell of one token or tensor what it is instead of what, without a cause."""
    worst, be = compare(value, *target), is_or_are(who)
    if not bool(torch.isfinite(value).all()):
        return Finding("not finite", f"{who} {be} {worst}", (rank,), worst.size)
    ratio = factor(value, *target, {})
    if ratio is None:
        return Finding("outside", f"{who} {be} {worst}", (rank,), worst.size)
    kind = "factor of a token" if ratio else "zero"
    return Finding(kind, f"{who} {be} {ratio_words(ratio, {})}: {worst}", (rank,), worst.size)
