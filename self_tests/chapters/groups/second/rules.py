"""Rules about layouts, by hand: deal experts out one by one, compare every two ranks."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence


def dealt_evenly(things: int, hands: int) -> bool:
    """Whether dealing things out in rounds ends with every hand full alike, and none empty."""
    hand = [0] * hands
    for thing in range(things):
        hand[thing % hands] += 1
    return min(hand) == max(hand) > 0


def divisible(experts: int, width: int, ep: int, etp: int) -> bool:
    """Whether every rank gets as many experts as any other, and every shard as many columns, and at least one."""
    if min(ep, etp, width) < 1:
        raise ValueError(f"ep {ep}, etp {etp}, width {width}")
    return dealt_evenly(max(experts, 0), ep) and dealt_evenly(width, etp)


def mixed_groups(groups: Sequence[Sequence[int]], stages: Sequence[int]) -> list[list[int]]:
    """The groups in which two ranks are of different stages."""
    return [list(group) for group in groups if any(stages[a] != stages[b] for a in group for b in group)]


def is_local(group: Collection[int], domain_of: Sequence[Hashable]) -> bool:
    """Whether no two members are of different domains."""
    if not group or any(not 0 <= rank < len(domain_of) for rank in group):
        raise ValueError(f"group {group} of {len(domain_of)} ranks")
    return all(domain_of[a] == domain_of[b] for a in group for b in group)
