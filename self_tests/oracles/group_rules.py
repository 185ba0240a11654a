"""Rules about layouts, by hand: try all sizes, deal experts out one by one, count ranks like an odometer."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Sequence
from itertools import product

Fold = Sequence[tuple[str, int]]
AXES = ("tp", "cp", "pp", "ep", "etp")


def layouts(world: int) -> Iterator[dict[str, int]]:
    """All sizes that fill the world with both folds, in lexicographic order."""
    if world < 1:
        raise ValueError(f"world of {world}")
    wholes = [size for size in range(1, world + 1) if world % size == 0]
    for tp, cp, pp in product(wholes, repeat=3):
        if world % (tp * cp * pp):
            continue
        for ep, etp in product(wholes, repeat=2):
            if world % (ep * etp * pp) == 0:
                yield dict(zip(AXES, (tp, cp, pp, ep, etp), strict=True))


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


def addresses(fold: Fold) -> list[dict[str, int]]:
    """Every rank's coordinates, by counting up: the first axis turns first."""
    names = [name for name, _ in fold]
    if "pp" not in names or len(set(names)) != len(names) or any(size < 1 for _, size in fold):
        raise ValueError(f"fold {fold}")
    reversed_sizes = [range(size) for _, size in reversed(fold)]
    return [dict(zip(reversed(names), digits, strict=True)) for digits in product(*reversed_sizes)]


def stages(fold: Fold) -> list[int]:
    """Pipeline stage of every rank."""
    return [address["pp"] for address in addresses(fold)]


def stage_groups(fold: Fold) -> list[list[int]]:
    """Ranks that differ in their stage alone, ascending, by their first."""
    made = addresses(fold)
    found: list[list[int]] = []
    for rank, address in enumerate(made):
        others = {name: at for name, at in address.items() if name != "pp"}
        for group in found:
            if others.items() <= made[group[0]].items():
                group.append(rank)
                break
        else:
            found.append([rank])
    return found


def stages_agree(dense: Fold, expert: Fold) -> bool:
    """Whether both folds put every rank on the same stage and into the same pipeline."""
    if len(addresses(dense)) != len(addresses(expert)):
        raise ValueError(f"{dense} and {expert} are of different worlds")
    return (stages(dense), stage_groups(dense)) == (stages(expert), stage_groups(expert))


def mixed_groups(groups: Sequence[Sequence[int]], stages: Sequence[int]) -> list[list[int]]:
    """The groups in which two ranks are of different stages."""
    return [list(group) for group in groups if any(stages[a] != stages[b] for a in group for b in group)]


def is_local(group: Collection[int], domain_of: Sequence[Hashable]) -> bool:
    """Whether no two members are of different domains."""
    if not group or any(not 0 <= rank < len(domain_of) for rank in group):
        raise ValueError(f"group {group} of {len(domain_of)} ranks")
    return all(domain_of[a] == domain_of[b] for a in group for b in group)
