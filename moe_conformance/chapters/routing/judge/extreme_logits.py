"""Judges of routers with extreme logits: whether results are legal, where several are.

The router of these workloads has a single 1 or -1 per expert, so that logits are exact in any order and dtype. Bounds
are therefore much smaller than those of a sum of products: the error of a score is a few of its roundoffs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.judging.compare.bounded import compare, note_beyond
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.finished import require_finished
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import places_of
from moe_conformance.judging.observed.script import SLIPS
from moe_conformance.judging.shared.router.routers import require_ids
from moe_conformance.judging.verdict import (
    AbsentGradient,
    Mismatch,
    Raised,
    Tally,
    Uncovered,
    WrongForm,
    WrongGradient,
    WrongSelection,
    WrongWeight,
)
from moe_conformance.reference.forcing.routes import legal_ids
from moe_conformance.reference.routing import bad_tokens, extreme_logits, routes, selection
from moe_conformance.reference.routing.routes import Routed, selection_scores
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.workload import Workload


def judge_extreme(reading: Reading, tally: Tally) -> None:
    """Decide whether every token gets K different experts, unmasked ones first, with finite weights and gradients.

    Raises:
        WrongForm: ids and weights are not (T, K), or ids are not integers.
        WrongSelection, WrongWeight, WrongGradient: the results of a token are not legal.
        Uncovered: a rank does not name the router.
    """
    workload = reading.outcome.workload
    config = workload.config
    for place in places_of(workload, range(workload.layout.world)):
        logits_TE, ids_TK, weights_TK = _routed(reading, *place)
        bias_E = workload.parameters.get(("balance_bias", None))
        chosen_T = extreme_logits.legal_ids(
            logits_TE, ids_TK, score=config.routing.score, bias_E=bias_E, among_TE=_among(workload, logits_TE)
        )
        _require(chosen_T, WrongSelection, place[1], "selected", ids_TK, logits_TE)
        weighed_T = extreme_logits.legal_weights(
            logits_TE,
            ids_TK,
            weights_TK.double(),
            score=config.routing.score,
            normalise=config.routing.normalise,
            scale=config.routing.scale,
            rounding=2.0**-20 if config.dtype.itemsize >= 4 else 2.0**-6,  # in any dtype in which they are returned
        )
        _require(weighed_T, WrongWeight, place[1], "has the weights", weights_TK, logits_TE)
        tally.add(pairs=ids_TK.numel(), rank=place[1])
        if reading.goes_backward(place[0]):
            _judge_gradients(reading, *place, tally)


def _judge_gradients(reading: Reading, m: int, rank: int, tally: Tally) -> None:
    dx_TD = reading.seen(m, rank).dx_TD.value
    router = reading.ranks[rank].grads_local.get(("router", None))
    if router is None:
        raise Uncovered("route", f"the weight of the router is not yielded by 'named' on rank {rank}", ranks=(rank,))
    for whose, gradient in (("the tokens", dx_TD), ("the router", router.value)):
        if gradient is not None and not bool((finite := extreme_logits.finite_gradients(gradient)).all()):
            row = int((~finite).nonzero()[0])
            sentence = f"the gradient of {whose} on rank {rank} is not finite, first in row {row}"
            raise WrongGradient("gradient", sentence, ranks=(rank,))
        tally.add(elements=0 if gradient is None else gradient.numel(), rank=rank)


def judge_extreme_choice(reading: Reading, tally: Tally) -> None:
    """Decide whether every token gets K experts with the highest scores, as far as these are distinguishable.

    Raises:
        WrongForm: ids and weights are not (T, K).
        WrongSelection: a token has other experts.
    """
    workload = reading.outcome.workload
    for place in places_of(workload, range(workload.layout.world)):
        logits_TE, ids_TK, _ = _routed(reading, *place)
        _require(legal_ids(ids_TK, workload.config.experts), WrongSelection, place[1], "selected", ids_TK, logits_TE)
        _require(_best(workload, logits_TE, ids_TK), WrongSelection, place[1], "selected", ids_TK, logits_TE)
        tally.add(pairs=ids_TK.numel(), rank=place[1])


def _best(workload: Workload, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Return which tokens have a choice that is the best for some scores within rounding, bool (T,).

    The score of every selected expert is increased by its error, and all others are decreased. A group adds up scores
    of both kinds; there the margin of the right scores is compared with the largest error of a token's scores.
    """
    config = workload.config
    scores_TE = _selection_scores(workload, logits_TE)
    bias_E = workload.parameters.get(("balance_bias", None), torch.zeros(config.experts))
    finite_TE = torch.where(scores_TE.isfinite(), scores_TE, 0.0)
    error_TE = _rounding(workload) * (finite_TE.abs() + bias_E.double().abs()) + _LEAST
    if config.routing.groups is not None:
        margin_T = selection.margins(
            scores_TE, ids_TK, groups=config.routing.groups, group_score=config.routing.group_score
        )
        return margin_T >= -2 * error_TE.max(1).values
    favoured_TE = (scores_TE - error_TE).scatter(1, ids_TK, (scores_TE + error_TE).gather(1, ids_TK))
    return selection.margins(favoured_TE, ids_TK) >= 0


