"""Injected faults of collectives; every function begins with a correct collective on the group."""

from __future__ import annotations

import torch
import torch.distributed as dist

from .. import RankContext
from .injection import NONMEMBER, Target, sum_over


def skip_the_last(context: RankContext, target: Target) -> str:
    """The faulty rank leaves out the last collective and returns."""
    if (group := target.group_of(context)) is None:
        return NONMEMBER
    sum_over(group)
    if context.rank != target.faulty:
        sum_over(group)
    return "returned"


def skip_one_in_the_middle(context: RankContext, target: Target) -> str:
    """The faulty rank leaves out the second of three collectives."""
    if (group := target.group_of(context)) is None:
        return NONMEMBER
    sum_over(group)
    if context.rank != target.faulty:
        _gather(group)
    sum_over(group, size=5)
    return "returned"


def take_another_kind(context: RankContext, target: Target) -> str:
    """The faulty rank calls all_gather where the others call all_reduce."""
    if (group := target.group_of(context)) is None:
        return NONMEMBER
    sum_over(group)
    if context.rank == target.faulty:
        _gather(group)
    else:
        sum_over(group)
    return "returned"


def take_another_group(context: RankContext, target: Target) -> str:
    """The faulty rank calls all_reduce on another group than the others."""
    if (group := target.group_of(context)) is None:
        return NONMEMBER
    sum_over(group)
    if context.rank == target.faulty:
        sum_over(target.other_group_of(context))
    else:
        sum_over(group)
    return "returned"


def take_another_size(context: RankContext, target: Target) -> str:
    """The faulty rank calls all_reduce with fewer elements than the others."""
    if (group := target.group_of(context)) is None:
        return NONMEMBER
    sum_over(group)
    sum_over(group, size=2 if context.rank == target.faulty else 7)
    return "returned"


def take_another_root(context: RankContext, target: Target) -> str:
    """The faulty rank broadcasts from itself; the others expect its partner to be the root."""
    if (group := target.group_of(context)) is None:
        return NONMEMBER
    sum_over(group)
    root = target.faulty if context.rank == target.faulty else target.partner
    dist.broadcast(torch.ones(3), src=root, group=group)
    return "returned"


def receive_from_nobody(context: RankContext, target: Target) -> str:
    """The faulty rank waits for a message that its partner does not send."""
    if (group := target.group_of(context)) is None:
        return NONMEMBER
    sum_over(group)
    if context.rank == target.faulty:
        dist.recv(torch.empty(3), src=target.partner, group=group)
    return "returned"


def never_wait(context: RankContext, target: Target) -> str:
    """All ranks start an asynchronous collective, and the faulty rank does not wait for it."""
    if (group := target.group_of(context)) is None:
        return NONMEMBER
    sum_over(group)
    handle = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    if context.rank != target.faulty:
        handle.wait()
    return "returned"


def begin_one_alone(context: RankContext, target: Target) -> str:
    """The faulty rank starts a collective that no other rank calls, does not wait for it, and returns."""
    if (group := target.group_of(context)) is None:
        return NONMEMBER
    sum_over(group)
    if context.rank == target.faulty:
        dist.all_reduce(torch.ones(3), group=group, async_op=True)
    return "returned"


def split_wrongly(context: RankContext, target: Target) -> str:
    """The faulty rank's splits do not sum to the rows that it sends."""
    if (group := target.group_of(context)) is None:
        return NONMEMBER
    sum_over(group)
    sent, received = _rows(group)
    rows = sum(sent)
    if context.rank == target.faulty:
        rows += 1
    dist.all_to_all_single(torch.empty(sum(received), 2), torch.ones(rows, 2), received, sent, group=group)
    return "returned"


def expect_fewer(context: RankContext, target: Target) -> str:
    """The faulty rank expects one row less from its partner than its partner sends."""
    return _expect(context, target, -1)


def expect_more(context: RankContext, target: Target) -> str:
    """The faulty rank expects one row more from its partner than its partner sends."""
    return _expect(context, target, +1)


def swap_splits(context: RankContext, target: Target) -> str:
    """The faulty rank exchanges two of its output splits; their sum stays right."""
    if (group := target.group_of(context)) is None:
        return NONMEMBER
    sum_over(group)
    sent, received = _rows(group)
    if context.rank == target.faulty:
        members = dist.get_process_group_ranks(group)
        others = [rank for rank in members if rank not in (target.faulty, target.partner)]
        one, two = members.index(target.partner), members.index((others or [target.faulty])[0])
        received[one], received[two] = received[two], received[one]
    return _exchange(group, sent, received)


def _expect(context: RankContext, target: Target, surplus: int) -> str:
    if (group := target.group_of(context)) is None:
        return NONMEMBER
    sum_over(group)
    sent, received = _rows(group)
    if context.rank == target.faulty:
        received[dist.get_process_group_ranks(group).index(target.partner)] += surplus
    return _exchange(group, sent, received)


def _rows(group: dist.ProcessGroup) -> tuple[list[int], list[int]]:
    """Returns how many rows this rank sends to, and receives from, each rank; the latter all differ."""
    size, here = group.size(), group.rank()
    rows = [[2 + (source + 2 * target) % size for target in range(size)] for source in range(size)]
    return rows[here], [row[here] for row in rows]


def _exchange(group: dist.ProcessGroup, sent: list[int], received: list[int]) -> str:
    dist.all_to_all_single(torch.empty(sum(received), 2), torch.ones(sum(sent), 2), received, sent, group=group)
    return "returned"


def _gather(group: dist.ProcessGroup) -> None:
    dist.all_gather([torch.empty(4) for _ in range(group.size())], torch.ones(4), group=group)
