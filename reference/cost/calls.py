"""Cost in calls: which collectives a step may make.

A call is whatever the record of one is: these functions only count and compare.

Sources: arithmetic; GShard (Lepikhin et al. 2021; expert parameters are not replicated).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any, NamedTuple


class Moved(NamedTuple):
    """What one pass sent: rows of width D by dispatch and by combine, and bytes beside them."""

    dispatch: int
    combine: int
    beside: int


def legal_calls(calls: int, ranks: int) -> bool:
    """Return whether an exchange among so many ranks may make so many calls in a forward or a backward.

    Rule: alone, none: nothing has to move. How many a larger group needs is not fixed.

    Decides: COST-01. Source: arithmetic.

    >>> legal_calls(0, 1), legal_calls(1, 1), legal_calls(7, 2)
    (True, False, True)
    """
    if calls < 0 or ranks < 1:
        raise ValueError(f"{calls} calls among {ranks} ranks: need calls >= 0 and a rank")
    return calls == 0 or ranks > 1


def same_calls(calls_by_case: Sequence[Sequence[int]]) -> bool:
    """Return whether the number of calls depends on nothing: of every case, that of every rank.

    Rule: one number for all. Cases differ in T, ids, E and K, not in layout or configuration.

    Raises:
        ValueError: no case, a case without ranks.

    Decides: COST-02. Source: arithmetic, one exchange per direction is enough for any routing.

    >>> same_calls([[4, 4], [4, 4]]), same_calls([[4, 4], [3, 3]]), same_calls([[4, 3]])
    (True, False, False)
    """
    if not calls_by_case or not all(calls_by_case):
        raise ValueError("no case, or one without ranks: nothing to compare")
    return len({calls for by_rank in calls_by_case for calls in by_rank}) == 1


def legal_backward(forward: Moved, backward: Moved, *, weight_bytes: int = 0) -> bool:
    """Return whether a backward moves no more than its forward.

    Args:
        forward: what dispatch and combine moved.
        backward: what their backwards moved, each beside its own.
        weight_bytes: of the gradients of all weights that were sent with the rows of dispatch.

    Rule: no more rows in either direction; beside them one number for each weight that came with a row, and
    neither counts nor indices again.

    Degenerate: x that asks for no gradient may move nothing.

    Decides: COST-05. Source: the adjoint of an exchange is the exchange with splits transposed.

    >>> forward = Moved(dispatch=7, combine=5, beside=96)
    >>> legal_backward(forward, Moved(7, 5, 28), weight_bytes=28), legal_backward(forward, Moved(7, 5, 28))
    (True, False)
    >>> legal_backward(forward, Moved(5, 7, 0))
    False
    """
    if min(*forward, *backward, weight_bytes) < 0:
        raise ValueError(f"{forward}, {backward}, {weight_bytes} bytes: nothing moves less than nothing")
    rows_fit = backward.dispatch <= forward.dispatch and backward.combine <= forward.combine
    return rows_fit and backward.beside <= weight_bytes


def settled(calls_by_step: Sequence[Sequence[Any]]) -> bool:
    """Return whether a rank makes the same calls in each step after the first, given all calls of every step.

    Rule: equal sequences, each call with its kind, group, splits and bytes.

    Raises:
        ValueError: fewer than three steps.

    Decides: COST-07. Source: arithmetic, a function of its inputs.

    >>> settled([["build", "a"], ["a", "b"], ["a", "b"]]), settled([["a"], ["a", "b"], ["b", "a"]])
    (True, False)
    """
    if len(calls_by_step) < 3:
        raise ValueError(f"{len(calls_by_step)} steps: the first may differ, so that two say nothing")
    return all(list(calls) == list(calls_by_step[1]) for calls in calls_by_step[1:])


def growth(bytes_by_step: Sequence[int]) -> int:
    """Compute the bytes that every step leaves allocated: the least by which their number grows from step to step.

    Args: the bytes that are allocated after each step, the first of which may have allocated buffers that stay.

    Rule: min over steps of after this step less after the one before. A buffer that grows once does not count.

    Degenerate: a step that ends with fewer than it began, 0.

    Raises:
        ValueError: fewer than three steps.

    Decides: COST-07. Source: arithmetic, a function of its inputs.

    >>> growth([900, 930, 961, 991]), growth([900, 930, 930, 960]), growth([900, 800, 830])
    (30, 0, 0)
    """
    if len(bytes_by_step) < 3:
        raise ValueError(f"{len(bytes_by_step)} steps: the first may differ, so that two say nothing")
    return max(0, min(after - before for before, after in pairwise(bytes_by_step)))


def legal_reduction(group: Collection[int], edp_group: Collection[int]) -> bool:
    """Return whether elements of a rank's expert gradients may appear in a call among these ranks.

    Rule: only among replicas, all or some of the rank's edp group. A call over one rank moves nothing.

    Raises:
        ValueError: no ranks in either group.

    Decides: COST-08. Source: GShard; MoE Parallel Folding (Liu et al. 2025).

    >>> legal_reduction([1, 5], [1, 3, 5]), legal_reduction([1, 2], [1, 3, 5]), legal_reduction([1], [1])
    (True, False, True)
    """
    if not group or not edp_group:
        raise ValueError(f"a call among {list(group)}, replicas on {list(edp_group)}: need ranks in both")
    return set(group) <= set(edp_group)
