"""Judges of forced routers: group limits, loads, weights and gradients, and whether anything was forced.

Forced logits are used as the backend returns them. Other judges decide whether they were drawn correctly.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import comb

import torch

from moe_conformance.chapters.forcing.workloads.forcing import forces_logits
from moe_conformance.judging.compare.bounded import compare, note_beyond
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.cached import once
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Place
from moe_conformance.judging.shared.router.expected import ForcedExpected, RouterExpected
from moe_conformance.judging.shared.router.routers import (
    expected_of,
    judge_router_dx,
    judge_router_gradient,
    judge_router_weights,
    judge_selection,
)
from moe_conformance.judging.verdict import NotOffered, Tally, WrongForm, WrongGradient, WrongSelection, WrongWeight
from moe_conformance.reference.capacity.limits import loads
from moe_conformance.reference.forcing.routes import balanced, balanced_sum, groups_used
from moe_conformance.reference.forcing.scores import forced_weights, undecided_weights
from moe_conformance.reference.routing import selection

_ROUNDING = 2.0**-16  # bound on a weight whose logits are exact, in float32
_CHANCE = 1e-9  # the largest probability that draws agree with the router's own choice


def forced_expected_of(reading: Reading) -> RouterExpected | None:
    """Return the oracle's results for the logits in force: the router's own where ids are forced.

    Returns None if logits are forced and the backend does not return them.

    Raises:
        WrongForm: logits have another shape, are not finite, or are returned in some places only.
    """
    return once(reading, _expect_forced)


def _expect_forced(reading: Reading) -> RouterExpected | None:
    router = expected_of(reading)
    if not forces_logits(router.workload):
        return router
    returned = {place: reading.seen(*place).router.logits_TE for place in router.places}
    if all(logits_TE is None for logits_TE in returned.values()):
        return None
    forced = {}
    for (m, rank), logits_TE in returned.items():
        shape = len(router.ids[m, rank]), router.workload.config.experts
        if logits_TE is None or tuple(logits_TE.shape) != shape or not bool(logits_TE.isfinite().all()):
            raise WrongForm("route", f"the forced logits of rank {rank} are not {shape} or not finite", ranks=(rank,))
        forced[m, rank] = logits_TE
    return ForcedExpected(router.workload, router.ids, router.divisor, forced)


# ---- the group limit -----------------------------------------------------------------------------------------


def judge_forced_groups(reading: Reading, tally: Tally) -> None:
    """Decide whether forced logits obey the group limit; forced ids need not.

    Raises:
        WrongForm, WrongSelection: a choice breaks the limit; or nothing was forced.
    """
    if not forces_logits(reading.outcome.workload):
        judge_forced_loads(reading, tally)
        return
    forced = forced_expected_of(reading)
    _judge_limit(reading, tally)
    if forced is not None:
        with tally.uncounted() as uncounted:
            judge_selection(reading, uncounted, forced)


@judge(WrongSelection, "route")
def _judge_limit(reading: Reading) -> Comparisons:
    router = expected_of(reading)
    return compared_routes(router, ignored(router) or _over_limit(router) or _groups_ignored(router))


def compared_routes(router: RouterExpected, findings: Iterable[Finding]) -> Comparisons:
    """Yield the findings, and a comparison of the routes of every rank and forward."""
    yield from findings
    for place in router.places:
        yield Comparison(place[1], pairs=router.ids[place].numel())


def _over_limit(router: RouterExpected) -> list[Finding]:
    """Return findings for tokens whose experts are in more groups than the limit."""
    config = router.workload.config
    assert config.routing.groups is not None  # callers have groups
    groups, chosen = config.routing.groups
    findings = []
    for m, rank in router.places:
        used_T = groups_used(router.ids[m, rank], config.experts, groups)
        for t in (used_T > chosen).nonzero().flatten().tolist():
            sentence = (
                f"the experts {sorted(router.ids[m, rank][t].tolist())} of rank {rank} token {t} are in "
                f"{int(used_T[t])} groups; expected at most {chosen}; "
                "likely cause: logits were forced after the group limit"
            )
            findings.append(Finding("groups", sentence, (rank,), float(used_T[t])))
    return findings


def _groups_ignored(router: RouterExpected) -> list[Finding]:
    """Return findings if random logits selected only in the groups of the router's own logits, for every token."""
    config = router.workload.config
    assert config.routing.groups is not None
    if config.routing.forced[0][0] != "random":
        return []  # a bias may open the same groups for all tokens, which may be those by chance
    findings = []
    for place in router.places:
        tokens = len(router.ids[place])
        if comb(*config.routing.groups) ** -tokens < _CHANCE and _within_unforced_groups(router, place):
            sentence = (
                f"all {tokens} tokens of rank {place[1]} select experts of the groups that the router's own logits "
                "select, not the forced ones; likely cause: logits were forced after the group limit"
            )
            findings.append(Finding("unforced groups", sentence, (place[1],)))
    return findings


