"""Which expert a row belongs to: what every shortcut of a backend's own experts has to leave as it is.

The output for a row is f_e(row) with the values that the weights of expert e have at that moment, whatever was
computed, derived or kept before. So the oracle of a shortcut is the layer's own, on these ids.

Source: Shazeer et al. 2017, equation 1: y is a function of the present tokens and weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def segments(counts: Sequence[int], experts: Sequence[int]) -> Tensor:
    """Name the expert of every row of a grouped call, int64 (R,).

    Args:
        counts: rows of each of the N local experts, in order.
        experts: their global ids.

    Rule: the first counts[0] rows are the first expert's, the next counts[1] the second's, and so on; equal counts and
    others alike.

    Degenerate: a count of 0 names no row; without experts there are no rows.

    Raises:
        ValueError: a negative count, or another number of counts than of experts.

    Decides: FAST-06, FAST-07, FAST-08, FAST-10, FAST-11, FAST-12, FAST-13. Source: Shazeer et al. 2017, equation 1.

    >>> segments([2, 0, 1], [4, 5, 6]).tolist()
    [4, 4, 6]
    """
    if len(counts) != len(experts) or any(count < 0 for count in counts):
        raise ValueError(f"counts {list(counts)} are no rows of the experts {list(experts)}")
    return torch.tensor(list(experts), dtype=torch.int64).repeat_interleave(
        torch.tensor(list(counts), dtype=torch.int64)
    )
