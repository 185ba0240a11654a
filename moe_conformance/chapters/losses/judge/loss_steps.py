"""The training steps of a script as parts of tp x cp groups, and the rules by which they may be judged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor

from moe_conformance.chapters.losses.judge.loss_rules import Part, Parts, Rule
from moe_conformance.judging.observed.cached import once
from moe_conformance.judging.observed.scopes import Shard
from moe_conformance.judging.observed.script import values
from moe_conformance.judging.verdict import WrongForm
from moe_conformance.reference.losses.over_ranks import whole
from moe_conformance.reference.losses.reports import ForwardKind, training_forwards
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.training import RouterBatch
from moe_conformance.workloads.records.workload import Workload


@dataclass(frozen=True)
class Step:
    """One call of a script that is a training step: its arguments and records by rank."""

    workload: Workload
    call: int
    forwards: tuple[tuple[Any, ...], ...]  # the records by rank
    finals: tuple[tuple[Tensor | None, ...], ...]
    reports: tuple[dict[str, Tensor], ...]  # reported losses; empty where nothing is reported
    has_reports: bool  # whether the backend reports losses
    shards: tuple[tuple[Shard, ...], ...]  # the shard of the router's weight that each of `finals` is

    @property
    def name(self) -> str:
        """The name of the step in messages."""
        return f"step {self.call}"

    @property
    def scale(self) -> float:
        """The factor of the main loss."""
        return float(self.workload.calls[self.call].given[0]["scale"])

    def batches(self, rank: int) -> tuple[RouterBatch, ...]:
        """Return the batches of a rank."""
        given: tuple[RouterBatch, ...] = self.workload.calls[self.call].given[rank]["batches"]
        return given

    @property
    def trained(self) -> tuple[int, ...]:
        """The forwards that are microbatches of training, without those repeated by recomputation."""
        kinds: list[ForwardKind] = [batch.mode for batch in self.batches(0)]
        if self.workload.config.losses.recompute:
            kinds += ["recomputed"] * kinds.count("training")
        return training_forwards(kinds)

    def groups(self) -> list[range]:
        """Return the ranks of every tp x cp group, in the order of data parallel groups."""
        layout = self.workload.layout
        size = layout.tp * layout.cp
        return [range(first, first + size) for first in range(0, layout.world, size)]

    def parts(self, layer: int) -> Parts:
        """Return the parts of one layer, by microbatch and data parallel group.

        Raises:
            WrongForm: a rank returned no logits, or logits of another shape.
        """
        return [[self._part(place, layer, ranks) for ranks in self.groups()] for place in self.trained]

    def _part(self, place: int, layer: int, ranks: range) -> Part:
        batches = [self.batches(rank)[place] for rank in ranks]
        sizes = [batch.x[layer].shape[0] * batch.x[layer].shape[1] for batch in batches]
        ends = torch.tensor([0, *sizes]).cumsum(0)
        places = [torch.arange(int(first), int(last)) for first, last in pairwise(ends)]
        seen = [self.forwards[rank][place] for rank in ranks]
        E = self.workload.config.experts
        for rank, forward, size in zip(ranks, seen, sizes, strict=True):
            logits_TE = forward["logits"][layer]
            if logits_TE is None or tuple(logits_TE.shape) != (size, E):
                form = None if logits_TE is None else tuple(logits_TE.shape)
                raise WrongForm("loss", f"rank {rank} returned logits {form} instead of {(size, E)}", ranks=(rank,))
        width = batches[0].x[layer].shape[1]
        ids_TK = whole([_padded(forward["ids"][layer], self.workload.config.top_k) for forward in seen], places)
        upstream_TE = whole([batch.upstream[layer] for batch in batches], places).double()
        return Part(
            ranks=tuple(ranks),
            tokens=tuple(sizes),
            logits_TE=whole([forward["logits"][layer] for forward in seen], places).double(),
            x_TD=whole(
                [batch.x[layer].reshape(size, -1) for batch, size in zip(batches, sizes, strict=True)], places
            ).double(),
            ids_TK=ids_TK,
            upstream_TK=upstream_TE.gather(1, ids_TK.clamp_min(0)) * (ids_TK >= 0),
            padding_T=None if batches[0].padding_T is None else whole([batch.padding_T for batch in batches], places),  # type: ignore[misc]
            sequences_T=whole([torch.arange(size) % width for size in sizes], places),
        )


def _padded(ids_TK: Tensor, K: int) -> Tensor:
    """Return ids with K slots: where slots were dropped a rank may return as many as its fullest token has."""
    return torch.nn.functional.pad(ids_TK, (0, max(0, K - ids_TK.shape[1])), value=-1)


def steps_of(outcome: Outcome) -> list[Step]:
    """Return all training steps of a script."""
    return once(outcome, _steps)


def _steps(outcome: Outcome) -> list[Step]:
    found = []
    for call in range(len(outcome.workload.calls)):
        forwards, finals, reports = (values(outcome, call, name) for name in ("forwards", "final", "report"))
        shards = values(outcome, call, "shards")
        by_rank, has_reports = tuple(report or {} for report in reports), any(report is not None for report in reports)
        found.append(Step(outcome.workload, call, forwards, finals, by_rank, has_reports, shards))
    return found


def declared(outcome: Outcome) -> Rule:
    """Return the rule that the backend claims."""
    claims = outcome.ranks[0].claims
    return Rule(
        gathered=claims.loss_gradients, fractions=claims.loss_fractions, remembers=claims.global_counts == "step"
    )


def legal(outcome: Outcome, parts: Parts) -> Iterator[Rule]:
    """Yield the rules that the spec allows: the claimed one, then those that differ where the spec leaves a choice."""
    base = declared(outcome)
    flat = [part for row in parts for part in row]
    routing = outcome.workload.config.routing
    choices = ("own", "limited") if routing.groups else ("own",)
    if routing.forced:  # these are equal for forced logits
        choices = ("own", "routed")
    uneven = any(len(set(_valid(part))) > 1 for part in flat)
    empty = any(_has_empty_sequence(part) for part in flat)
    z = ("whole", "of ranks") if uneven else ("whole",)
    sequences = ("all", "valid") if empty else ("all",)
    for choice, of, counted in product(choices, z, sequences):
        yield replace(base, choices=choice, z=of, sequences=counted)  # type: ignore[arg-type]


def _valid(part: Part) -> list[int]:
    if part.padding_T is None:
        return list(part.tokens)
    return [int((~part.of_rank(part.padding_T, number)).sum()) for number in range(len(part.ranks))]


def _has_empty_sequence(part: Part) -> bool:
    if part.padding_T is None:
        return False
    held = part.sequences_T[~part.padding_T].unique()
    return len(held) < len(part.sequences_T.unique())


def mistakes(outcome: Outcome) -> Iterator[tuple[str, Rule]]:
    """Yield wrong rules, each with its description."""
    claims, base = outcome.ranks[0].claims, declared(outcome)
    other: Any = "sum" if claims.loss_gradients == "mean" else "mean"
    over = {"sum": "summed", "mean": "averaged"}[other]
    words = f"losses are {over} over microbatches and data parallel groups"
    yield f"{words}, and Claims.loss_gradients is {claims.loss_gradients!r}", replace(base, gathered=other)
    other = "tokens" if claims.loss_fractions == "slots" else "slots"
    of = {"tokens": "fractions add up to K", "slots": "fractions add up to 1"}[other]
    yield f"{of}, and Claims.loss_fractions is {claims.loss_fractions!r}", replace(base, fractions=other)
    kept = {True: "counts of earlier microbatches are kept", False: "counts of earlier microbatches are not kept"}
    said = f"{kept[not base.remembers]}, and Claims.global_counts is {claims.global_counts!r}"
    yield said, replace(base, remembers=not base.remembers)
    yield "padding tokens are counted", replace(base, padding="counted")
    yield "the padding mask is inverted", replace(base, padding="inverted")
    for score in ("softmax", "sigmoid"):
        if score != outcome.workload.config.routing.score:
            yield f"the scores are those of {score}", replace(base, score=score)
    yield "the slots are those that were routed to, with bias, groups and drops", replace(base, choices="routed")
    yield "sequences are not kept apart", replace(base, one_sequence=True)
    yield "every rank has counts of its own tokens only", replace(base, ranks_alone=True)
    yield "it was computed from scores instead of logits", replace(base, z="of scores")
    first = steps_of(outcome)[0].parts(0)[0][0].valid
    yield "it was divided by the number of tokens of the first microbatch", replace(base, z_tokens=first)