def judge_extreme_weights(reading: Reading, tally: Tally) -> None:
    """Decide whether weights are the selected experts' scores, unless the sum that divides them underflows.

    Raises:
        WrongForm, WrongSelection: as `judge_extreme_choice`.
        WrongWeight: a token has other weights.
    """
    with tally.uncounted() as uncounted:
        judge_extreme_choice(reading, uncounted)
    workload = reading.outcome.workload
    config = workload.config
    for place in places_of(workload, range(workload.layout.world)):
        logits_TE, ids_TK, weights_TK = _routed(reading, *place)
        right_TK = routes.weights(
            logits_TE,
            ids_TK,
            score=config.routing.score,
            normalise=config.routing.normalise,
            scale=config.routing.scale,
        )
        decided_T = _decided(workload, logits_TE, ids_TK)
        allowed_TK = _rounding(workload) * right_TK + config.routing.scale * _LEAST / _UNDERFLOW
        right_T = ((weights_TK.double() - right_TK).abs() <= allowed_TK).all(1)
        note_beyond(tally, weights_TK[decided_T], right_TK[decided_T], allowed_TK[decided_T])
        _require(right_T | ~decided_T, WrongWeight, place[1], "has the weights", weights_TK, logits_TE)
        tally.add(pairs=int(decided_T.sum()) * config.top_k, rank=place[1])


@judge(WrongGradient, "gradient")
def judge_extreme_dx(reading: Reading) -> Comparisons:
    """Decide whether every token gets its own gradient, however large the logits of other tokens are.

    The derivative of a weight is at most the scale, so that errors are relative to the scale and the upstream gradients
    of the token. Tokens whose normalising sum underflows are not compared.

    Raises:
        WrongForm, WrongSelection: as `judge_extreme_choice`.
        AbsentGradient: the gradient of the tokens is None.
        WrongGradient: a token has another gradient.
    """
    judge_extreme_choice(reading, Tally())
    workload = reading.outcome.workload
    config = workload.config
    for m, rank in places_of(workload, range(workload.layout.world)):
        logits_TE, ids_TK, _ = _routed(reading, m, rank)
        upstream_TK = workload.batches[m][rank].upstream.double().gather(1, ids_TK)
        slack_T1 = 4 * _rounding(workload) * config.routing.scale * upstream_TK.abs().sum(1, keepdim=True)
        leaf_TE = logits_TE.detach().requires_grad_()
        weights_TK = routes.weights(
            leaf_TE, ids_TK, score=config.routing.score, normalise=config.routing.normalise, scale=config.routing.scale
        )
        (dlogits_TE,) = torch.autograd.grad(weights_TK, leaf_TE, upstream_TK)
        right_TD = dlogits_TE @ workload.parameters["router", None].double()
        dx_TD = reading.seen(m, rank).dx_TD.value
        if dx_TD is None:
            raise AbsentGradient("gradient", f"dx of rank {rank} is None", ranks=(rank,))
        decided_T = _decided(workload, logits_TE, ids_TK)
        wrong_TD = ~((dx_TD.double() - right_TD).abs() <= slack_T1) & decided_T[:, None]
        worst = compare(dx_TD[decided_T], right_TD[decided_T], slack_T1.expand_as(right_TD)[decided_T])
        for t in wrong_TD.any(1).nonzero().flatten().tolist():
            d = int(wrong_TD[t].nonzero()[0])
            has = f"rank {rank} token {t} has the gradient {float(dx_TD[t, d]):g} in column {d}"
            wrong = f"{has}, expected {float(right_TD[t, d]):g}; {_logits_words(logits_TE[t])}"
            yield Comparison(rank, wrong, worst=worst.counted, kind="dx")
        yield Comparison(rank, elements=int(decided_T.sum()) * dx_TD.shape[1])


