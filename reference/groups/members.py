"""Process groups: who works with whom, from the sizes (world, tp, cp, pp, ep, etp).

A rank has two addresses. The dense layers see (tp, cp, dp, pp), the expert layers (etp, ep, edp, pp), the
first axis fastest and pp slowest in both; dp and edp are what is left over. Neither fold divides the other:
ep need not divide dp. Built longhand, by counting ranks in nested loops.

Sources: Megatron-LM (Narayanan et al. 2021 section 3), MoE parallel folding (Liu et al. 2025 section 3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

Groups = tuple[tuple[int, ...], ...]


def valid(world: int, tp: int, cp: int, pp: int, ep: int, etp: int) -> str | None:
    """Say why the sizes make no layout, or None if they do.

    Rule: both folds fill the world: tp*cp*pp divides it, and so does etp*ep*pp. No other condition: ep need
    not divide dp.

    Decides: GROUP-02. Source: arithmetic.

    >>> valid(8, tp=2, cp=2, pp=2, ep=2, etp=2), valid(24, tp=2, cp=2, pp=2, ep=2, etp=1)
    (None, None)
    >>> valid(12, tp=3, cp=1, pp=2, ep=2, etp=4)
    'etp * ep * pp = 16 does not divide the world of 12 ranks'
    """
    sizes = {"world": world, "tp": tp, "cp": cp, "pp": pp, "ep": ep, "etp": etp}
    for name, size in sizes.items():
        if size < 1:
            return f"{name} = {size} is not a positive size"
    for fold in (("tp", "cp", "pp"), ("etp", "ep", "pp")):
        ranks = prod(sizes[axis] for axis in fold)
        if world % ranks:
            return f"{' * '.join(fold)} = {ranks} does not divide the world of {world} ranks"
    return None


def groups(world: int, tp: int, cp: int, pp: int, ep: int, etp: int) -> dict[str, Groups]:
    """Build every group, by name, each a tuple of ascending ranks, ordered by their first.

    Rule: the group of a rank along some axes is all ranks that share its other coordinates in that fold.
    dp_cp runs along data and context together, ep_etp (the exchange group) along ep and etp together, edp
    over the replicas of an expert shard.

    Degenerate: an axis of size 1 gives one group per rank. Sizes that are not `valid` are an error.

    Decides: EXPT-04, GROUP-01. Source: definition of the axes.

    >>> made = groups(12, tp=3, cp=1, pp=1, ep=2, etp=1)
    >>> made["tp"]
    ((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11))
    >>> made["ep"][:3], made["edp"]  # ep runs across the boundaries of tp
    (((0, 1), (2, 3), (4, 5)), ((0, 2, 4, 6, 8, 10), (1, 3, 5, 7, 9, 11)))
    """
    reason = valid(world, tp, cp, pp, ep, etp)
    if reason is not None:
        raise ValueError(reason)
    dp, edp = world // (tp * cp * pp), world // (etp * ep * pp)

    dense = []  # of every rank, its address
    for at_pp in range(pp):
        for at_dp in range(dp):
            for at_cp in range(cp):
                for at_tp in range(tp):
                    dense.append({"tp": at_tp, "cp": at_cp, "dp": at_dp, "pp": at_pp})

    expert = []
    for at_pp in range(pp):
        for at_edp in range(edp):
            for at_ep in range(ep):
                for at_etp in range(etp):
                    expert.append({"etp": at_etp, "ep": at_ep, "edp": at_edp, "pp": at_pp})

    return {
        "world": (tuple(range(world)),),
        "tp": _along(dense, "tp"),
        "cp": _along(dense, "cp"),
        "pp": _along(dense, "pp"),
        "dp": _along(dense, "dp"),
        "dp_cp": _along(dense, "dp", "cp"),
        "ep": _along(expert, "ep"),
        "etp": _along(expert, "etp"),
        "ep_etp": _along(expert, "ep", "etp"),
        "edp": _along(expert, "edp"),
    }


def _along(addresses: Sequence[Mapping[str, int]], *axes: str) -> Groups:
    """Put together the ranks whose addresses differ along the given axes only."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, address in enumerate(addresses):
        others = tuple(at for axis, at in address.items() if axis not in axes)
        found.setdefault(others, []).append(rank)
    return tuple(tuple(ranks) for ranks in found.values())