def _within_unforced_groups(router: RouterExpected, place: Place) -> bool:
    """Return whether every token's experts are in groups that its own scores open."""
    config = router.workload.config
    if config.routing.groups is None:
        return False
    scores_TE = router.selection_scores(place, router.bias_E)
    open_TE = selection.group_mask(
        scores_TE, config.routing.groups, top_k=config.top_k, group_score=config.routing.group_score
    )
    return bool(open_TE.gather(1, router.ids[place]).all())


def ignored(router: RouterExpected) -> list[Finding]:
    """Return findings for ranks whose tokens all selected what they would have selected without a strategy."""
    config = router.workload.config
    findings = []
    for place in router.places:
        tokens = len(router.ids[place])
        chance = float(comb(config.experts, config.top_k)) ** -tokens
        if chance < _CHANCE and bool(router.legal(place).all()):
            sentence = (
                f"all {tokens} tokens of rank {place[1]} are routed by the router's own logits; likely cause: "
                f"forced routing {config.routing.forced[0][0]} was requested, accepted and ignored"
            )
            findings.append(Finding("ignored", sentence, (place[1],)))
    return findings


# ---- loads ---------------------------------------------------------------------------------------------------


@judge(WrongSelection, "route")
def judge_forced_loads(reading: Reading) -> Comparisons:
    """Decide whether round robin gives the experts of every rank loads that differ by at most one.

    Raises:
        WrongForm, WrongSelection: loads differ by more, or nothing was forced.
    """
    router = expected_of(reading)
    for place in router.places:
        loads_E = loads(router.ids[place], router.workload.config.experts)
        wrong = "" if balanced(loads_E) else _unbalanced(router, place, loads_E.tolist())
        yield Comparison(place[1], wrong, pairs=router.ids[place].numel())


@judge(WrongSelection, "route")
def judge_loads_over_ranks(reading: Reading) -> Comparisons:
    """Decide whether round robin also balances the loads over all source ranks of an expert parallel group.

    The loads differ by at most one if all ranks have equally many tokens, else by at most the number of ranks.

    Raises:
        WrongForm, WrongSelection: other loads.
    """
    router, config = expected_of(reading), reading.outcome.workload.config
    for m in range(len(reading.batches)):
        for ranks in router.workload.layout.groups()["ep_etp"]:
            loads_by_rank = [loads(router.ids[m, rank], config.experts) for rank in ranks]
            if not balanced_sum(loads_by_rank):
                total_E = torch.stack(loads_by_rank).sum(0)
                sentence = (
                    f"the ranks {list(ranks)} together have the loads {total_E.tolist()} per expert in forward {m}; "
                    "expected for round_robin over all source ranks: as even as over one; likely cause: a rank does "
                    "not begin at the expert, modulo E, where the K slots of each token of the rank before end"
                )
                yield Comparison(None, Finding("sum", sentence, ranks, float(total_E.max() - total_E.min())))
            for rank in ranks:
                yield Comparison(rank, pairs=router.ids[m, rank].numel())


def _unbalanced(router: RouterExpected, place: Place, loads_E: list[int]) -> Finding:
    name, rank = router.workload.config.routing.forced[0][0], place[1]
    cause = ""
    if bool(router.legal(place).all()):
        cause = (
            "; every token is routed by the router's own logits; likely cause: forced routing "
            f"{name} was requested, accepted and ignored"
        )
    elif _within_unforced_groups(router, place):
        cause = "; likely cause: forced ids were limited to the groups that the router's own scores select"
    sentence = f"rank {rank} has the loads {loads_E} per expert; expected for {name}: they differ by at most one{cause}"
    return Finding(cause, sentence, (rank,), float(max(loads_E) - min(loads_E)))


# ---- weights and gradients -----------------------------------------------------------------------------------


def judge_forced_weights(reading: Reading, tally: Tally) -> None:
    """Decide whether the selected experts have the weights and gradients of the logits in force.

    Parameter gradients are included if the backend finishes them.

    Raises:
        NotOffered: logits are forced, and the backend does not return them.
        AbsentGradient, Uncovered, WrongForm, WrongGradient, WrongSelection, WrongWeight: as `judge_router_weights`,
            `judge_router_dx` and `judge_router_gradient`.
    """
    expected = _visible(reading)
    expect_forced_weights(reading, expected, tally)
    _judge_gradients(reading, tally, expected)


def _judge_gradients(reading: Reading, tally: Tally, expected: RouterExpected) -> None:
    judge_router_dx(reading, tally, expected)
    if any(rank.grads_final is not None for rank in reading.ranks):
        judge_router_gradient(reading, tally, expected)


