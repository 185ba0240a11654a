"""Routers at the ends of what logits can be: whether what they answer is legal, where several answers are."""

from __future__ import annotations

from torch import Tensor

from moe_conformance.judging.diagnosis import Finding, fail
from moe_conformance.judging.places import places_of
from moe_conformance.judging.reading import Reading, require_finished
from moe_conformance.judging.verdict import Mismatch, Tally, WrongForm, WrongGradient, WrongSelection, WrongWeight
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records import Workload
from reference import bad_tokens, extreme_routing, selection
from reference.routing import Routed, selection_scores


def judge_extreme(reading: Reading, tally: Tally) -> None:
    """Decide whether every token gets K different experts, unmasked ones first, with finite weights and gradients.

    Raises:
        WrongForm: ids and weights are not (T, K).
        WrongSelection, WrongWeight, WrongGradient: a token's are not legal.
    """
    workload = reading.outcome.workload
    config = workload.config
    for place in places_of(workload, range(workload.layout.world)):
        logits_TE, ids_TK, weights_TK = _routed(reading, *place)
        bias_E = workload.parameters.get(("balance_bias", None))
        chosen_T = extreme_routing.legal_ids(
            logits_TE, ids_TK, score=config.score, bias_E=bias_E, among_TE=_among(workload, logits_TE)
        )
        _require(chosen_T, WrongSelection, place[1], "chose", ids_TK, logits_TE)
        weighed_T = extreme_routing.legal_weights(
            logits_TE,
            ids_TK,
            weights_TK.double(),
            score=config.score,
            normalise=config.normalise,
            scale=config.scale,
            rounding=2.0**-20 if weights_TK.dtype.itemsize >= 4 else 2.0**-6,
        )
        _require(weighed_T, WrongWeight, place[1], "has the weights", weights_TK, logits_TE)
        tally.add(pairs=ids_TK.numel(), rank=place[1])
        if reading.goes_backward(place[0]):
            _judge_gradients(reading, *place, tally)


def _judge_gradients(reading: Reading, m: int, rank: int, tally: Tally) -> None:
    dx_TD = reading.seen(m, rank).dx_TD.value
    router = reading.ranks[rank].grads_local["router", None].value
    for whose, gradient in (("the tokens", dx_TD), ("the router", router)):
        if gradient is not None and not bool(gradient.isfinite().all()):
            row = int((~gradient.isfinite()).any(1).nonzero()[0])
            sentence = f"the gradient of {whose} on rank {rank} is not finite, the first in row {row}"
            raise WrongGradient("gradient", sentence, ranks=(rank,))
        tally.add(elements=0 if gradient is None else gradient.numel(), rank=rank)


def judge_spoilt_routes(outcome: Outcome, tally: Tally) -> None:
    """Decide whether a logit that is no number leaves ids within range, and the routes of the other tokens as they are.

    An error on every rank is as good.

    Raises:
        WrongForm: ids and weights are not (T, K).
        WrongSelection: an id that no expert has, or an expert twice in a token.
        WrongWeight: another token has another route than in a batch without the spoilt ones.
        Hung, Died, Raised: ranks end otherwise.
    """
    if all(rank.status == "raised" and rank.reached == "forward:0" for rank in outcome.ranks):
        for each in outcome.ranks:
            tally.add(pairs=1, rank=each.rank)
        return
    require_finished(outcome)
    reading = Reading(outcome, tuple(sorted(outcome.ranks, key=lambda rank: rank.rank)))
    for rank in range(len(reading.ranks)):
        logits_TE, ids_TK, weights_TK = _routed(reading, 0, rank)
        within_T = bad_tokens.legal_ids_beside_bad(ids_TK, outcome.workload.config.experts)
        _require(within_T, WrongSelection, rank, "chose", ids_TK, logits_TE)
        _, ids_GK, weights_GK = _routed(reading, 1, rank)
        left_T = bad_tokens.unmoved(
            logits_TE, ids_TK, weights_TK.double(), Routed(ids_GK, weights_GK.double()), rounding=_ROUNDING
        )
        _require(left_T, WrongWeight, rank, "has, beside a spoilt token, the weights", weights_TK, logits_TE)
        tally.add(pairs=ids_TK.numel(), rank=rank)


_ROUNDING = 2.0**-18  # of a weight in float32: a token may be computed in another order beside others


def _routed(reading: Reading, m: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the right logits of a place, and what was routed there."""
    workload, seen = reading.outcome.workload, reading.seen(m, rank)
    x_TD = workload.batches[m][rank].x_TD
    ids_TK, weights_TK = seen.routed_ids_TK, seen.routed_weights_TK
    shape = (len(x_TD), workload.config.top_k)
    if ids_TK is None or weights_TK is None or tuple(ids_TK.shape) != shape or tuple(weights_TK.shape) != shape:
        raise WrongForm("route", f"ids and weights of rank {rank} are not {shape}", ranks=(rank,))
    return x_TD.double() @ workload.parameters["router", None].double().T, ids_TK, weights_TK


def _among(workload: Workload, logits_TE: Tensor) -> Tensor | None:
    """Return the experts of the groups that are open to each token; None without groups."""
    config = workload.config
    if config.groups is None:
        return None
    scores_TE = selection_scores(
        logits_TE, score=config.score, bias_E=workload.parameters.get(("balance_bias", None))
    )
    return selection.group_mask(scores_TE, config.groups, top_k=config.top_k, group_score=config.group_score)


def _require(
    legal_T: Tensor, kind: type[Mismatch], rank: int, verb: str, what_TK: Tensor, logits_TE: Tensor
) -> None:
    """Fail with every token that is not legal, what it got and what its logits are."""
    findings = []
    for t in (~legal_T).nonzero().flatten().tolist():
        logits = ", ".join(f"{logit:g}" for logit in logits_TE[t].tolist())
        sentence = f"rank {rank} token {t} {verb} {what_TK[t].tolist()}; its logits are {logits}"
        findings.append(Finding(verb, sentence, (rank,)))
    if findings:
        fail(kind, "route", findings)
