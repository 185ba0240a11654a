"""Tokens that tensor parallel ranks hold as copies, by hand: one pair per exchange group, one answer on all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from self_tests.chapters.exchange.second.deliveries import Pair

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def copies_agree(ids_by_rank: Sequence[Ints], tp_groups: Sequence[Sequence[int]]) -> bool:
    """Whether the ranks of every tp group hold the same ids."""
    for group in tp_groups:
        for one in group:
            for other in group:
                a_TK, b_TK = ids_by_rank[one], ids_by_rank[other]
                if a_TK.shape != b_TK.shape or a_TK.tolist() != b_TK.tolist():
                    return False
    return True


def group_of(rank: int, groups: Sequence[Sequence[int]]) -> list[int]:
    """The one group of a rank."""
    found = [sorted(group) for group in groups if rank in group]
    if len(found) != 1:
        raise ValueError(f"rank {rank} is in {len(found)} of the groups {groups}")
    return found[0]


def wrong_pairs(
    ids_by_rank: Sequence[Ints],
    delivered: Sequence[Pair],
    exchange_groups: Sequence[Sequence[int]],
    local_experts: Sequence[Sequence[int]],
    tp_groups: Sequence[Sequence[int]],
) -> list[tuple[int, int, int]]:
    """First rank of the tp group, token and slot of all that came too often, nowhere, or to the wrong place."""
    world = range(len(ids_by_rank))
    tp_of, exchange_of = [group_of(r, tp_groups) for r in world], [group_of(r, exchange_groups) for r in world]
    if not copies_agree(ids_by_rank, tp_groups):
        raise ValueError("copies of a token choose different experts")
    wrong = set()
    for pair in delivered:
        if pair.source not in world:
            raise ValueError(f"a row of rank {pair.source}, which is none of {len(world)}")
        token_exists = 0 <= pair.token < len(ids_by_rank[pair.source])
        slot_exists = token_exists and 0 <= pair.slot < ids_by_rank[pair.source].shape[1]
        expert = int(ids_by_rank[pair.source][pair.token, pair.slot]) if slot_exists else -1
        owners = [r for r in exchange_of[pair.source] if expert >= 0 and expert in local_experts[r]]
        if pair.expert != expert or pair.destination not in owners:
            wrong.add((tp_of[pair.source][0], pair.token, pair.slot))
    for rank in world:
        if rank != tp_of[rank][0]:
            continue
        for token, slot in np.ndindex(*ids_by_rank[rank].shape):
            expert = int(ids_by_rank[rank][token, slot])
            if expert < 0:
                continue
            complete = False
            for group in {tuple(exchange_of[copy]) for copy in tp_of[rank]}:
                came = [
                    sum(
                        pair[1:] == (token, slot, owner, expert) and pair.source in group and pair.source in tp_of[rank]
                        for pair in delivered
                    )
                    for owner in group
                    if expert in local_experts[owner]
                ]
                if any(times > 1 for times in came):
                    wrong.add((rank, token, slot))
                if came and all(times == 1 for times in came):
                    complete = True
            if not complete:
                wrong.add((rank, token, slot))
    return sorted(wrong)


def gathered(by_copy: Sequence[Floats], declared: Literal["complete", "parts"]) -> list[Floats]:
    """What has to equal the whole gradient: every copy's, or what all of them add up to."""
    if not by_copy or declared not in ("complete", "parts") or len({part.shape for part in by_copy}) != 1:
        raise ValueError(f"{len(by_copy)} copies of shapes {[part.shape for part in by_copy]}, {declared}")
    if declared == "complete":
        return [part.astype(np.float64) for part in by_copy]
    total = np.zeros(by_copy[0].shape, dtype=np.float64)
    for at in np.ndindex(*total.shape):
        for part in by_copy:
            total[at] += part[at]
    return [total]


def same_bytes(copies: Sequence[NDArray[np.generic]]) -> bool:
    """Whether all are of one type and one shape and hold the same bytes."""
    if not copies:
        raise ValueError("no copy")
    return len({(copy.dtype, copy.shape, copy.tobytes()) for copy in copies}) == 1