def expect_forced_weights(reading: Reading, expected: RouterExpected, tally: Tally) -> None:
    """Decide whether the selected experts have the expected weights; the message names whose weights they have.

    Raises:
        WrongForm, WrongWeight: as `judge_router_weights`.
    """
    findings = [finding for place in expected.places for finding in _of_others(reading, expected, place)]
    if findings:
        for place in expected.places:
            weights_TK, target = reading.seen(*place).router.weights_TK, expected.weights(place)
            if weights_TK is not None and weights_TK.shape == target.expected.shape:
                note_beyond(tally, weights_TK, *target)
        fail(WrongWeight, "route", findings)
    judge_router_weights(reading, tally, expected)


@judge(WrongWeight, "route")
def judge_masked_weights(reading: Reading) -> Comparisons:
    """Decide whether forced experts with the logit -inf have the weight 0, and all others their finite score.

    Masked experts must be forced too: `judge_forced_loads` has no exception for masks. Logits are entries of the
    tokens, so that the error of a weight is a few of its roundoffs.

    Raises:
        WrongForm, WrongSelection, WrongWeight: weights are others, or nothing was forced.
    """
    judge_forced_loads(reading, Tally())
    router = expected_of(reading)
    for place in router.places:
        ids_TK, weights_TK = router.ids[place], reading.seen(*place).router.weights_TK
        if weights_TK is None or weights_TK.shape != ids_TK.shape:
            sentence = f"the weights of rank {place[1]} do not have the shape {tuple(ids_TK.shape)} of the ids"
            raise WrongForm("route", sentence, ranks=(place[1],))
        logits_TE = router.logits(place)
        right_TK = forced_weights(logits_TE, ids_TK, **router.weighing)
        near_TK = (weights_TK.double() - right_TK).abs() <= _ROUNDING * right_TK
        free_T1 = undecided_weights(logits_TE, ids_TK)[:, None]
        legal_T = torch.where(free_T1, weights_TK.isfinite(), near_TK).all(1)
        for t in (~legal_T).nonzero().flatten().tolist():
            sentence = (
                f"rank {place[1]} token {t} has the weights {weights_TK[t].tolist()}, which do not follow from "
                f"the logits of its forced experts, {logits_TE[t].gather(0, ids_TK[t]).tolist()}"
            )
            yield Comparison(place[1], sentence, kind="masked")
        yield Comparison(place[1], pairs=ids_TK.numel())


def _of_others(reading: Reading, expected: RouterExpected, place: Place) -> list[Finding]:
    """Return findings if the weights are those of the unforced experts, or of the router's own logits."""
    weights_TK = reading.seen(*place).router.weights_TK
    target = expected.weights(place)
    if weights_TK is None or weights_TK.shape != target.expected.shape or compare(weights_TK, *target).holds:
        return []
    router = expected_of(reading)
    others = {
        "the experts that the router would have selected without forcing": expected.weigh(
            router.logits(place), router.choice(place)
        ),
        "its experts by the router's own logits, not by the forced ones": expected.weigh(
            router.logits(place), router.ids[place]
        ),
    }
    rank, loose = place[1], float(target.allowed.max())
    for whose, other_TK in others.items():
        if torch.allclose(weights_TK.double().sort(1).values, other_TK.sort(1).values, rtol=0, atol=loose):
            sentence = f"the weights of every token of rank {rank} are wrong; likely cause: they are those of {whose}"
            return [Finding(whose, sentence, (rank,))]
    return []


def judge_straight_through(reading: Reading, tally: Tally) -> None:
    """Decide whether the gradient of forced logits is passed straight through to the router's own logits.

    It continues to tokens and, where the backend finishes gradients, to parameters.

    Raises:
        NotOffered: the backend does not return the forced logits.
        AbsentGradient, Uncovered, WrongForm, WrongGradient, WrongSelection: as `judge_router_dx` and
            `judge_router_gradient`.
    """
    expected = _visible(reading)
    _judge_passage(reading, tally, expected)
    _judge_gradients(reading, tally, expected)


@judge(WrongGradient, "gradient")
def _judge_passage(reading: Reading, expected: RouterExpected) -> Comparisons:
    """Decide whether the tokens' gradients are zeros only where they should be."""
    for m, rank in expected.places:
        if not reading.goes_backward(m):
            continue
        dx_TD, target = reading.seen(m, rank).dx_TD.value, expected.dx((m, rank))
        wanted = bool((target.expected.abs() > target.allowed).any())
        if wanted and dx_TD is not None and not bool(dx_TD.any()):
            sentence = (
                f"dx of rank {rank} is zero; likely cause: no gradient passes through the forced logits to the router"
            )
            yield Comparison(rank, sentence, worst=compare(dx_TD, *target).counted, kind="closed")


def _visible(reading: Reading) -> RouterExpected:
    expected = forced_expected_of(reading)
    if expected is None:
        raise NotOffered("the router does not report the forced logits")
    return expected
