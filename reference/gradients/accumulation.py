"""Accumulation: how far a parameter gradient may be from the sum of what microbatches and replicas add to it.

M microbatches, each of which gives a gradient of its own; W ranks that reduce; u the unit roundoff of a dtype, 2^-24 in
float32 and 2^-8 in bfloat16.

Sources: Higham, "Accuracy and Stability of Numerical Algorithms", section 4.2 (recursive summation); Micikevicius et
al. 2018 (sums of gradients in float32).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_FLOAT32, _BFLOAT16 = 2.0**-24, 2.0**-8


class Allowed(NamedTuple):
    """The sum, and the largest error of it, all float64 and of one shape."""

    total: Tensor
    wide: Tensor  # where nothing below float32 lies between two additions
    narrow: Tensor  # where every partial sum is rounded to the dtype of the parameter


def accumulated(parts_M: Tensor, *, ranks: int, tokens: int, narrow: bool) -> Allowed:
    """Add up the gradients (M, ...) that microbatches give, and bound the error of a sum of them.

    Args:
        parts_M: the gradient of every microbatch, summed over ranks whose parts have one sign.
        ranks: W, how many ranks reduce.
        tokens: how many tokens an expert may receive in a microbatch: the addends of its own sum.
        narrow: whether the parameter is bfloat16, else float32.

    Rule: (M + W + tokens) 2^-24 sum_m |g_m|, and for bfloat16 2^-8 (M + 1) max_m |g_m| more: the gradient of each
    microbatch may be rounded once, and the result once. If partial sums are rounded as well, 2^-8 (M + W + 1)
    sum_m |g_m|.

    Degenerate: zeros, and M = 0, are zero and allowed no error. In float32 both bounds are the first one.

    Decides: GRAD-17. Source: Higham, section 4.2.

    >>> found = accumulated(torch.tensor([[1.0], [1.0]]), ranks=1, tokens=5, narrow=False)
    >>> found.total.item(), found.wide.item() == found.narrow.item() == 8 * 2**-24 * 2
    (2.0, True)
    >>> accumulated(torch.tensor([[8.0], [0.5]]), ranks=1, tokens=0, narrow=True).narrow.item() == 4 * 2**-8 * 8.5
    True
    """
    wide_M = parts_M.double()
    M, size = len(wide_M), wide_M.abs().sum(0)
    wide = (M + ranks + tokens) * _FLOAT32 * size
    if not narrow:
        return Allowed(wide_M.sum(0), wide, wide)
    largest = wide_M.abs().amax(0) if M else torch.zeros_like(size)
    rounded = _BFLOAT16 * (M + ranks + 1) * size
    return Allowed(wide_M.sum(0), wide + _BFLOAT16 * (M + 1) * largest, rounded)
