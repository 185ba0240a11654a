"""Receive budgets: buffers of a fixed size on the receiving rank, and rows that do not fit.

A buffer of the worst-case size never overflows. A smaller one does as soon as more rows are wanted, and
must say so; which of the wanted rows are then dropped is free, how many is not.

Sources: arithmetic, a token selects each expert at most once; behaviour of Megatron-Core (static budget).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_conformance.reference.exchange.deliveries import Pair


def worst_case_rows(
    tokens_by_rank: Sequence[int],
    top_k: int,
    held: int,
    *,
    alignment: int = 1,
    equal_sizes: bool = False,
    per_token: bool = False,
) -> int:
    """Compute the most rows that a rank with N = `held` experts can receive, whatever the routing.

    Args: T_r of every rank of its exchange group; `equal_sizes` where every rank sends as much as the
    fullest; `per_token` where a token is sent once per rank, instead of once per slot.

    Rule: sum over r of T_r min(K, N), or W max_r T_r min(K, N), with min(1, N) for min(K, N) if `per_token`.
    Filling each expert's block up to whole `alignment`s adds less than one to each block that has a row.

    Degenerate: K >= N gives T_r N; all T_r = 0 gives no rows. Raises on no rank, negative sizes, K < 1,
    alignment < 1, and on an alignment of rows that belong to no one expert (`per_token`).

    Decides: DROP-13. Source: arithmetic.

    >>> worst_case_rows([2, 5], 3, 4), worst_case_rows([2, 5], 3, 2, equal_sizes=True)
    (21, 20)
    >>> worst_case_rows([2, 5], 3, 4, alignment=8), worst_case_rows([2, 5], 3, 4, per_token=True)
    (49, 7)
    """
    if not tokens_by_rank or min(tokens_by_rank) < 0 or top_k < 1 or held < 0:
        raise ValueError(f"tokens {list(tokens_by_rank)}, K = {top_k}, N = {held}: need ranks, T, N >= 0, K >= 1")
    _check_alignment(alignment)
    if per_token and alignment > 1:
        raise ValueError(f"alignment {alignment} per expert, but a row per token belongs to no one expert")
    places = min(1 if per_token else top_k, held)
    tokens = len(tokens_by_rank) * max(tokens_by_rank) if equal_sizes else sum(tokens_by_rank)
    rows = tokens * places
    return rows + min(held, rows) * (alignment - 1)


def over_budget(rows_N: Sequence[int], budget: int, *, alignment: int = 1) -> bool:
    """Return whether a rank's budget is exceeded, given the rows wanted from all ranks by each of its experts.

    Rule: sum over its experts of ceil(R_e / p) p > budget, p the alignment. Degenerate: exactly the budget
    is within it, and so are no rows; budget 0 is exceeded by any. Raises on negative numbers, p < 1.

    Decides: DROP-14. Source: behaviour of Megatron-Core (static dispatch budget).

    >>> over_budget([5, 0, 2], 7), over_budget([5, 0, 2], 6), over_budget([5, 0, 2], 11, alignment=4)
    (False, True, True)
    """
    if budget < 0 or any(rows < 0 for rows in rows_N):
        raise ValueError(f"budget {budget}, rows {list(rows_N)}: none may be negative")
    _check_alignment(alignment)
    return sum(-(-rows // alignment) * alignment for rows in rows_N) > budget


def legal_deliveries(
    delivered: Sequence[Pair], wanted: Sequence[Pair], budgets: Sequence[int], *, alignment: int = 1
) -> tuple[bool, ...]:
    """Say of every rank whether it may have received just these rows.

    Args: `wanted` are the deliveries without budgets (`exchange.deliveries`); a budget for each rank.

    Rule: what reached a rank is wanted there, each row once; no more than its budget; and all of it, unless
    a rank that wants the slot is over budget. A slot reaches all ranks that want it, the shards of its
    expert, or none: on some of them alone it would be neither kept nor dropped.

    Degenerate: dropping more than necessary is allowed once over budget. Raises on a rank without a budget.

    Decides: DROP-15. Source: arithmetic; behaviour of Megatron-Core and Transformer Engine.

    >>> wanted = [Pair(0, t, 0, expert, rank) for t, (expert, rank) in enumerate([(0, 0), (0, 0), (1, 1)])]
    >>> legal_deliveries(wanted[:1], wanted, [1, 0]), legal_deliveries(wanted[:1], wanted, [2, 1])
    ((True, True), (False, False))
    """
    owners = defaultdict(set)  # of every slot, the ranks that want it
    reached = defaultdict(set)  # of every slot, those of them that it reached
    for pair in wanted:
        owners[pair.source, pair.token, pair.slot].add(pair.destination)
    for pair in set(delivered) & set(wanted):
        reached[pair.source, pair.token, pair.slot].add(pair.destination)
    split = {slot for slot, ranks in owners.items() if reached[slot] and reached[slot] != ranks}

    if any(pair.destination not in range(len(budgets)) for pair in [*delivered, *wanted]):
        raise ValueError(f"a row goes to a rank without a budget: there are {len(budgets)}")
    got_by_rank = [[pair for pair in delivered if pair.destination == rank] for rank in range(len(budgets))]
    asked_by_rank = [[pair for pair in wanted if pair.destination == rank] for rank in range(len(budgets))]
    over = set()  # the ranks that must drop
    for rank, asked in enumerate(asked_by_rank):
        rows_by_expert = [sum(pair.expert == e for pair in asked) for e in {pair.expert for pair in asked}]
        if over_budget(rows_by_expert, budgets[rank], alignment=alignment):
            over.add(rank)

    verdicts = []
    for rank, (got, asked) in enumerate(zip(got_by_rank, asked_by_rank, strict=True)):
        subset = set(got) <= set(asked) and len(set(got)) == len(got) <= budgets[rank]
        slots = {pair: (pair.source, pair.token, pair.slot) for pair in asked}
        whole = not any(slot in split for slot in slots.values())
        excused = all(owners[slots[pair]] & over for pair in asked if pair not in got)
        verdicts.append(subset and whole and excused)
    return tuple(verdicts)


def fitting_slots(
    delivered: Sequence[Pair], wanted: Sequence[Pair], budgets: Sequence[int], *, alignment: int = 1
) -> tuple[tuple[int, int, int], ...]:
    """List the dropped slots (source, token, slot) that every rank that wants them still had room for.

    Args: as of `legal_deliveries`.

    Rule: a slot that reached no rank fits if at every rank that wants it the experts' delivered rows, that one among
    them, filled up to whole alignments, are within the budget. In ascending order.

    Degenerate: each is asked for alone, so that of several only one may fit. Budget 0: none does. A slot that reached
    a part of its ranks is neither kept nor dropped, and not listed. Raises on a rank without a budget.

    Decides: DROP-16. Source: arithmetic; behaviour of HybridEP (the buffer is filled expert by expert).

    >>> wanted = [Pair(0, t, 0, 0, 0) for t in range(3)]
    >>> fitting_slots(wanted[:1], wanted, [2]), fitting_slots(wanted[:2], wanted, [2])
    (((0, 1, 0), (0, 2, 0)), ())
    """
    if any(pair.destination not in range(len(budgets)) for pair in [*delivered, *wanted]):
        raise ValueError(f"a row goes to a rank without a budget: there are {len(budgets)}")
    rows = Counter((pair.destination, pair.expert) for pair in delivered)
    owners = defaultdict(list)  # of every slot, the deliveries that are wanted
    for pair in wanted:
        owners[pair.source, pair.token, pair.slot].append(pair)
    reached, fitting = set(delivered), []
    for slot, pairs in sorted(owners.items()):
        fits = reached.isdisjoint(pairs)
        for pair in pairs:
            after = rows.copy()
            after[pair.destination, pair.expert] += 1
            own = [number for (rank, _), number in after.items() if rank == pair.destination]
            fits = fits and not over_budget(own, budgets[pair.destination], alignment=alignment)
        fitting += [slot] if fits else []
    return tuple(fitting)


def delivered_slots(delivered: Sequence[Pair], ids_by_rank: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Mark the slots that were delivered, bool (T_r, K) for each rank: the `kept_TK` of `capacity_output.py`.

    Raises on a row that names no slot of the ids, or another expert than its slot.

    Decides: DROP-15 (outputs and gradients). Source: arithmetic.

    >>> [kept.int().tolist() for kept in delivered_slots([Pair(1, 0, 1, 4, 0)], [torch.tensor([[3, 4]])] * 2)]
    [[[0, 0]], [[0, 1]]]
    """
    kept_by_rank = tuple(torch.zeros_like(ids_TK, dtype=torch.bool) for ids_TK in ids_by_rank)  # each (T_r, K)
    for pair in delivered:
        exists = pair.source in range(len(ids_by_rank)) and pair.token in range(len(ids_by_rank[pair.source]))
        ids_K = ids_by_rank[pair.source][pair.token].tolist() if exists else []
        if pair.slot not in range(len(ids_K)) or ids_K[pair.slot] != pair.expert or pair.expert < 0:
            raise ValueError(f"{pair} names no slot that chose its expert")
        kept_by_rank[pair.source][pair.token, pair.slot] = True
    return kept_by_rank


def _check_alignment(alignment: int) -> None:
    """Raise unless blocks can be filled up to whole multiples."""
    if alignment < 1:
        raise ValueError(f"alignment {alignment} is not at least 1")