def _decided(workload: Workload, logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Return the tokens for which no sum of scores that is divided by underflows, bool (T,)."""
    scores_TK = routes.weights(logits_TE, ids_TK, score=workload.config.routing.score)
    return (scores_TK.sum(1) > _UNDERFLOW) | (not workload.config.routing.normalise)


def judge_spoilt_routes(outcome: Outcome, tally: Tally) -> None:
    """Decide whether NaN or infinite logits leave ids in range, and the routes of other tokens unchanged.

    The other tokens are alone in microbatch 0, with the non-finite ones in microbatch 1, and alone again in microbatch
    2. All ranks may also raise an error in microbatch 1, unless it is an internal error (`script.SLIPS`).

    Raises:
        WrongForm: ids and weights are not (T, K).
        WrongSelection: an id is of no expert, or a token has an expert twice.
        WrongWeight: another token has another route than in a batch without the non-finite ones.
        Hung, Died, Raised: a rank ends in another way.
    """
    if all(rank.status == "raised" and rank.reached == "forward:1" for rank in outcome.ranks):
        for of_rank in outcome.ranks:
            if f"builtins.{(of_rank.error or '').partition(':')[0]}" in SLIPS:
                error = f"raised an internal error instead of refusing a logit: {of_rank.error}"
                raise Raised("run", f"the router of rank {of_rank.rank} {error}", ranks=(of_rank.rank,))
            tally.add(pairs=1, rank=of_rank.rank)
        return
    require_finished(outcome)
    reading = Reading(outcome, tuple(sorted(outcome.ranks, key=lambda rank: rank.rank)))
    for rank in range(len(reading.ranks)):
        logits_TE, ids_TK, weights_TK = _routed(reading, 1, rank)
        within_T = bad_tokens.legal_ids_beside_bad(ids_TK, outcome.workload.config.experts)
        _require(within_T, WrongSelection, rank, "selected", ids_TK, logits_TE)
        for alone, when in (
            (0, "in a batch with a non-finite token"),
            (2, "in a batch with a non-finite token or in the next batch"),
        ):
            _, ids_GK, weights_GK = _routed(reading, alone, rank)
            without = Routed(ids_GK, weights_GK.double())
            left_T = bad_tokens.unmoved(logits_TE, ids_TK, weights_TK.double(), without, rounding=_ROUNDING)
            verb, wrong = f"has, {when}, the weights", ", which differ from those without it"
            _require(left_T, WrongWeight, rank, verb, weights_TK, logits_TE, wrong=wrong)
        tally.add(pairs=ids_TK.numel(), rank=rank)


_ROUNDING = 2.0**-18  # error of a weight in float32: a token may be computed in another order in another batch
_UNDERFLOW = 1e-12  # a sum of scores small against an epsilon in a division, as in `extreme_routing.legal_weights`
_LEAST = 2.0**-126  # below this float32 does not have its full precision


def _rounding(workload: Workload) -> float:
    """Return the relative error of a score or a weight: an exponent of 100 has 2 ** -17 in float32."""
    return 2.0**-16 if workload.config.dtype.itemsize >= 4 else 2.0**-6


def _selection_scores(workload: Workload, logits_TE: Tensor) -> Tensor:
    bias_E = workload.parameters.get(("balance_bias", None))
    return selection_scores(logits_TE, score=workload.config.routing.score, bias_E=bias_E)


def _routed(reading: Reading, m: int, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the right logits of a place, and the returned ids and weights."""
    workload, seen = reading.outcome.workload, reading.seen(m, rank)
    x_TD = workload.batches[m][rank].x_TD
    ids_TK, weights_TK = seen.router.ids_TK, seen.router.weights_TK
    shape = (len(x_TD), workload.config.top_k)
    if ids_TK is None or weights_TK is None or tuple(ids_TK.shape) != shape or tuple(weights_TK.shape) != shape:
        raise WrongForm("route", f"ids or weights of rank {rank} do not have the shape {shape}", ranks=(rank,))
    require_ids(ids_TK, rank)
    return x_TD.double() @ workload.parameters["router", None].double().T, ids_TK, weights_TK


def _among(workload: Workload, logits_TE: Tensor) -> Tensor | None:
    """Return the mask of experts in open groups for each token, None without groups."""
    config = workload.config
    if config.routing.groups is None:
        return None
    scores_TE = _selection_scores(workload, logits_TE)
    return selection.group_mask(
        scores_TE, config.routing.groups, top_k=config.top_k, group_score=config.routing.group_score
    )


def _require(
    legal_T: Tensor,
    kind: type[Mismatch],
    rank: int,
    verb: str,
    what_TK: Tensor,
    logits_TE: Tensor,
    *,
    wrong: str = ", which is not legal",
) -> None:
    """Raise with every token that is not legal, its result and its logits."""
    findings = []
    for t in (~legal_T).nonzero().flatten().tolist():
        sentence = f"rank {rank} token {t} {verb} {what_TK[t].tolist()}{wrong}; {_logits_words(logits_TE[t])}"
        findings.append(Finding(verb, sentence, (rank,)))
    if findings:
        fail(kind, "route", findings)


def _logits_words(logits_E: Tensor) -> str:
    return f"its logits are {', '.join(f'{logit:g}' for logit in logits_E.tolist())}"
