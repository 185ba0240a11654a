"""Group rules: which sizes make a layout, what they divide, and what a group may span.

Sources: MoE Parallel Folding (Liu et al. 2025 section 3); arithmetic of mixed radix numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from itertools import product
from math import prod

from reference.groups import valid

Fold = Sequence[tuple[str, int]]
"""Axes and their sizes, the fastest first."""


def layouts(world: int) -> tuple[dict[str, int], ...]:
    """List the sizes of every layout of a world, ascending by tp, then cp, pp, ep, etp.

    Rule: all that `groups.valid` finds nothing against. Sizes that do not divide the world are never among
    them. Degenerate: a world of one has one layout.

    Raises:
        ValueError: a world < 1.

    Decides: GROUP-02. Source: MoE Parallel Folding.

    >>> len(layouts(1)), len(layouts(2)), len(layouts(8)), layouts(2)[-1]
    (1, 10, 146, {'tp': 2, 'cp': 1, 'pp': 1, 'ep': 2, 'etp': 1})
    """
    if world < 1:
        raise ValueError(f"a world of {world} ranks has no layout")
    divisors = [size for size in range(1, world + 1) if world % size == 0]
    found = [dict(zip(("tp", "cp", "pp", "ep", "etp"), sizes, strict=True)) for sizes in product(divisors, repeat=5)]
    return tuple(sizes for sizes in found if valid(world, **sizes) is None)


def indivisible(experts: int, width: int, ep: int, etp: int) -> str | None:
    """Say why E experts of width F cannot be cut evenly, with both numbers, or None.

    Rule: ep divides E, and E >= 1 experts leave none of the ep ranks without one; etp divides F.

    Degenerate: E = ep holds one expert each, F = etp one column; ep = 1 and etp = 1 divide everything.

    Raises:
        ValueError: an ep, etp or F < 1, with which no layer is asked for.

    Decides: GROUP-03. Source: arithmetic, N = E / ep and F / etp.

    >>> indivisible(6, 10, ep=3, etp=5), indivisible(6, 10, ep=4, etp=5), indivisible(6, 10, ep=3, etp=4)
    (None, 'E = 6 experts over ep = 4 ranks', 'width F = 10 over etp = 4 shards')
    """
    if min(width, ep, etp) < 1:
        raise ValueError(f"F {width}, ep {ep}, etp {etp}: need all of them to be 1 or more")
    if experts < max(ep, 1) or experts % ep:
        return f"E = {experts} experts over ep = {ep} ranks"
    return f"width F = {width} over etp = {etp} shards" if width % etp else None


def stages(fold: Fold) -> tuple[int, ...]:
    """Say of every rank which pipeline stage it is in: its coordinate along pp.

    Rule: ranks count the first axis fastest.

    Raises:
        ValueError: no axis pp, an axis twice, a size < 1.

    Decides: GROUP-04. Source: arithmetic of mixed radix numbers.

    >>> stages([("tp", 2), ("pp", 3), ("dp", 1)])
    (0, 0, 1, 1, 2, 2)
    """
    return tuple(dict(address)["pp"] for address in _addresses(fold))


def stage_groups(fold: Fold) -> tuple[tuple[int, ...], ...]:
    """List the groups along pp, each ascending, by their first rank: ranks that differ in their stage alone.

    Raises as `stages`.

    Decides: GROUP-04. Source: MoE Parallel Folding.

    >>> stage_groups([("tp", 2), ("pp", 3), ("dp", 1)])
    ((0, 2, 4), (1, 3, 5))
    """
    found: dict[tuple[tuple[str, int], ...], list[int]] = {}
    for rank, address in enumerate(_addresses(fold)):
        others = tuple(part for part in address if part[0] != "pp")
        found.setdefault(others, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())


def stages_agree(dense: Fold, expert: Fold) -> bool:
    """Return whether both folds give every rank the same stage and the same group along pp.

    Rule: so it is if pp = 1, or if the sizes of the axes before pp have the same product in both. An order in which
    they do not is to be refused. Last in both, or first in both, pp always agrees.

    Raises:
        ValueError: folds of different worlds; as `stages`.

    Decides: GROUP-04. Source: MoE Parallel Folding; arithmetic of mixed radix numbers.

    >>> dense, expert = [("tp", 2), ("dp", 3), ("pp", 2)], [("ep", 3), ("edp", 2), ("pp", 2)]
    >>> stages_agree(dense, expert)
    True
    >>> stages_agree([dense[0], dense[2], dense[1]], [expert[0], expert[2], expert[1]])
    False
    """
    if prod(size for _, size in dense) != prod(size for _, size in expert):
        raise ValueError(f"folds {list(dense)} and {list(expert)} are of different worlds")
    return stages(dense) == stages(expert) and stage_groups(dense) == stage_groups(expert)


def mixed_groups(groups: Sequence[Sequence[int]], stage_of: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """List the groups with ranks of more than one stage. No ep, etp, ep_etp or edp group may be among them.

    Decides: GROUP-04. Source: a stage holds its own layers, and their experts.

    >>> mixed_groups([(0, 1), (2, 3), (1, 2)], [0, 0, 1, 1])
    ((1, 2),)
    """
    return tuple(tuple(group) for group in groups if len({stage_of[rank] for rank in group}) > 1)


def is_local(group: Collection[int], domain_of: Sequence[Hashable]) -> bool:
    """Return whether a group stays within one fast transport domain.

    Rule: all its members have the same domain: their host, or what the backend states. Neither its size nor the
    number of devices that a process sees decides.

    Degenerate: a group of one rank is local.

    Raises:
        ValueError: no ranks, a rank without a domain.

    Decides: GROUP-05. Source: arithmetic, a group of 2 can span hosts, a group of 16 lie in one domain.

    >>> hosts = ["a"] * 3 + ["b"] * 2
    >>> is_local([0, 2], hosts), is_local([2, 3], hosts), is_local([0, 1, 3], hosts), is_local([4], hosts)
    (True, False, False, True)
    """
    if not group or not all(0 <= rank < len(domain_of) for rank in group):
        raise ValueError(f"group {list(group)} of {len(domain_of)} ranks with a domain")
    return len({domain_of[rank] for rank in group}) == 1


def _addresses(fold: Fold) -> list[tuple[tuple[str, int], ...]]:
    """Give every rank its coordinates, (axis, at), the last axis first, as a counter shows them."""
    axes = [axis for axis, _ in fold]
    if "pp" not in axes or len(set(axes)) < len(axes) or any(size < 1 for _, size in fold):
        raise ValueError(f"fold {list(fold)}: need different axes of sizes from 1 up, pp among them")
    slowest_first = list(reversed(fold))
    return list(product(*([(axis, at) for at in range(size)] for axis, size in slowest_first)))
