"""How far sums over microbatches may differ that add the same gradients in another order."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reordered_sum_bound(added: Sequence[Tensor], unit: float) -> Tensor:
    """Return by how much two sums of the same addends may differ, elementwise.

    Rule: 2 M u sum_m |g_m| for M addends, each sum being off by M u sum_m |g_m| at most; nothing for two addends or
    fewer, as a + b is b + a bit for bit.

    Decides: OVLP-05. Source: Higham, Accuracy and Stability of Numerical Algorithms (summation).

    Args:
        added: What every microbatch adds, all of one shape.
        unit: The unit roundoff of the dtype in which sums are kept.

    Returns:
        The bound, float64, of the shape of the addends.

    Raises:
        ValueError: there is no addend, or the unit is not between 0 and 1.

    >>> reordered_sum_bound([torch.tensor([1.0]), torch.tensor([-2.0]), torch.tensor([4.0])], 0.5).tolist()
    [21.0]
    >>> reordered_sum_bound([torch.tensor([1.0]), torch.tensor([-2.0])], 0.5).tolist()
    [0.0]
    """
    if not added:
        raise ValueError("a sum of no microbatch has no bound")
    if not 0 < unit < 1:
        raise ValueError(f"a unit roundoff lies between 0 and 1; {unit} does not")
    M = len(added)
    magnitude = torch.stack([each.double().abs() for each in added]).sum(0)
    return 2 * M * unit * magnitude if M > 2 else torch.zeros_like(magnitude)
