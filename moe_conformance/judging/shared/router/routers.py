"""Judges of routers: selected experts, weights, load and gradients, within rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from moe_conformance.judging.compare.bounded import Target, compare
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.explain.bounded_gradients import Held, explain_gradients
from moe_conformance.judging.findings import Finding, fail, ratio_names
from moe_conformance.judging.observed.cached import once
from moe_conformance.judging.observed.finished_gradients import divisor_of, finals_of
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Place, places_of, shard_of, stages, whole
from moe_conformance.judging.shared.router.expected import GATE_BIAS, ROUTER, Limit, RouterExpected
from moe_conformance.judging.shared.router.explain_selection import explain_selection
from moe_conformance.judging.shared.router.rules import explain_router_dx, explain_weights, gradients_of
from moe_conformance.judging.verdict import (
    AbsentGradient,
    Indecisive,
    Mismatch,
    NotOffered,
    Stage,
    Tally,
    Uncovered,
    WrongCount,
    WrongForm,
    WrongGradient,
    WrongSelection,
    WrongWeight,
)
from moe_conformance.reference.capacity.limits import loads
from moe_conformance.reference.forcing.routes import legal_ids
from moe_conformance.reference.routing import routes
from moe_conformance.scenarios.outcome import Grad
from moe_conformance.workloads.records.workload import ParameterKey


def expected_of(reading: Reading) -> RouterExpected:
    """Return the oracle's results for a reading, computed once.

    Raises:
        WrongForm: the ids are missing, not (T, K), or not integers.
        WrongSelection: a token's K experts are not different or not in 0..E-1, so that no weights can be computed.
    """
    return once(reading, _expect)


def _expect(reading: Reading) -> RouterExpected:
    workload = reading.outcome.workload
    ids = {place: _chosen(reading, place) for place in places_of(workload, range(len(reading.ranks)))}
    findings = [finding for place, ids_TK in ids.items() for finding in _impossible(reading, place, ids_TK)]
    if findings:
        fail(WrongSelection, "route", findings)
    return RouterExpected(workload, ids, divisor_of(workload, reading.ranks[0].loss_convention))


def _chosen(reading: Reading, place: Place) -> Tensor:
    m, rank = place
    ids_TK = reading.seen(m, rank).router.ids_TK
    shape = (len(reading.batches[m][rank].x_TD), reading.outcome.workload.config.top_k)
    if ids_TK is None or tuple(ids_TK.shape) != shape:
        what = "missing" if ids_TK is None else f"of shape {tuple(ids_TK.shape)} instead of {shape}"
        raise WrongForm("route", f"the selection of rank {rank} is {what}", ranks=(rank,))
    require_ids(ids_TK, rank)
    return ids_TK


def require_ids(ids_TK: Tensor, rank: int) -> None:
    """Raise unless ids have an integer dtype that can number and index experts.

    Raises:
        WrongForm: they are floating point numbers, or integers of other sizes than four and eight bytes.
    """
    if ids_TK.dtype not in (torch.int32, torch.int64):
        sentence = f"the ids of rank {rank} are {ids_TK.dtype}; expected torch.int64 or torch.int32"
        raise WrongForm("route", sentence, ranks=(rank,))


def _impossible(reading: Reading, place: Place, ids_TK: Tensor) -> list[Finding]:
    E, rank = reading.outcome.workload.config.experts, place[1]
    findings = []
    for t in (~legal_ids(ids_TK, E)).nonzero().flatten().tolist():
        ids_K = ids_TK[t].tolist()
        sentence = f"rank {rank} token {t} selected {ids_K}, which is not {len(ids_K)} different experts of {E}"
        findings.append(Finding("impossible", sentence, (rank,)))
    return findings


# ---- selection -----------------------------------------------------------------------------------------------


def judge_selection(reading: Reading, tally: Tally, expected: RouterExpected | None = None) -> None:
    """Decide whether every token selected K different experts with the highest selection scores.

    The slots may come in any order. Where scores differ by less than their rounding errors, every choice
    among them is legal. `expected` replaces the oracle's results of the reading.

    Raises:
        WrongForm, WrongSelection: no such selection.
    """
    expected = expected or expected_of(reading)
    illegal = {place: (~expected.legal(place)).nonzero().flatten().tolist() for place in expected.places}
    if any(illegal.values()):
        fail(WrongSelection, "route", explain_selection(expected, illegal), note=_noise_words(reading, expected))
    for place in expected.places:
        tally.add(pairs=expected.ids[place].numel(), rank=place[1])


def _noise_words(reading: Reading, expected: RouterExpected) -> str:
    """Return a note with the claim of noise if all selections are legal for the returned logits, else ""."""
    for place in expected.places:
        logits_TE, expected_TE = reading.seen(*place).router.logits_TE, expected.logits(place)
        if logits_TE is None or logits_TE.shape != expected_TE.shape or not bool(logits_TE.isfinite().all()):
            return ""
        score = expected.weighing["score"]
        scores_TE = routes.selection_scores(logits_TE.double(), score=score, bias_E=expected.bias_E)
        if not bool(expected.legal(place, scores_TE).all()):
            return ""
    least = "the selections are right for the logits that the router returned, which are not those of its weight"
    if reading.claims.noise == "training":
        return f"; {least}; the noise that is claimed for training is there in evaluation mode too"
    return f"; {least}; a router that adds noise in training by design claims noise = 'training'"


def judge_bias(reading: Reading, tally: Tally) -> None:
    """Decide whether the balance bias affects the selection, and no weight.

    Counts the pairs of tokens whose choice would not be legal without the bias.

    Raises:
        WrongForm, WrongSelection, WrongWeight: as `judge_selection` and `judge_router_weights`.
        Indecisive: all choices would be legal without it.
    """
    _judge_decisive(
        reading, tally, lambda expected, place: expected.legal(place, expected.selection_scores(place, None))
    )


def judge_group_limit(reading: Reading, tally: Tally) -> None:
    """Decide whether the selected experts are in the best groups only.

    Counts the pairs of tokens whose choice would not be legal among all experts.

    Raises:
        WrongForm, WrongSelection: as `judge_selection`.
        Indecisive: all choices would be legal among all experts.
    """
    everything: Limit = {"groups": None, "group_score": "max"}
    _judge_decisive(reading, tally, lambda expected, place: expected.legal(place, limit=everything), weights=False)


def _judge_decisive(
    reading: Reading,
    tally: Tally,
    legal_without: Callable[[RouterExpected, Place], Tensor],
    weights: bool = True,
) -> None:
    """Judge the selection, and count only the tokens whose choice would not be legal without the rule."""
    with tally.uncounted() as uncounted:
        judge_selection(reading, uncounted)
    if weights:
        with tally.uncounted() as uncounted:
            judge_router_weights(reading, uncounted)
    expected = expected_of(reading)
    decided = {place: int((~legal_without(expected, place)).sum()) for place in expected.places}
    if not any(decided.values()):
        raise Indecisive("the choice of every token would be legal without the rule")
    for place, tokens in decided.items():
        tally.add(pairs=tokens * expected.workload.config.top_k, rank=place[1])


@judge(WrongCount, "route")
def judge_load(reading: Reading) -> Comparisons:
    """Decide whether the reported load is the number of the rank's tokens that selected each expert.

    The load is used for balancing in training, so a forward without gradients may report none, or zeros.

    Raises:
        NotOffered: the router reports no load on any rank.
        WrongCount: another number, or not one per expert; or no load from a rank while others report theirs.
    """
    expected = expected_of(reading)
    E = expected.workload.config.experts
    if all(reading.seen(*place).router.counts_E is None for place in expected.places):
        raise NotOffered("the router reports no load")
    for m, rank in expected.places:
        counts_E = reading.seen(m, rank).router.counts_E
        if not expected.workload.trains(m) and (counts_E is None or not bool(counts_E.any())):
            continue
        if counts_E is None:
            where = f" in microbatch {m}" if m else ""
            silent = f"rank {rank} reports no load{where}, while other ranks or microbatches have one"
            yield Comparison(rank, Finding("silent", silent, (rank,)))
            continue
        found, right = counts_E.tolist(), loads(expected.ids[m, rank], E).tolist()
        wrong = f"rank {rank} reports the load {found}; expected {right}, as its tokens selected"
        yield Comparison(rank, Finding("load", wrong, (rank,)) if found != right else "", elements=E)


# ---- weights and gradients -----------------------------------------------------------------------------------


def judge_router_weights(reading: Reading, tally: Tally, expected: RouterExpected | None = None) -> None:
    """Decide whether the selected experts have the weights of the configured score, normalisation and scale.

    The selection is the router's; `judge_selection` decides whether it is legal. `expected` replaces the oracle's
    results of the reading.

    Raises:
        WrongForm: the weights are missing or not (T, K).
        WrongSelection: the selected ids are not K different experts, so that no weights can be computed.
        WrongWeight: a weight lies outside its bound.
    """
    expected = expected or expected_of(reading)
    actual, targets = {}, {}
    for m, rank in expected.places:
        target = expected.weights((m, rank))
        value = reading.seen(m, rank).router.weights_TK
        actual[m, rank] = _formed(value, target, f"the weights of rank {rank}", rank, WrongForm)
        targets[m, rank] = target
    if _all_hold(actual, targets, tally):
        return
    findings, ratio = explain_weights(expected, actual, targets)
    fail(WrongWeight, "route", findings, ratio=ratio)


def judge_router_dx(reading: Reading, tally: Tally, expected: RouterExpected | None = None) -> None:
    """Decide whether dx is the weights' gradient through scores and normalisation, within rounding.

    `expected` replaces the oracle's results of the reading.

    Raises:
        AbsentGradient: the gradient of the tokens is None.
        WrongForm, WrongGradient: another shape; an element outside its bound.
    """
    expected = expected or expected_of(reading)
    actual, targets = {}, {}
    for m, rank in expected.places:
        if not reading.goes_backward(m):
            continue
        target, value = expected.dx((m, rank)), reading.seen(m, rank).dx_TD.value
        if value is None and not target.expected.numel():
            continue
        actual[m, rank] = _formed(value, target, f"dx of rank {rank}", rank, AbsentGradient, "gradient")
        targets[m, rank] = target
    if _all_hold(actual, targets, tally):
        return
    findings, ratio = explain_router_dx(expected, actual, targets, reading.token_ratios)
    fail(WrongGradient, "gradient", findings, ratio=ratio)


def judge_router_gradient(reading: Reading, tally: Tally, expected: RouterExpected | None = None) -> None:
    """Decide whether every rank ends with the router's gradient over all tokens of its pipeline stage.

    `expected` replaces the oracle's results of the reading. A failure is of the stage "finish" if the ranks' gradients
    before `finish_gradients` add up to the right one.

    Raises:
        NotOffered: the backend finishes no gradients.
        Uncovered: the ranks of a stage do not name the router, or not all of it.
        AbsentGradient: the gradient is None, or some ranks finish none while others do.
        WrongForm, WrongGradient: another shape; an element outside its bound.
    """
    judge_finished_gradient(reading, tally, expected or expected_of(reading), ROUTER)


def judge_finished_gradient(reading: Reading, tally: Tally, expected: RouterExpected, key: ParameterKey) -> None:
    """Decide `judge_router_gradient` for one parameter of the router: its weight or its gate bias.

    Raises as `judge_router_gradient`.
    """
    finals = finals_of(reading)
    for stage, ranks in enumerate(stages(expected.workload.layout)):
        target = expected.gradient(stage, key)
        held = []
        for rank in ranks:
            if (grad := finals[rank].get(key)) is not None:
                cut = Target(*(shard_of(side, grad.shard) for side in target))
                gradient = Held(rank, stage, key, grad.shard, grad.value, cut)
                _formed(grad.value, cut, f"the gradient of {gradient.name}", rank, AbsentGradient, "finish")
                held.append(gradient)
        _require_whole(key, ranks, [rank.grads_local for rank in reading.ranks], "route")
        _require_whole(key, ranks, finals, "finish")
        if [gradient for gradient in held if not gradient.holds(tally)]:
            _fail_gradient(reading, expected, ranks, held)


def _fail_gradient(
    reading: Reading, expected: RouterExpected, ranks: tuple[int, ...], held: Sequence[Held]
) -> NoReturn:
    key = held[0].key
    grads = [reading.ranks[rank].grads_local.get(key) for rank in ranks]
    local = [grad.value.double() for grad in grads if grad and grad.value is not None and grad.shard is None]
    full = expected.gradient(held[0].stage, key)
    undivided = Target(full.expected * expected.divisor, full.allowed * expected.divisor)
    before = len(local) == len(ranks) and not compare(torch.stack(local).sum(0), *undivided).holds
    names = ratio_names({"the scale": expected.workload.config.routing.scale}) | reading.router_ratios
    findings, ratio = explain_gradients(gradients_of(expected, key), held, names)
    fail(WrongGradient, "gradient" if before else "finish", findings, ratio=ratio)


def _require_whole(
    key: ParameterKey, ranks: tuple[int, ...], named: Sequence[Mapping[ParameterKey, Grad]], when: Stage
) -> None:
    """Raise unless every rank of a stage names a parameter, whole or as a part that other ranks complete."""
    grads = {rank: named[rank].get(key) for rank in ranks}
    what = {ROUTER: "the weight of the router", GATE_BIAS: "the gate bias of the router"}[key]
    without = tuple(rank for rank, grad in grads.items() if grad is None)
    if without:
        after = " after finishing" if when == "finish" else ""
        raise Uncovered(when, f"{what} is not yielded by 'named' on ranks {list(without)}{after}", ranks=without)
    if not whole(grad.shard for grad in grads.values() if grad):
        raise Uncovered(when, f"the ranks together do not yield all shards of {what} by 'named'", ranks=ranks)


def _formed(
    value: Tensor | None, target: Target, what: str, rank: int, absent: type[Mismatch], stage: Stage = "route"
) -> Tensor:
    if value is None:
        raise absent(stage, f"{what} is missing" if absent is WrongForm else f"{what} is None", ranks=(rank,))
    if value.shape != target.expected.shape:
        shapes = f"{tuple(value.shape)} instead of {tuple(target.expected.shape)}"
        raise WrongForm(stage, f"{what} has the shape {shapes}", ranks=(rank,))
    return value


def _all_hold(actual: dict[Place, Tensor], targets: dict[Place, Target], tally: Tally) -> bool:
    """Return whether every tensor is within its bounds; if so, count all elements."""
    worst = [compare(value, *targets[at], tally, at[1]) for at, value in actual.items()]
    return all(element.holds for element in worst)
