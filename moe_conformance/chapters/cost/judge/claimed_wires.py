"""The numbers of rows that dispatch and combine send by the routing, and on wires that do not follow it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_conformance.judging.observed.drop_rule import DropRule
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import WrongForm
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


def claimed_rows(reading: Reading, m: int, name: str, times: int) -> int:
    """Return the number of rows that dispatch or combine, or with `times` 2 both, may send by the claimed wire.

    Raises:
        WrongForm: the backend claims that outputs are summed on all ranks, which have not got all tokens.
    """
    claims = reading.claims
    reduced = claims.combined == "all_reduced"
    if reduced and claims.wire != "all":
        sentence = f"the backend claims combined = 'all_reduced', and wire = {claims.wire!r}; expected wire = 'all'"
        raise WrongForm("combine", sentence)
    again = reduced and not name.startswith("dispatch")  # an all-reduce is a reduce-scatter and an all-gather
    return (times + again) * needed_rows(reading, m)


def needed_rows(reading: Reading, m: int) -> int:
    """Return the number of rows that a dispatch may send by the claimed wire."""
    wire = reading.claims.wire
    if wire == "pairs":
        return pair_rows(reading, m)
    if wire == "tokens":
        return smallest_rows(reading, m)
    if wire in ("capacity", "capacity_all"):
        return all_places(reading, m, to_all=wire == "capacity_all")
    return all_tokens(reading, m)


def pair_rows(reading: Reading, m: int) -> int:
    """Return the number of rows of microbatch m if every routed pair is sent separately."""
    return int(cost.pair_rows(*_routed(reading, m)).sum())


def smallest_rows(reading: Reading, m: int) -> int:
    """Return the number of rows of microbatch m if a token is sent once to each rank that needs it."""
    return int(cost.least_rows(*_routed(reading, m)).sum())


def _routed(reading: Reading, m: int) -> tuple[Sequence[Tensor], Sequence[Sequence[int]], Sequence[Sequence[int]]]:
    ids, held = reading.routed[m]
    return ids, reading.outcome.workload.layout.groups()["ep_etp"], held
