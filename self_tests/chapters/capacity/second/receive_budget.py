"""Fixed receive buffers by hand: how many rows can come, when they are too many, and what may be left out then."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from self_tests.chapters.exchange.second.deliveries import Pair


def worst_case_rows(
    tokens_by_rank: Sequence[int],
    top_k: int,
    held: int,
    *,
    alignment: int = 1,
    equal_sizes: bool = False,
    per_token: bool = False,
) -> int:
    """Rows of a buffer that cannot overflow: every token sends what it can, one row for each of its K and our N.

    With `equal_sizes` every rank sends as much as the longest. With `per_token` a token sends one row, if there is
    an expert to ask for it. An expert that gets a row may be filled up by p - 1; one that gets none is not.
    """
    small = not tokens_by_rank or min(tokens_by_rank) < 0 or top_k < 1 or held < 0 or alignment < 1
    if small or (alignment > 1 and per_token):
        raise ValueError(f"{tokens_by_rank}, {top_k}, {held}, {alignment}")
    rows = 0
    for own in tokens_by_rank:
        for _ in range(max(tokens_by_rank) if equal_sizes else own):
            slots_left, experts_left = 1 if per_token else top_k, held
            while slots_left and experts_left:
                rows, slots_left, experts_left = rows + 1, slots_left - 1, experts_left - 1
    filled_up = 0
    for expert in range(held):
        if expert < rows:  # a row for this one, too, if each before it has one
            filled_up += alignment - 1
    return rows + filled_up


def over_budget(rows_N: Sequence[int], budget: int, *, alignment: int = 1) -> bool:
    """Whether the rows that are wanted, each expert's filled up to a multiple, do not fit."""
    if alignment < 1 or budget < 0 or any(rows < 0 for rows in rows_N):
        raise ValueError(f"{rows_N}, {budget}, {alignment}")
    wanted = 0
    for rows in rows_N:
        place = 0
        while place < rows:
            place += alignment
        wanted += place
    return wanted > budget


def legal_deliveries(
    delivered: Sequence[Pair], wanted: Sequence[Pair], budgets: Sequence[int], *, alignment: int = 1
) -> list[bool]:
    """Whether each rank got what a rank of its budget may get.

    A slot that several ranks want is one slot: it reaches them all, or it is dropped because one of them is full.
    """
    if any(not 0 <= pair.destination < len(budgets) for pair in [*delivered, *wanted]):
        raise ValueError("a pair goes to a rank without a budget")
    full = []
    for rank, budget in enumerate(budgets):
        asked = [pair.expert for pair in wanted if pair.destination == rank]
        full.append(over_budget([asked.count(expert) for expert in set(asked)], budget, alignment=alignment))
    verdicts = []
    for rank, budget in enumerate(budgets):
        got = [pair for pair in delivered if pair.destination == rank]
        legal = len(got) <= budget and all(got.count(pair) == 1 and pair in wanted for pair in got)
        for pair in wanted:
            shards = [other for other in wanted if other[:3] == pair[:3]]
            reached = [other in delivered for other in shards]
            excused = any(full[other.destination] for other in shards)
            if pair.destination == rank and not (all(reached) or (excused and not any(reached))):
                legal = False
        verdicts.append(legal)
    return verdicts


def fitting_slots(
    delivered: Sequence[Pair], wanted: Sequence[Pair], budgets: Sequence[int], *, alignment: int = 1
) -> list[tuple[int, int, int]]:
    """What need not have been dropped: put a slot where it is wanted, and look whether any rank is too full then."""
    if any(not 0 <= pair.destination < len(budgets) for pair in [*delivered, *wanted]):
        raise ValueError("a pair goes to a rank without a budget")
    needless = set()
    for pair in wanted:
        shards = [other for other in wanted if other[:3] == pair[:3]]
        if any(other in delivered for other in shards):
            continue
        with_it = [*delivered, *shards]
        full = False
        for destination in {other.destination for other in shards}:
            experts = [each.expert for each in with_it if each.destination == destination]
            rows = [experts.count(expert) for expert in sorted(set(experts))]
            full = full or over_budget(rows, budgets[destination], alignment=alignment)
        if not full:
            needless.add((pair.source, pair.token, pair.slot))
    return sorted(needless)


def delivered_slots(delivered: Sequence[Pair], ids_by_rank: Sequence[NDArray[np.int64]]) -> list[NDArray[np.bool_]]:
    """Which slots of every source rank were delivered anywhere."""
    reached = [np.zeros(ids_TK.shape, dtype=np.bool_) for ids_TK in ids_by_rank]
    for source, token, slot, _, expert in delivered:
        if not 0 <= source < len(ids_by_rank) or token < 0 or slot < 0:
            raise ValueError(f"no slot {slot} of token {token} on rank {source}")
        ids_TK = ids_by_rank[source]
        if token >= ids_TK.shape[0] or slot >= ids_TK.shape[1] or expert < 0 or ids_TK[token, slot] != expert:
            raise ValueError(f"slot {slot} of token {token} on rank {source} did not choose {expert}")
        reached[source][token, slot] = True
    return reached
