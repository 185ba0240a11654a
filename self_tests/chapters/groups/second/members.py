"""Process groups by hand: decode every rank into coordinates, then bucket the ranks that share the others.

Two readings of one rank number, the fastest coordinate first: dense (tp, cp, dp, pp) and expert
(etp, ep, edp, pp). Below them the rules about layouts: experts dealt out one by one, and every two ranks compared.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from functools import cache
from typing import NamedTuple

RankLists = tuple[tuple[int, ...], ...]

# Which reading a group belongs to, and the coordinates that its members may differ in.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "tp": ("dense", ("tp",)),
    "cp": ("dense", ("cp",)),
    "dp": ("dense", ("dp",)),
    "dp_cp": ("dense", ("dp", "cp")),
    "pp": ("dense", ("pp",)),
    "etp": ("expert", ("etp",)),
    "ep": ("expert", ("ep",)),
    "ep_etp": ("expert", ("ep", "etp")),
    "edp": ("expert", ("edp",)),
}


class Sizes(NamedTuple):
    """World size and the sizes of the five dimensions that are asked for; dp and edp are left over."""

    world: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1


def valid(sizes: Sizes) -> bool:
    """Both readings fill the world exactly: tp * cp * pp and etp * ep * pp each divide it."""
    dense = sizes.tp * sizes.cp * sizes.pp
    expert = sizes.etp * sizes.ep * sizes.pp
    return sizes.world % dense == 0 and sizes.world % expert == 0


def decode(rank: int, dimensions: tuple[tuple[str, int], ...]) -> dict[str, int]:
    """Coordinates of a rank, by taking off one digit after the other, the fastest first."""
    place = {}
    for name, size in dimensions:
        rank, place[name] = divmod(rank, size)
    return place


def groups(sizes: Sizes) -> dict[str, RankLists]:
    """Ranks of every group by name; members and groups in rising order of rank."""
    if not valid(sizes):
        raise ValueError(f"{sizes} does not fill its world")
    dp = sizes.world // (sizes.tp * sizes.cp * sizes.pp)
    edp = sizes.world // (sizes.etp * sizes.ep * sizes.pp)
    readings = {
        "dense": [("tp", sizes.tp), ("cp", sizes.cp), ("dp", dp), ("pp", sizes.pp)],
        "expert": [("etp", sizes.etp), ("ep", sizes.ep), ("edp", edp), ("pp", sizes.pp)],
    }
    made: dict[str, RankLists] = {"world": (tuple(range(sizes.world)),)}
    for name, (reading, free) in KINDS.items():
        made[name] = buckets(sizes.world, tuple(readings[reading]), free)
    return made


@cache
def buckets(world: int, dimensions: tuple[tuple[str, int], ...], free: tuple[str, ...]) -> RankLists:
    """Ranks that agree in all coordinates but the free ones. Cached: many layouts share a reading."""
    found: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank in range(world):
        place = decode(rank, dimensions)
        fixed = tuple((axis, index) for axis, index in place.items() if axis not in free)
        found.setdefault(fixed, []).append(rank)
    return tuple(sorted(tuple(ranks) for ranks in found.values()))


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
