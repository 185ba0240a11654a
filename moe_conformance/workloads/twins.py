"""Twins: workloads that must give the same results as another, token by token, with other inputs or conditions.

A twin consists of rows of its original, so that every token of it can be compared with one of the original. How the two
are related follows from laws that every exchange obeys; the right result need not be known.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_conformance.contract.topology import Layout
from moe_conformance.reference.permute.orders import relabel, relabel_parameters, reorder_slots
from moe_conformance.workloads.records.runs import ExpertsStep
from moe_conformance.workloads.records.workload import Batch, Lead, ParameterKey, Twist, Workload


class Rows(NamedTuple):
    """The places in the original of the tokens of one rank in one microbatch of a twin."""

    source_T3: Tensor  # int64: microbatch, rank and token of the original
    slots_TK: Tensor  # int64: the slot of the original
    powers_T: Tensor  # int64: the weights of the token are multiplied by 2 to this


Origin = tuple[tuple[Rows, ...], ...]  # [microbatch][rank] of the twin


@dataclass(frozen=True, repr=False)
class Twin:
    """A workload with the places of its tokens and experts in the original workload."""

    how: str  # how it differs, in words that follow "the run"
    workload: Workload
    origin: Origin
    numbers_E: Tensor  # int64: the number that expert e has in the twin
    finals: bool = True  # whether finished gradients of parameters are the same, in every step
    bits: bool = False  # whether all bytes are the same, and rows arrive in the same order
    fresh: bool = False  # whether it runs on new ranks
    partial: bool = False  # whether tokens of the original are missing in it
    anew: bool = True  # whether other surfaces are built than for the original, which may be refused

    def __repr__(self) -> str:
        """Return one line that says how it differs."""
        return f"<twin {self.how}>"


def the_same(workload: Workload) -> Origin:
    """Return the origin of a twin with the inputs of its original."""

    def of_rank(m: int, rank: int) -> Rows:
        return rows_of([(m, rank, t) for t in range(len(workload.batches[m][rank].x_TD))], workload)

    return tuple(tuple(of_rank(m, rank) for rank in range(len(ranks))) for m, ranks in enumerate(workload.batches))


def twin(
    workload: Workload,
    how: str,
    origin: Origin | None = None,
    *,
    numbers_E: Tensor | None = None,
    finals: bool = True,
    bits: bool = False,
    fresh: bool = False,
    partial: bool = False,
    layout: Layout | None = None,
    lead: Lead | None = None,
    schedule: str | None = None,
    variant: str | None = None,
    twist: Twist | None = None,
) -> Twin:
    """Return a twin that consists of rows of the original workload."""
    E = workload.config.experts
    origin = the_same(workload) if origin is None else origin
    numbers_E = torch.arange(E) if numbers_E is None else numbers_E
    twist = twist or Twist()
    anew = bool(layout or variant or twist.beside) or "parameters" in twist.unasked
    twin_workload = replace(
        workload,
        name=f"{workload.name}, {how}",
        config=replace(workload.config, variant=variant or workload.config.variant),
        layout=layout or workload.layout,
        batches=tuple(tuple(_batch(workload, rows, numbers_E) for rows in ranks) for ranks in origin),
        schedule=schedule or workload.schedule,
        lead=lead or workload.lead,
        parameters=_numbered(workload, numbers_E),
        twist=twist,
        likened="",
    )
    return Twin(how, twin_workload, origin, numbers_E, finals, bits, fresh, partial, anew)


def twin_with(workload: Workload, how: str, **changed: Any) -> Twin:
    """Return a twin with other options of the config, whose tokens are not compared with the original's."""
    config = workload.config.changed(changed)
    other = replace(workload, name=f"{workload.name}, {how}", config=config, likened="")
    return Twin(how, other, origin=(), numbers_E=torch.arange(config.experts))


def rows_of(sources: Sequence[tuple[int, int, int]], workload: Workload) -> Rows:
    """Return rows of the given tokens, with slots and weights unchanged."""
    T, K = len(sources), workload.batches[0][0].ids_TK.shape[1]
    source_T3 = torch.tensor(sources, dtype=torch.int64).reshape(-1, 3)
    return Rows(source_T3, torch.arange(K).repeat(T, 1), torch.zeros(T, dtype=torch.int64))


def _numbered(workload: Workload, numbers_E: Tensor) -> Mapping[ParameterKey, Tensor]:
    """Return the parameters with the experts' new ids; unchanged unless the run has experts of the backend."""
    if workload.run != ExpertsStep():
        return workload.parameters
    experts = {(name, expert): value for (name, expert), value in workload.parameters.items() if expert is not None}
    return dict[ParameterKey, Tensor](relabel_parameters(experts, numbers_E).items())


def _batch(workload: Workload, rows: Rows, numbers_E: Tensor) -> Batch:
    """Return the batch of a twin that consists of the given rows."""
    pick = functools.partial(picked, rows.source_T3)
    batches = workload.batches
    as_they_come = torch.arange(len(rows.source_T3))
    weights_TK = pick([[batch.weights_TK for batch in ranks] for ranks in batches])
    weights_TK = reorder_slots(weights_TK, as_they_come, rows.slots_TK)
    ids_TK = pick([[batch.ids_TK for batch in ranks] for ranks in batches])
    return Batch(
        x_TD=pick([[batch.x_TD for batch in ranks] for ranks in batches]),
        ids_TK=relabel(reorder_slots(ids_TK, as_they_come, rows.slots_TK), numbers_E),
        weights_TK=torch.ldexp(weights_TK, rows.powers_T[:, None]).to(weights_TK.dtype),
        upstream=pick([[batch.upstream for batch in ranks] for ranks in batches]),
    )


def picked(source_T3: Tensor, values: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the rows of the original that belong to a twin's tokens, from values by [microbatch][rank]."""
    empty = values[0][0][:0]
    return torch.stack([values[m][rank][t] for m, rank, t in source_T3.tolist()]) if len(source_T3) else empty
