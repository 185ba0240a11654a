"""Group rules: what the sizes of a layout divide, and what a group may span.

Source: MoE Parallel Folding (Liu et al. 2025 section 3).
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence


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
