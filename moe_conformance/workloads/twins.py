"""Twins: workloads that must give what another gives, token by token, though they are fed or run in another way.

A twin is made of the rows of its original, so that for each of its tokens there is one of the original to compare it
with. Laws that hold of every exchange say how the two are related; nobody has to know the right answer.
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
    """Where the tokens of one rank in one microbatch of a twin come from."""

    source_T3: Tensor  # int64: microbatch, rank and token of the original
    slots_TK: Tensor  # int64: the slot of the original
    powers_T: Tensor  # int64: the weights of the token are multiplied by 2 to this


Origin = tuple[tuple[Rows, ...], ...]  # [microbatch][rank] of the twin


@dataclass(frozen=True, repr=False)
class Twin:
    """Another run, and where its tokens and experts are found in the original."""

    how: str  # it differs, in words that fit behind "the run"
    workload: Workload
    origin: Origin
    numbers_E: Tensor  # int64: the number that expert e has in the twin
    finals: bool = True  # whether parameters end with the gradients that they have there, in every step
    bits: bool = False  # whether all bytes are the same, and rows arrive in the same order
    fresh: bool = False  # whether it runs on ranks that have run nothing before
    partial: bool = False  # whether tokens of the original are missing in it
    anew: bool = True  # whether something else is built than for the original, which may be refused

    def __repr__(self) -> str:
        """Name it in a line."""
        return f"<twin {self.how}>"


def the_same(workload: Workload) -> Origin:
    """Return the origin of a twin that is fed what its original is fed."""
    return tuple(
        tuple(rows_of([(m, rank, t) for t in range(len(batch.x_TD))], workload) for rank, batch in enumerate(ranks))
        for m, ranks in enumerate(workload.batches)
    )


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
    """Make a twin of the original's rows."""
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
    """Make a twin with other fields of the configuration, whose tokens are not held against the original's."""
    config = workload.config.changed(changed)
    other = replace(workload, name=f"{workload.name}, {how}", config=config, likened="")
    return Twin(how, other, origin=(), numbers_E=torch.arange(config.experts))


def rows_of(sources: Sequence[tuple[int, int, int]], workload: Workload) -> Rows:
    """Return rows with the slots and weights that they have."""
    T, K = len(sources), workload.batches[0][0].ids_TK.shape[1]
    source_T3 = torch.tensor(sources, dtype=torch.int64).reshape(-1, 3)
    return Rows(source_T3, torch.arange(K).repeat(T, 1), torch.zeros(T, dtype=torch.int64))


def _numbered(workload: Workload, numbers_E: Tensor) -> Mapping[ParameterKey, Tensor]:
    """Return the parameters under the experts' new numbers; a router has none to change."""
    if workload.run != ExpertsStep():
        return workload.parameters
    experts = {(name, expert): value for (name, expert), value in workload.parameters.items() if expert is not None}
    return dict[ParameterKey, Tensor](relabel_parameters(experts, numbers_E).items())


def _batch(workload: Workload, rows: Rows, numbers_E: Tensor) -> Batch:
    """Put the rows of a twin together."""
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
    """Return the rows that a twin's tokens have in the original, given its values [microbatch][rank]."""
    empty = values[0][0][:0]
    return torch.stack([values[m][rank][t] for m, rank, t in source_T3.tolist()]) if len(source_T3) else empty
