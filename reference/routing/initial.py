"""The parameters of a router in a new model: what they have to be on one rank, and over ranks.

Source: arithmetic. Replicas that start with different values stay different, since gradients alone are reduced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

Problem = Literal["", "is not finite", "is the same for all experts"]


def usable(value: Tensor, *, by_expert: bool) -> Problem:
    """Say what is wrong with a parameter of any shape, "" if nothing is.

    Args:
        value: the parameter.
        by_expert: whether it is a weight (E, D), or a shard of one, whose rows have to differ.

    Rule: all elements are finite, and a weight has two rows that differ: with equal rows every token ties between all
    experts, which then learn the same.

    Degenerate: one row, or no element, is the same as itself: nothing is wrong.

    Decides: ROUTE-23. Source: arithmetic.

    >>> usable(torch.tensor([[0.5, torch.nan]]), by_expert=True), usable(torch.zeros(3, 2), by_expert=True)
    ('is not finite', 'is the same for all experts')
    >>> usable(torch.zeros(3), by_expert=False), usable(torch.eye(2), by_expert=True)
    ('', '')
    """
    if not bool(value.isfinite().all()):
        return "is not finite"
    if by_expert and len(value) > 1 and bool((value == value[:1]).all()):
        return "is the same for all experts"
    return ""


def differing(replicas: Mapping[int, Tensor]) -> list[int]:
    """List the ranks whose replica has other bytes, another shape or dtype than that of the first rank, ascending.

    Degenerate: one rank, or none, differs from nobody. 0 and -0 are different bytes.

    Decides: ROUTE-23. Source: arithmetic.

    >>> differing({0: torch.tensor([1.0]), 1: torch.tensor([1.0]), 3: torch.tensor([2.0])})
    [3]
    >>> differing({})
    []
    """
    if not replicas:
        return []
    first = replicas[min(replicas)]
    return [rank for rank in sorted(replicas) if not _same_bytes(replicas[rank], first)]


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(*(each.contiguous().flatten().view(torch.uint8) for each in (one, other)))
