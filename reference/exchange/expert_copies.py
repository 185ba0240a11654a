"""Expert copies: redundant copies of busy experts, of which one answers each pair.

A copy lies at a physical place, and a place is on one rank or, cut into etp shards, on several. Which copy
answers is free; that exactly one does is not.

Source: DeepSeek-V3 section 3.4 (redundant experts).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor


class Handed(NamedTuple):
    """A row that a rank's experts received: slot `slot` of token `token` of `source`, for a physical place."""

    source: int
    token: int
    slot: int
    place: int
    rank: int


def wrongly_handed(
    ids_by_source: Sequence[Tensor],
    handed: Sequence[Handed],
    copies: Sequence[Sequence[int]],
    ranks_of_place: Sequence[Sequence[int]],
) -> tuple[tuple[int, int, int], ...]:
    """List the (source, token, slot) that were not delivered to exactly one copy of their expert, ascending.

    Args:
        ids_by_source: of every rank of one exchange group, int64 (T_s, K) logical experts, -1 = empty.
        handed: all rows that were delivered in that group.
        copies: of every logical expert, its places.
        ranks_of_place: of every place, the rank that holds it, or those of its etp shards.

    Rule: for one place p of the expert one row on each rank of p, and no other row.

    Degenerate: a row for an empty slot, or one that does not exist, is wrong. An expert with one place is
    delivered as without copies.

    Raises:
        ValueError: an expert without a place, a place of two experts, listed twice or unknown, or without
            ranks, an id outside -1..E-1.

    Decides: EXCH-33. Source: arithmetic, the layer adds each pair once.

    >>> import torch
    >>> ids, copies, ranks = [torch.tensor([[0, 1], [1, -1]])], [[0, 2], [1]], [[0], [1], [2]]
    >>> fine = [Handed(0, 0, 0, 2, 2), Handed(0, 0, 1, 1, 1), Handed(0, 1, 0, 1, 1)]
    >>> wrongly_handed(ids, fine, copies, ranks), wrongly_handed(ids, [*fine, Handed(0, 0, 0, 0, 0)], copies, ranks)
    ((), ((0, 0, 0),))
    """
    _check(copies, len(ranks_of_place))
    if not all(ranks_of_place):
        raise ValueError("a place is on no rank")
    rows: dict[tuple[int, int, int], Counter[tuple[int, int]]] = {}  # of every slot, (place, rank) of its rows
    for source, token, slot, place, rank in handed:
        rows.setdefault((source, token, slot), Counter())[place, rank] += 1
    wrong = set(rows)
    for source, ids_TK in enumerate(ids_by_source):
        for token, ids_K in enumerate(ids_TK.tolist()):
            for slot, e in enumerate(ids_K):
                if not -1 <= e < len(copies):
                    raise ValueError(f"rank {source} token {token} slot {slot} names expert {e} of {len(copies)}")
                at = (source, token, slot)
                legal = _one_copy(copies[e], ranks_of_place) if e >= 0 else [Counter()]
                if rows.get(at, Counter()) in legal:
                    wrong.discard(at)
                else:
                    wrong.add(at)
    return tuple(sorted(wrong))


def copy_gradients(own: Mapping[int, Tensor], copies: Sequence[Sequence[int]]) -> dict[int, Tensor]:
    """Finish the gradients of copies, by place: every copy of an expert gets the sum over its copies.

    Args:
        own: of every place, the gradient of what it computed itself, on all ranks that replicate it.
        copies: of every logical expert, its places.

    Degenerate: a single copy keeps its own; a copy without pairs adds zeros.

    Raises:
        ValueError: a place without a gradient; copies as in `wrongly_handed`.

    Decides: EXCH-33. Source: the gradient of a sum is the sum of gradients.

    >>> import torch
    >>> own = {place: torch.tensor([float(10**place)]) for place in range(3)}
    >>> {place: gradient.item() for place, gradient in copy_gradients(own, [[0, 2], [1]]).items()}
    {0: 101.0, 2: 101.0, 1: 10.0}
    """
    places = [place for of_expert in copies for place in of_expert]
    if set(places) - set(own):
        raise ValueError(f"places {sorted(set(places) - set(own))} have no gradient; an idle copy has zeros")
    _check(copies, max(places, default=-1) + 1)
    finished: dict[int, Tensor] = {}
    for of_expert in copies:
        total = sum((own[place].double() for place in of_expert[1:]), start=own[of_expert[0]].double())
        finished |= {place: total.clone() for place in of_expert}
    return finished


def _one_copy(places: Sequence[int], ranks_of_place: Sequence[Sequence[int]]) -> list[Counter[tuple[int, int]]]:
    """List the rows, (place, rank), that hand a pair to one copy: a possibility for each place."""
    return [Counter((place, rank) for rank in ranks_of_place[place]) for place in places]


def _check(copies: Sequence[Sequence[int]], places: int) -> None:
    """Raise unless every expert has a place and no place has two."""
    listed = [place for of_expert in copies for place in of_expert]
    if not all(copies) or len(set(listed)) < len(listed) or not set(listed) <= set(range(places)):
        raise ValueError(f"copies {[list(each) for each in copies]}: give each its own of {places} places")
