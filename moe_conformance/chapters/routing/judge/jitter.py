"""Judges of routers with jitter: the factors of the input, results with them, and evaluation without."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from moe_conformance.chapters.routing.workloads.jitter import EVALUATION, TRAINING
from moe_conformance.judging.compare.bounded import compare
from moe_conformance.judging.compare.bounds import unit_roundoff
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.script import answers, values
from moe_conformance.judging.shared.router.expected import RouterExpected
from moe_conformance.judging.shared.router.explain_selection import explain_selection
from moe_conformance.judging.shared.router.routers import require_ids
from moe_conformance.judging.verdict import (
    AbsentGradient,
    ChangedInput,
    NotOffered,
    Tally,
    WrongForm,
    WrongGradient,
    WrongSelection,
    WrongWeight,
)
from moe_conformance.reference.forcing.routes import legal_ids
from moe_conformance.reference.routing.jitter import deviations, jittered_logits, legal_factors, seen_factors
from moe_conformance.reference.routing.routes import logits
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.workload import Batch

_DEVIATIONS = 8.0  # bounds on statistics of independent uniform factors
_CAUSES = {
    "mean": "their mean is not 1",
    "variance": "they are not uniform between the bounds",
    "along_tokens": "neighbouring tokens have factors in common",
    "along_columns": "the columns of a token have factors in common",
}


def judge_jitter(outcome: Outcome, tally: Tally) -> None:
    """Decide whether training logits are those of the input times independent factors within the bounds.

    Selection, weights and the gradient of x must be those of these logits. x itself is not changed.

    Raises:
        NotOffered: the router returns no logits, from which alone factors can be computed.
        ChangedInput: x was changed in place.
        WrongForm: logits, ids or weights of another shape.
        WrongWeight: no factors, factors out of bounds or not independent; or weights of other logits.
        WrongSelection: experts of other logits.
        AbsentGradient, WrongGradient: a gradient of x without its factors.
    """
    factors = {}
    for number in TRAINING:
        found = values(outcome, number, "logits_TE")
        if all(logits_TE is None for logits_TE in found):
            raise NotOffered("the router returns no logits, in which alone its jitter can be seen")
        for rank, answer in enumerate(answers(outcome, number)):
            if answer.changed:
                raise ChangedInput(
                    "run", f"the router changed {answer.changed[0]} of rank {rank} in place", ranks=(rank,)
                )
            factors[number, rank] = _factors(outcome, number, rank, found[rank])
            _judge_independent(outcome, factors[number, rank], f"the factors of rank {rank}", rank)
            tally.add(elements=factors[number, rank].numel(), rank=rank)
    for rank in range(len(outcome.ranks)):
        _judge_drawn_anew(outcome, factors, rank)
        for number in TRAINING:
            _judge_routes(outcome, number, rank, factors[number, rank], tally)


def _factors(outcome: Outcome, number: int, rank: int, logits_TE: Tensor | None) -> Tensor:
    """Return the factors of all elements of the input, (T, D).

    Raises:
        WrongForm: no logits, or logits that are not (T, E).
        WrongWeight: factors are out of bounds, or experts that use the same column have different factors.
    """
    config, x_TD = outcome.workload.config, outcome.workload.calls[number].given[rank]["x"]
    if logits_TE is None or logits_TE.shape != (len(x_TD), config.experts):
        form = None if logits_TE is None else tuple(logits_TE.shape)
        raise WrongForm("route", f"the logits of rank {rank} have the shape {form}", ranks=(rank,))
    D, eps, unit = config.hidden, config.jitter, unit_roundoff(config.dtype)
    factors_TD = seen_factors(logits_TE[:, :D], x_TD, range(D))
    again_TC = seen_factors(-logits_TE[:, D:], x_TD, range(config.experts - D))
    whose = f"in training, the logits of rank {rank}"
    if bool((factors_TD == 1).all()):
        raise WrongWeight("route", f"{whose} are those of x itself; expected: of x times jitter", ranks=(rank,))
    legal_TD = legal_factors(factors_TD, eps, unit=unit)
    if not bool(legal_TD.all()):
        t, d = (~legal_TD).nonzero()[0].tolist()
        bounds = f"expected: between {1 - eps:g} and {1 + eps:g}"
        sentence = f"{whose} are those of column {d} of token {t} times {float(factors_TD[t, d]):.6g}; {bounds}"
        raise WrongWeight("route", sentence, ranks=(rank,))
    apart_TC = (factors_TD[:, : again_TC.shape[1]] - again_TC).abs() > 8 * unit
    if bool(apart_TC.any()):
        t, d = apart_TC.nonzero()[0].tolist()
        seen = f"{float(factors_TD[t, d]):.6g} and {float(again_TC[t, d]):.6g} times column {d} of token {t}"
        cause = "likely cause: the logits are multiplied by factors, and not what the gate reads"
        raise WrongWeight("route", f"{whose} of two experts have {seen}; expected one factor; {cause}", ranks=(rank,))
    return factors_TD


def _judge_independent(outcome: Outcome, factors_TD: Tensor, whose: str, rank: int) -> None:
    found = deviations(factors_TD, outcome.workload.config.jitter)._asdict()
    name, value = max(found.items(), key=lambda pair: abs(pair[1]))
    if abs(value) > _DEVIATIONS:
        far = f"they are {abs(value):.3g} standard deviations from independent uniform ones"
        raise WrongWeight("route", f"{whose} are wrong: {far}; likely cause: {_CAUSES[name]}", ranks=(rank,))


def _judge_drawn_anew(outcome: Outcome, factors: dict[tuple[int, int], Tensor], rank: int) -> None:
    """Require that two calls on the same tokens have different factors."""
    first, second = (factors[number, rank].flatten() for number in TRAINING[:2])
    common = deviations(torch.stack([first, second]), outcome.workload.config.jitter).along_tokens
    if abs(common) > _DEVIATIONS:
        sentence = f"two calls on rank {rank} have factors in common; expected factors that are drawn anew in each call"
        raise WrongWeight("route", sentence, ranks=(rank,))


def _judge_routes(outcome: Outcome, number: int, rank: int, factors_TD: Tensor, tally: Tally) -> None:
    """Compare selection, weights and dx with the oracle of a router whose tokens are x times the factors."""
    call = outcome.workload.calls[number]
    x_TD = call.given[rank]["x"]
    router_ED = outcome.workload.parameters["router", None]
    expected = _expected(outcome, number, rank, jittered_logits(x_TD, factors_TD, router_ED)[:, : x_TD.shape[1]])
    _judge_choice(outcome, number, rank, expected, "in training: ", tally)
    dx_TD = answers(outcome, number)[rank].gradients["x"]
    if dx_TD is None or dx_TD.shape != x_TD.shape:
        raise AbsentGradient("gradient", f"dx of rank {rank} is None or of another shape than x", ranks=(rank,))
    target = expected.dx((0, rank))
    right_TD = target.expected * factors_TD
    slack_TD = 8 * unit_roundoff(outcome.workload.config.dtype) * right_TD.abs()
    worst = compare(dx_TD, right_TD, target.allowed * factors_TD + slack_TD, tally, rank)
    if not worst.holds:
        plain = compare(dx_TD, target.expected, target.allowed + slack_TD).holds
        cause = "; likely cause: it is not multiplied by the factors, as x was" if plain else ""
        raise WrongGradient("gradient", f"in training: dx of rank {rank} is wrong: {worst}{cause}", ranks=(rank,))


def judge_evaluation(outcome: Outcome, tally: Tally) -> None:
    """Decide whether a router with jitter routes in evaluation mode as one without, and equally in two calls.

    Raises:
        WrongForm: ids or weights of another shape.
        WrongSelection, WrongWeight: experts, logits or weights of other tokens, or others in the second call.
    """
    findings = []
    first, second = EVALUATION
    for rank, (one, other) in enumerate(
        zip(values(outcome, first, "routing"), values(outcome, second, "routing"), strict=True)
    ):
        for name in ("ids_TK", "weights_TK"):
            if not torch.equal(one[name], other[name]):
                sentence = f"{name} of rank {rank} differ between two calls on the same tokens"
                findings.append(Finding(name, sentence, (rank,)))
        logits_TE = values(outcome, first, "logits_TE")[rank]
        x_TD = outcome.workload.calls[first].given[rank]["x"]
        right_TE = logits(x_TD, outcome.workload.parameters["router", None])
        if logits_TE is not None and not torch.equal(logits_TE.double(), right_TE):  # each logit is one element of x
            findings.append(Finding("logits", f"the logits of rank {rank} are not those of its tokens", (rank,)))
    if findings:
        cause = "; likely cause: noise that is for training alone"
        fail(WrongWeight, "route", findings, start="in evaluation mode: ", note=cause)
    for number in EVALUATION:
        for rank in range(len(outcome.ranks)):
            x_TD = outcome.workload.calls[number].given[rank]["x"]
            expected = _expected(outcome, number, rank, x_TD)
            _judge_choice(outcome, number, rank, expected, "in evaluation mode: ", tally)


# ---- against the oracle ----------------------------------------------------------------------------------------------


def _expected(outcome: Outcome, number: int, rank: int, tokens_TD: Tensor) -> RouterExpected:
    """Return the oracle's results for the selection of a call, with other tokens.

    Raises:
        WrongForm, WrongSelection: the call returned no valid selection.
    """
    workload = outcome.workload
    config, call = workload.config, workload.calls[number]
    routing = values(outcome, number, "routing")[rank]
    ids_TK, weights_TK = routing["ids_TK"], routing["weights_TK"]
    shape = (len(tokens_TD), config.top_k)
    if ids_TK.shape != shape or weights_TK.shape != shape:
        raise WrongForm("route", f"ids or weights of rank {rank} do not have the shape {shape}", ranks=(rank,))
    require_ids(ids_TK, rank)
    if not bool(legal_ids(ids_TK, config.experts).all()):
        what = f"{config.top_k} different experts of {config.experts}"
        raise WrongSelection("route", f"a token of rank {rank} did not select {what}", ranks=(rank,))
    upstream_TE = torch.zeros(len(tokens_TD), config.experts)
    if call.upstream:
        upstream_TE = upstream_TE.scatter(1, ids_TK.long(), call.upstream[rank]["routing.weights_TK"])
    batch = Batch(tokens_TD, ids_TK, weights_TK, upstream_TE)
    batches = (tuple(batch for _ in outcome.ranks),)  # a single one is used
    return RouterExpected(replace(workload, batches=batches), {(0, r): ids_TK for r in range(len(outcome.ranks))}, 1)


def _judge_choice(outcome: Outcome, number: int, rank: int, expected: RouterExpected, start: str, tally: Tally) -> None:
    place = (0, rank)
    illegal = (~expected.legal(place)).nonzero().flatten().tolist()
    if illegal:
        fail(WrongSelection, "route", explain_selection(expected, {place: illegal}), start=start)
    weights_TK = values(outcome, number, "routing")[rank]["weights_TK"]
    worst = compare(weights_TK, *expected.weights(place), tally, rank)
    if not worst.holds:
        sentence = f"{start}the weights of rank {rank} are not those of its logits: {worst}"
        raise WrongWeight("route", sentence, ranks=(rank,))
    tally.add(pairs=weights_TK.numel(), rank=rank)
