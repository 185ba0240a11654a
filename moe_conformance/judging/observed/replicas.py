"""Redundant experts (`Claims.placement` "replicas"): which replica of its expert each routed pair was sent to.

The oracles know no replicas to choose from: they are given every replica under an id of its own. In an exchange group
the replica of expert e on the n-th group of etp ranks has the id n * E + e. With `placement` "once" ids stay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from moe_conformance.contract.topology import Layout
from moe_conformance.reference.exchange import deliveries
from moe_conformance.reference.exchange.deliveries import Pair
from moe_conformance.workloads.records import tags

if TYPE_CHECKING:
    from moe_conformance.judging.observed.run import Reading


class Routed(NamedTuple):
    """The ids of one microbatch, of every rank (T, K), and the experts that every rank holds, by these ids."""

    ids: Sequence[Tensor]
    held: Sequence[Sequence[int]]


Rows = Counter[tuple[int, int, int, int]]  # rows by (rank, source, token, expert)


def routed(reading: Reading) -> tuple[Routed, ...]:
    """Return for every microbatch the ids of all ranks and the experts that they hold, as the oracles take them."""
    workload, held = reading.outcome.workload, [rank.local_experts for rank in reading.ranks]
    plain = [Routed([batch.ids_TK for batch in ranks], held) for ranks in reading.batches]
    if reading.claims.placement == "once":
        return tuple(plain)
    delivered = [Rows() for _ in plain]
    for entry in reading.entries:
        if entry.kind == tags.TAG and entry.of_microbatch == entry.microbatch:
            delivered[entry.microbatch][entry.rank, entry.source, entry.token, entry.expert] += 1
    of_layout, E = workload.layout, workload.config.experts
    return tuple(numbered(of_layout, E, *each, rows) for each, rows in zip(plain, delivered, strict=True))


def expected_pairs(reading: Reading) -> tuple[tuple[Pair, ...], ...]:
    """Return the expected deliveries of every microbatch; those of redundant experts to the replica that was chosen.

    Raises:
        ValueError: an expert that a token is routed to is held by no rank of the token's exchange group.
    """
    layout, E = reading.outcome.workload.layout, reading.outcome.workload.config.experts
    found = (deliveries.deliveries(ids, layout.groups()["ep_etp"], held) for ids, held in reading.routed)
    if reading.claims.placement == "once":
        return tuple(found)
    return tuple(tuple(replace(pair, expert=pair.expert % E) for pair in pairs) for pairs in found)


def numbered(
    layout: Layout,
    experts: int,
    ids: Sequence[Tensor],
    held: Sequence[Sequence[int]],
    delivered: Rows,
) -> Routed:
    """Return the ids of the replicas that pairs were delivered to, and else of the first one of their expert.

    A row stands for one pair, so that two slots of a token
    with the same expert have two rows, on one replica or on two. What was delivered to no replica, or to several, is
    thus a pair that was lost or a row that belongs to no pair. An expert that no rank holds keeps its id.
    """
    groups = layout.groups()
    shards = {rank: group for group in groups["etp"] for rank in group}
    places = {rank: n for group in groups["ep_etp"] for n, rank in enumerate(_firsts(group, shards))}
    place_of = {rank: places[shards[rank][0]] for rank in shards}
    left, chosen = Rows(delivered), []
    for source, ids_TK in enumerate(ids):
        group = next(group for group in groups["ep_etp"] if source in group)
        holders: dict[int, list[int]] = {}
        for first in _firsts(group, shards):
            for expert in held[first]:
                holders.setdefault(expert, []).append(first)
        rows = [
            [_replica(left, shards, holders.get(e, []), (source, t, e)) for e in ids_K]
            for t, ids_K in enumerate(ids_TK.tolist())
        ]
        place_TK = torch.tensor([[0 if at is None else place_of[at] for at in row] for row in rows], dtype=torch.int64)
        chosen.append(torch.where(ids_TK < 0, ids_TK, ids_TK + experts * place_TK.reshape(ids_TK.shape)))
    own = tuple(tuple(place_of[rank] * experts + e for e in of_rank) for rank, of_rank in enumerate(held))
    return Routed(chosen, own)


def _firsts(group: Sequence[int], shards: Mapping[int, Sequence[int]]) -> list[int]:
    """Return the first rank of every etp group of an exchange group, in their order."""
    return list(dict.fromkeys(shards[rank][0] for rank in group))


def _replica(
    left: Rows,
    shards: Mapping[int, Sequence[int]],
    holders: Sequence[int],
    pair: tuple[int, int, int],
) -> int | None:
    """Return the first rank of the replica that has a row of the pair, and take that row; else the first holder's."""
    for first in holders:
        taken = [(rank, *pair) for rank in shards[first] if left[rank, *pair]]
        if taken:
            left.subtract(taken)
            return first
    return holders[0] if holders else None
