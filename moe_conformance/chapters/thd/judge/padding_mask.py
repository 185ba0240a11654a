"""Judge of a router with a padding mask: the routes of tokens, and the load without padding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.judging.compare.bounded import compare
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.scopes import Place
from moe_conformance.judging.observed.script import answers, values
from moe_conformance.judging.shared.router.expected import RouterExpected
from moe_conformance.judging.shared.router.explain_selection import explain_selection
from moe_conformance.judging.shared.router.routers import require_ids
from moe_conformance.judging.shared.router.rules import explain_weights
from moe_conformance.judging.verdict import (
    AbsentGradient,
    Tally,
    WrongCount,
    WrongForm,
    WrongGradient,
    WrongSelection,
    WrongWeight,
)
from moe_conformance.reference.capacity import limits
from moe_conformance.reference.forcing.routes import legal_ids
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.workload import Batch, Call

Routings = Sequence[Mapping[str, Tensor]]  # the routing of every rank


def judge_masked_router(outcome: Outcome, tally: Tally) -> None:
    """Decide whether tokens are routed as without padding, whatever padding rows hold, and loads exclude padding.

    Routes are equal to the bit. The second call of each pair differs from the first in the padding rows only; each pair
    has its own mask. A router that balances reports its load.

    Raises:
        WrongForm: ids and weights are not (T, K), ids are not integers, or the load of a router that balances is
            missing.
        WrongSelection: a token's experts are not the best, or others in the second call; or a padding row has neither
            K different experts nor empty slots alone.
        WrongWeight: a token's weights are not theirs, or others in the second call; or those of empty slots are not 0.
        WrongCount: the load is not that of the tokens.
        AbsentGradient, WrongGradient: tokens have no gradient or another than without padding, or padding has one.
    """
    for first in range(0, len(outcome.workload.calls), 2):
        pair = {number: values(outcome, number, "routing") for number in (first, first + 1)}
        for number, routings in pair.items():
            loads = values(outcome, number, "counts_E")
            for rank, routing in enumerate(routings):
                mask_T = outcome.workload.calls[number].given[rank]["padding_mask_T"]
                _judge_form(outcome, rank, routing, len(mask_T))
                _judge_ids(outcome, rank, routing["ids_TK"], mask_T)
                _judge_empty_slots(rank, routing, mask_T)
                _judge_load(outcome, rank, routing["ids_TK"], mask_T, loads[rank])
        _judge_alike(outcome, first, pair, tally)
        for number, routings in pair.items():
            _judge_tokens(outcome, number, routings, tally)


def _judge_form(outcome: Outcome, rank: int, routing: Mapping[str, Tensor], T: int) -> None:
    shape = T, outcome.workload.config.top_k
    if any(tuple(routing[name].shape) != shape for name in ("ids_TK", "weights_TK")):
        raise WrongForm("route", f"ids or weights of rank {rank} do not have the shape {shape}", ranks=(rank,))
    require_ids(routing["ids_TK"], rank)


def _judge_ids(outcome: Outcome, rank: int, ids_TK: Tensor, mask_T: Tensor) -> None:
    """Raise for the first row whose ids are not valid; a padding row may have empty slots only."""
    config = outcome.workload.config
    different = f"{config.top_k} different experts of {config.experts}"
    for t in (~legal_ids(ids_TK, config.experts, padding_T=mask_T)).nonzero().flatten().tolist():
        ids_K = ids_TK[t].tolist()
        if bool(mask_T[t]):
            sentence = f"padding token {t} of rank {rank} has the ids {ids_K}: neither {different} nor -1 in all slots"
        elif min(ids_K) < 0:
            sentence = f"token {t} of rank {rank} is not padding, and has empty slots (id -1)"
        else:
            sentence = f"token {t} of rank {rank} selected {ids_K}, which is not {different}"
        raise WrongSelection("route", sentence, ranks=(rank,))


def _judge_empty_slots(rank: int, routing: Mapping[str, Tensor], mask_T: Tensor) -> None:
    for t in mask_T.nonzero().flatten().tolist():
        if bool((routing["weights_TK"][t][routing["ids_TK"][t] < 0] != 0).any()):
            raise WrongWeight(
                "route",
                f"padding token {t} of rank {rank} has weights other than 0 in empty slots (id -1)",
                ranks=(rank,),
            )


def _judge_load(outcome: Outcome, rank: int, ids_TK: Tensor, mask_T: Tensor, counts_E: Any) -> None:
    config = outcome.workload.config

    def load(chosen: Tensor) -> list[int]:
        return limits.loads(chosen, config.experts).tolist()

    if not isinstance(counts_E, Tensor):
        if config.routing.balance_bias:
            raise WrongForm("route", f"the router of rank {rank} has an expert bias and reports no load", ranks=(rank,))
        return
    expected, counted = load(ids_TK[~mask_T]), counts_E.tolist()
    if counted != expected:
        cause = ""
        if counted == load(ids_TK):
            cause = "; likely cause: padding is counted"
        elif counted == load(ids_TK[mask_T]):
            cause = "; likely cause: padding alone is counted (the mask is inverted)"
        sentence = f"rank {rank} reports the load {counted}; expected {expected}, as its tokens selected{cause}"
        raise WrongCount("route", sentence, ranks=(rank,))


def _judge_alike(outcome: Outcome, first: int, pair: Mapping[int, Routings], tally: Tally) -> None:
    for rank, (one, other) in enumerate(zip(*pair.values(), strict=True)):
        mask_T = outcome.workload.calls[first].given[rank]["padding_mask_T"]
        for t in (~mask_T).nonzero().flatten().tolist():
            where = f"token {t} of rank {rank}, in a second call with other values at the padding tokens,"
            if not torch.equal(one["ids_TK"][t], other["ids_TK"][t]):
                chosen = f"{other['ids_TK'][t].tolist()} instead of {one['ids_TK'][t].tolist()}"
                raise WrongSelection("route", f"{where} selects {chosen}", ranks=(rank,))
            if not torch.equal(one["weights_TK"][t], other["weights_TK"][t]):
                weights = f"{other['weights_TK'][t].tolist()} instead of {one['weights_TK'][t].tolist()}"
                raise WrongWeight("route", f"{where} has the weights {weights}", ranks=(rank,))
            tally.add(pairs=1, rank=rank)


def _judge_tokens(outcome: Outcome, number: int, routings: Routings, tally: Tally) -> None:
    """Compare the tokens of a call with the oracle of a router that received them without padding."""
    workload, call = outcome.workload, outcome.workload.calls[number]
    alone = tuple(_alone(call, rank, routing, workload.config.experts) for rank, routing in enumerate(routings))
    ids = {(0, rank): batch.ids_TK for rank, batch in enumerate(alone)}
    weights = {(0, rank): batch.weights_TK for rank, batch in enumerate(alone)}
    expected = RouterExpected(replace(workload, batches=(alone,)), ids, 1)
    illegal = {place: (~expected.legal(place)).nonzero().flatten().tolist() for place in ids}
    if any(illegal.values()):
        fail(WrongSelection, "route", _numbered(explain_selection(expected, illegal)))
    targets = {place: expected.weights(place) for place in ids}
    worst = [compare(weights[place], *targets[place], tally, place[1]) for place in ids]
    if not all(element.holds for element in worst):
        findings, ratio = explain_weights(expected, weights, targets)
        fail(WrongWeight, "route", _numbered(findings), ratio=ratio)
    if call.upstream:
        for place in ids:
            _judge_gradient(outcome, number, place, expected, tally)


def _alone(call: Call, rank: int, routing: Mapping[str, Tensor], experts: int) -> Batch:
    """Return the tokens of a rank without padding, with their routing and dense upstream gradient."""
    x, kept_T = call.given[rank]["x"], ~call.given[rank]["padding_mask_T"]
    ids_TK, weights_TK = (routing[name][kept_T] for name in ("ids_TK", "weights_TK"))
    upstream_TE = torch.zeros(len(ids_TK), experts)
    if call.upstream:
        upstream_TE = upstream_TE.scatter(1, ids_TK.long(), call.upstream[rank]["routing.weights_TK"][kept_T])
    return Batch(x.reshape(-1, x.shape[-1])[kept_T], ids_TK, weights_TK, upstream_TE)


def _judge_gradient(outcome: Outcome, number: int, place: Place, expected: RouterExpected, tally: Tally) -> None:
    """Compare dx of tokens with the oracle; that of padding rows is zero."""
    rank = place[1]
    given = outcome.workload.calls[number].given[rank]
    dx = answers(outcome, number)[rank].gradients["x"]
    if dx is None:
        raise AbsentGradient("gradient", f"dx of rank {rank} is None in a batch with padding", ranks=(rank,))
    dx_TD, padding_T = dx.reshape(-1, dx.shape[-1]), given["padding_mask_T"]
    if bool((dx_TD[padding_T] != 0).any()):  # also counts NaN
        raise WrongGradient("gradient", f"dx of rank {rank} is not zero at a padding token", ranks=(rank,))
    worst = compare(dx_TD[~padding_T], *expected.dx(place), tally, rank)
    if not worst.holds:
        raise WrongGradient("gradient", f"dx of rank {rank} at tokens that are not padding is {worst}", ranks=(rank,))


def _numbered(findings: Sequence[Finding]) -> list[Finding]:
    return [
        replace(finding, sentence=f"{finding.sentence}; tokens are numbered here without padding")
        for finding in findings
    ]
