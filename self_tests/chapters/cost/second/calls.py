"""Which collectives a step may make, by hand."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeVar

Call = TypeVar("Call")


class Moved(NamedTuple):
    """What one direction of a step moved: rows in dispatch and in combine, and bytes beside them."""

    dispatch: int
    combine: int
    beside: int


def legal_calls(calls: int, ranks: int) -> bool:
    """A group of one rank calls nothing."""
    if ranks < 1 or calls < 0:
        raise ValueError(f"{calls} calls of {ranks} ranks")
    return not (ranks == 1 and calls > 0)


def same_calls(calls_by_case: Sequence[Sequence[int]]) -> bool:
    """Every rank in every case makes as many calls as any other."""
    if not calls_by_case or any(not calls for calls in calls_by_case):
        raise ValueError(f"calls {calls_by_case}")
    return all(one == other for calls in calls_by_case for one in calls for others in calls_by_case for other in others)


def legal_backward(forward: Moved, backward: Moved, *, weight_bytes: int = 0) -> bool:
    """Backward brings back what came at most, and beside it the gradients of weights that travelled."""
    if min(*forward, *backward, weight_bytes) < 0:
        raise ValueError(f"{forward}, {backward}, {weight_bytes}")
    if backward.dispatch > forward.dispatch or backward.combine > forward.combine:
        return False
    return backward.beside <= weight_bytes


def settled(calls_by_step: Sequence[Sequence[Call]]) -> bool:
    """From the second step on, all are the same."""
    if len(calls_by_step) < 3:
        raise ValueError(f"{len(calls_by_step)} steps show nothing")
    later = [list(calls) for calls in calls_by_step[1:]]
    return all(calls == later[-1] for calls in later)


def growth(bytes_by_step: Sequence[int]) -> int:
    """What is allocated after a step and was not before it, in the step that leaves least."""
    if len(bytes_by_step) < 3:
        raise ValueError(f"{len(bytes_by_step)} steps show nothing")
    least = None
    for step in range(1, len(bytes_by_step)):
        left = bytes_by_step[step] - bytes_by_step[step - 1]
        if least is None or left < least:
            least = left
    assert least is not None
    return least if least > 0 else 0


def legal_reduction(group: Collection[int], edp_group: Collection[int]) -> bool:
    """Gradients of experts travel among the replicas of the expert, and nowhere else."""
    if not group or not edp_group:
        raise ValueError(f"groups {group}, {edp_group}")
    return all(rank in edp_group for rank in group)
