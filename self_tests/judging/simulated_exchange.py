"""A perfect exchange of all ranks in one process, with places to break it: makes outcomes for the judges' tests.

Rows, answers and outputs of all ranks live in one autograd graph. The probe expert is the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from moe_conformance.contract import Config, Delivery
from moe_conformance.contract.topology import Layout
from moe_conformance.scenarios.outcome import ExchangeSeen, Grad, Microbatch, Outcome, RankOutcome
from moe_conformance.scenarios.probe import Probe
from moe_conformance.workloads.records import draw, tags
from moe_conformance.workloads.records.runs import ExchangeStep
from moe_conformance.workloads.records.workload import Workload

Form = Literal["grouped", "listed", "batched"]
Change = Callable[[int, Tensor], Tensor]  # (rank, tensor) -> what takes its place


class Sent(NamedTuple):
    """One row on its way: slot `slot` of token `token` of rank `source`, for `expert`."""

    source: int
    token: int
    slot: int
    expert: int


def unchanged(rank: int, tensor: Tensor) -> Tensor:
    """Leave a tensor as it is."""
    return tensor


@dataclass(frozen=True)
class Simulation:
    """How the exchange works, and what is broken: by default nothing is."""

    form: Form = "grouped"
    weights_at: Literal["input", "expert", "combine"] = "expert"
    padding: int = 0  # all-zero rows behind those of every expert, counted (grouped)
    rows: Change = unchanged  # (destination, rows_RD) before they are handed over
    weights: Change = unchanged  # (destination, weights_R) before they are handed over
    answers: Change = unchanged  # (destination, answers_RD) on their way back
    outputs: Change = unchanged  # (source, y_TD)
    sent: Callable[[int, list[Sent]], list[Sent]] = lambda rank, sent: sent  # what a destination gets


def workload(
    layout: Layout | None = None,
    tokens: int = 6,
    *,
    microbatches: int = 1,
    drop: bool = False,
    ids: Sequence[Sequence[Sequence[int]]] | None = None,
    **fields: Any,
) -> Workload:
    """Draw a probe workload, on two ranks if nothing else is said; T differs between ranks.

    With `drop`, some slots of every rank are empty; `ids` gives the routing of every rank instead of drawing it.
    The other fields are those of the config.
    """
    layout, config, batches = layout or Layout(2, ep=2), Config().changed(fields), []
    for m in range(microbatches):
        ranks = []
        for rank in range(layout.world):
            seeded = draw.generator("judging", layout.name, m, rank)
            ids_TK = draw.choose(max(tokens - rank, 0), config, seeded)
            if ids is not None:
                ids_TK = torch.tensor(ids[rank], dtype=torch.int64).reshape(-1, config.top_k)
            if drop:
                ids_TK[::3, 0] = -1
                ids_TK[::6, :] = -1
            ranks.append(draw.probe_batch(rank, m, ids_TK, config, seeded))
        batches.append(tuple(ranks))
    schedule = " ".join([f"F{m}" for m in range(microbatches)] + [f"B{m}" for m in range(microbatches)])
    return Workload("simulated", ExchangeStep(), config, layout, tuple(batches), schedule)


def held_by(layout: Layout, experts: int) -> list[tuple[int, ...]]:
    """Deal the experts out along ep; etp shards hold alike, replicas too."""
    places = [(rank // layout.etp) % layout.ep for rank in range(layout.world)]
    N = experts // layout.ep
    return [tuple(range(place * N, (place + 1) * N)) for place in places]


def simulate(workload: Workload, simulation: Simulation | None = None) -> Outcome:
    """Run the workload and return what ranks would bring back."""
    simulation = simulation or Simulation()
    layout, held = workload.layout, held_by(workload.layout, workload.config.experts)
    shard = [rank % layout.etp for rank in range(layout.world)]
    partial = layout.etp > 1
    probes = [
        Probe(workload.config, held[r], tags.part(shard[r], layout.etp) if partial else 1.0)
        for r in range(layout.world)
    ]
    steps = [_step(workload, simulation, probes, held, m) for m in range(len(workload.batches))]
    ranks = tuple(
        RankOutcome(
            rank=r,
            status="ok",
            microbatches=tuple(step(r) for step in steps),
            local_experts=held[r],
            weights_at=simulation.weights_at,
            partial=partial,
        )
        for r in range(layout.world)
    )
    return Outcome("simulated", workload, ranks, 0.0)


def _step(
    workload: Workload, simulation: Simulation, probes: list[Probe], held: list[tuple[int, ...]], m: int
) -> Callable[[int], Microbatch]:
    """Run one microbatch forward and backward; return what a rank saw of it."""
    batches, world = workload.batches[m], range(workload.layout.world)
    x = [batch.x_TD.clone().requires_grad_() for batch in batches]
    weights = [batch.weights_TK.clone().requires_grad_() for batch in batches]
    width = workload.layout.ep * workload.layout.etp
    y = [0 * x[source] for source in world]  # a rank that nothing comes back to has a graph too
    for rank in world:
        group = [source for source in world if source // width == rank // width]
        sent = simulation.sent(rank, _sent_to(held[rank], [(s, batches[s].ids_TK) for s in group]))
        probes[rank].microbatch = m
        for at, answer_D in _answers(simulation, probes[rank], rank, held[rank], sent, x, weights):
            if simulation.weights_at == "combine":
                answer_D = (answer_D * weights[at.source][at.token, at.slot]).to(answer_D.dtype)
            where = torch.arange(len(x[at.source])) == at.token
            y[at.source] = y[at.source] + torch.where(where[:, None], answer_D, 0)
    y = [simulation.outputs(source, y[source]) for source in world]
    torch.autograd.backward(y, [batch.upstream.to(y[0].dtype) for batch in batches])
    return lambda rank: Microbatch(
        y=y[rank].detach(),
        y_shape=tuple(y[rank].shape),
        y_dtype=y[rank].dtype,
        dx_TD=Grad(x[rank].grad),
        dweights_TK=Grad(weights[rank].grad),
        exchange=ExchangeSeen(probes[rank].handed(m)),
    )


def _sent_to(held: tuple[int, ...], routings: list[tuple[int, Tensor]]) -> list[Sent]:
    """List what a rank must get, expert-major."""
    return [
        Sent(source, token, slot, expert)
        for expert in held
        for source, ids_TK in routings
        for token, slot in (ids_TK == expert).nonzero().tolist()
    ]


def _answers(
    simulation: Simulation,
    probe: Probe,
    rank: int,
    held: tuple[int, ...],
    sent: list[Sent],
    x: list[Tensor],
    weights: list[Tensor],
) -> list[tuple[Sent, Tensor]]:
    """Hand the rows over and pair what comes back with what was sent (listed: with the first slot of each row)."""
    listed: list[list[Sent]] = [[at] for at in sent]
    if simulation.form == "listed":
        tokens = sorted({(at.source, at.token) for at in sent})
        listed = [[at for at in sent if (at.source, at.token) == token] for token in tokens]
    hidden, dtype = x[0].shape[1], x[0].dtype
    rows = [x[row[0].source][row[0].token] for row in listed]
    carried = [torch.stack([weights[at.source][at.token, at.slot] for at in row]) for row in listed]
    if simulation.weights_at == "input":
        rows = [(row_D * weight_J[0]).to(dtype) for row_D, weight_J in zip(rows, carried, strict=True)]
    delivery, order = _delivery(simulation, rank, held, listed, rows, carried, x[0].new_zeros(0, hidden))
    out_RD = simulation.answers(rank, probe(delivery).reshape(-1, hidden))
    return [(row[0], out_RD[r]) for r, row in zip(order, listed, strict=True)]


def _delivery(
    simulation: Simulation,
    rank: int,
    held: tuple[int, ...],
    listed: list[list[Sent]],
    rows: list[Tensor],
    carried: list[Tensor],
    none_0D: Tensor,
) -> tuple[Delivery, list[int]]:
    """Lay the rows out in the form asked for; return where each of them lies."""
    zero_D, none = none_0D.new_zeros(none_0D.shape[1]), torch.zeros(0)
    weighted = simulation.weights_at == "expert"
    if simulation.form == "listed":
        J = max((len(row) for row in listed), default=1)
        ids_RJ = torch.full((len(listed), J), -1)
        for r, row in enumerate(listed):
            ids_RJ[r, : len(row)] = torch.tensor([held.index(at.expert) for at in row])
        pad = [torch.cat([weight_J, torch.zeros(J - len(weight_J))]) for weight_J in carried]
        weights_RJ = torch.stack(pad) if pad else torch.zeros(0, J)
        rows_RD = simulation.rows(rank, torch.stack(rows) if rows else none_0D)
        weights = simulation.weights(rank, weights_RJ) if weighted else None
        return Delivery.listed(rows_RD, ids_RJ, weights), list(range(len(listed)))

    counts = [sum(row[0].expert == expert for row in listed) for expert in held]
    places = [max(counts) + 1] * len(held) if simulation.form == "batched" else counts
    places = [place + simulation.padding for place in places]
    laid: list[Tensor] = []
    laid_weights: list[Tensor] = []
    order: list[int] = []
    for n, expert in enumerate(held):
        mine = [r for r, row in enumerate(listed) if row[0].expert == expert]
        order += [len(laid) + i for i in range(len(mine))]
        laid += [rows[r] for r in mine] + [zero_D] * (places[n] - len(mine))
        laid_weights += [carried[r][0] for r in mine] + [torch.tensor(1.0)] * (places[n] - len(mine))
    rows_RD = simulation.rows(rank, torch.stack(laid) if laid else none_0D)
    weights_R = simulation.weights(rank, torch.stack(laid_weights) if laid else none) if weighted else None
    if simulation.form == "batched":
        rows_NCD = rows_RD.reshape(len(held), places[0], -1)
        weights_NC = None if weights_R is None else weights_R.reshape(len(held), -1)
        return Delivery.batched(rows_NCD, counts, weights_NC), order
    return Delivery.grouped(rows_RD, places, weights_R), order
