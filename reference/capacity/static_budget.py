"""Static budget: a receive buffer whose size is given as a factor of the balanced load.

Source: arithmetic, the share of a rank under balanced routing.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor, isfinite


def least_budget(
    tokens_by_rank: Sequence[int],
    top_k: int,
    *,
    factor: float,
    ep: int,
    etp: int = 1,
    held: int,
    multiple: int = 1,
) -> int:
    """Compute the smallest budget, in rows, that a rank may have.

    Args:
        tokens_by_rank: T_s of each of the ep etp ranks of the exchange group.
        top_k: K.
        factor: of the balanced load.
        ep: ranks that share the experts.
        etp: shards of an expert, each of which gets its rows.
        held: N, the experts of a rank.
        multiple: M, to which the rows of each expert are padded.

    Rule: floor(factor b) + N (M - 1), b = etp sum_s T_s K / (ep etp), in fractions: a load is a whole number, so
    that no load of at most factor b has more rows. Where factor b is within four float32 roundings of the nearest
    whole number, that number. A backend may round up.

    Degenerate: without a token the budget may be 0.

    Raises:
        ValueError: another number of ranks than ep etp, negative numbers, K or M < 1, a factor that is not finite
            or negative.

    Decides: EXCH-25. Source: arithmetic.

    >>> least_budget([5, 2], 3, factor=1.0, ep=2, held=4), least_budget([5, 2], 3, factor=1.0, ep=2, held=4, multiple=8)
    (10, 38)
    >>> least_budget([5, 2], 3, factor=1.0, ep=1, etp=2, held=4), least_budget([10], 1, factor=1.1, ep=1, held=1)
    (21, 11)
    """
    sizes = [*tokens_by_rank, held]
    if len(tokens_by_rank) != ep * etp or min(ep, etp) < 1:
        raise ValueError(f"tokens of {len(tokens_by_rank)} ranks for ep * etp = {ep} * {etp}")
    if min(sizes) < 0 or top_k < 1 or multiple < 1 or not isfinite(factor) or factor < 0:
        given = f"T_s and N {sizes}, K {top_k}, M {multiple}, factor {factor}"
        raise ValueError(f"{given}: need T, N >= 0, K, M >= 1 and a finite factor >= 0")
    if sum(tokens_by_rank) == 0:
        return 0
    rows = Fraction(factor) * etp * sum(tokens_by_rank) * top_k / (ep * etp)
    nearest = round(rows)
    whole = nearest if abs(rows - nearest) <= 4 * Fraction(1, 2**24) * rows else floor(rows)
    return whole + held * (multiple - 1)
