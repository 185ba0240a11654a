"""Padding bounds: padding to a configured size, and what may and must be refused.

A rank that knows an upper bound of all token counts need not ask the others for theirs. It has to refuse
what the bound does not hold, and all ranks of the group together: one that leaves alone leaves the others
waiting.

Sources: arithmetic; semantics of collectives.
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_conformance.reference.token_padding.padding import ALIGNMENT, aligned, check_groups


def bounded_count(bound: int, *, alignment: int = ALIGNMENT) -> int:
    """Compute P from the bound B alone, the same on every rank and step: A ceil(B / A).

    Outputs and gradients are those without padding.

    Degenerate: B = 0 gives 0, which holds only ranks without tokens.

    Raises:
        ValueError: a negative bound, or an alignment below 1.

    Decides: PACK-11. Source: further padding rows have no effect.

    >>> bounded_count(65), bounded_count(12, alignment=5)
    (128, 15)
    """
    return aligned(bound, alignment=alignment)


def legal_refusals(
    refused_by_rank: Sequence[bool],
    tokens_by_rank: Sequence[int],
    exchange_groups: Sequence[Sequence[int]],
    bound: int,
    *,
    alignment: int = ALIGNMENT,
) -> tuple[bool, ...]:
    """Say of every exchange group whether its ranks may refuse the step, or go on with it, as they did.

    Args:
        refused_by_rank: whether the rank ended with an error.
        tokens_by_rank: T of every rank.
        exchange_groups: of every ep x etp group, its ranks.
        bound: B, what the caller promised that no T exceeds.
        alignment: A.

    Rule: with M the largest T of the group, M <= B: no rank refuses. M > A ceil(B / A), for which there are
    no rows: every rank does. In between the rows suffice although the promise is broken: all ranks or none.

    Degenerate: M = B is allowed. B already aligned leaves nothing in between. Groups answer apart.

    Raises:
        ValueError: lists of different lengths, negative counts, bad groups, alignment below 1, B < 0.

    Decides: PACK-12. Source: semantics of collectives.

    >>> refused, tokens = [False, True, True, True, False], [4, 6, 9, 0, 8]
    >>> legal_refusals(refused, tokens, [[0, 1], [2, 3], [4]], 5, alignment=8)
    (False, True, True)
    """
    check_groups(tokens_by_rank, exchange_groups)
    if len(refused_by_rank) != len(tokens_by_rank):
        raise ValueError(f"{len(refused_by_rank)} ranks answered, but {len(tokens_by_rank)} have tokens")
    rows = bounded_count(bound, alignment=alignment)
    legal = []
    for group in exchange_groups:
        largest = max(tokens_by_rank[rank] for rank in group)
        refusals = [refused_by_rank[rank] for rank in group]
        if largest <= bound:
            legal.append(not any(refusals))
        elif largest > rows:
            legal.append(all(refusals))
        else:
            legal.append(all(refusals) or not any(refusals))
    return tuple(legal)
