"""The numbers of rows that a dispatch sends on wires that do not follow the routing."""

from __future__ import annotations

from moe_conformance.judging.observed.drop_rule import DropRule
from moe_conformance.judging.observed.run import Reading
from moe_conformance.reference.capacity.limits import loads
from moe_conformance.reference.cost import rows as cost
from moe_conformance.reference.token_padding import padding


def all_tokens(reading: Reading, m: int) -> int:
    """Return the number of rows if every token of microbatch m is sent to every other rank of its group."""
    sizes = [len(batch.x_TD) for batch in reading.batches[m]]
    groups, claims = reading.outcome.workload.layout.groups()["ep_etp"], reading.claims
    if claims.padding == "group_max" and claims.alignment is not None:  # PACK-13 requires both
        sizes = list(padding.padded_counts(sizes, groups, alignment=claims.alignment))
    return int(cost.all_gather_rows(sizes, groups).sum())


def all_places(reading: Reading, m: int, *, to_all: bool) -> int:
    """Return the number of rows if every rank sends the largest capacity of any rank for every expert.

    The rows are sent to the rank that holds the expert or, with `to_all`, to all other ranks of its group.
    """
    workload = reading.outcome.workload
    config, groups, places = workload.config, workload.layout.groups()["ep_etp"], [0] * len(reading.ranks)
    for group in groups:
        most = 0
        for ids_TK in (reading.batches[m][rank].ids_TK for rank in group):
            if config.capacity.factor is None:
                most = max(most, int(loads(ids_TK, config.experts).max()))
            else:
                most = max(most, DropRule.of(reading.claims).capacities(config, len(ids_TK))[-1])
        for rank in group:
            places[rank] = most
    if to_all:
        return int(cost.all_gather_rows([most * config.experts for most in places], groups).sum())
    return int(cost.place_rows(places, groups, [len(rank.local_experts) for rank in reading.ranks]).sum())
