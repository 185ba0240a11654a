"""Judges of what random and biased forcing draw: loads, returned logits, and which ranks draw the same."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from moe_conformance.chapters.forcing.judge.forced_logits_noise import chosen_without_forcing, following, without_noise
from moe_conformance.chapters.forcing.judge.forced_routing import (
    compared_routes,
    expect_forced_weights,
    forced_expected_of,
)
from moe_conformance.chapters.forcing.workloads.forcing import bias_decides_alone
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Place, stages
from moe_conformance.judging.shared.router.expected import RouterExpected
from moe_conformance.judging.shared.router.routers import expected_of
from moe_conformance.judging.verdict import NotOffered, Tally, WrongCount, WrongSelection
from moe_conformance.reference.capacity.limits import loads
from moe_conformance.reference.forcing.draws import (
    bias_moment,
    bias_moment_bounds,
    chance_alike,
    legal_random_loads,
    load_margin,
    one_choice,
)

_CHANCE = 1e-9  # the largest probability that independent draws agree


def judge_random(reading: Reading, tally: Tally) -> None:
    """Decide whether routes follow standard normal logits, drawn anew for each forward and each rank's tokens.

    Ranks with copies of the same tokens draw the same. Routes do not depend on the router's own logits. Weights are
    compared with the forced logits if the backend returns these.

    Raises:
        WrongForm, WrongCount, WrongSelection, WrongWeight: routes or weights are others.
    """
    _judge_random_routes(reading, tally)
    if (forced := forced_expected_of(reading)) is not None:
        with tally.uncounted() as uncounted:
            expect_forced_weights(reading, forced, uncounted)


@judge(WrongSelection, "route", loads=WrongCount)
def _judge_random_routes(reading: Reading) -> Comparisons:
    """Decide whether routes are random, and whether the forced logits are, if the backend returns them."""
    router = expected_of(reading)
    places, ranks = router.places, _ranks(router)
    findings = [finding for place in places for finding in _uneven(router, place)]
    findings = findings or [*_alike_in_turn(router), *_alike_on_ranks(router)]
    findings = findings or [finding for place in places for finding in chosen_without_forcing(router, place)]
    if not findings and (forced := forced_expected_of(reading)) is not None:
        findings = [finding for place in places for finding in _not_normal(forced, place)]
        findings = findings or [finding for rank in ranks for finding in following(forced, router, rank)]
    return compared_routes(router, findings)


def _uneven(router: RouterExpected, place: Place) -> list[Finding]:
    config, tokens, rank = router.workload.config, len(router.ids[place]), place[1]
    loads_E = loads(router.ids[place], config.experts)
    if bool(legal_random_loads(loads_E, config.top_k).all()):
        return []
    margin, mean = load_margin(tokens, config.top_k, config.experts), tokens * config.top_k / config.experts
    sentence = (
        f"rank {rank} has the loads {loads_E.tolist()} per expert; expected for random logits {mean:g} each, off by no "
        f"more than {margin:.4g}"
    )
    return [Finding("loads", sentence, (rank,))]


def _alike_in_turn(router: RouterExpected) -> list[Finding]:
    """Return findings for ranks whose forwards select the same experts for the same tokens."""
    findings = []
    for (m, rank), ids_TK in router.ids.items():
        before = m - 1, rank
        if m and _same_tokens(router, before, (m, rank)) and _agree(router, before, (m, rank)):
            sentence = (
                f"rank {rank} selects the same experts for all {len(ids_TK)} tokens in two forwards; expected new "
                "random logits in each forward"
            )
            findings.append(Finding("in turn", sentence, (rank,)))
    return findings


def _alike_on_ranks(router: RouterExpected) -> list[Finding]:
    """Return findings for ranks that draw the same for different tokens, or differently for copies."""
    copies = router.workload.config.token_copies
    # other stages have other layers
    stage = {rank: ranks for ranks in stages(router.workload.layout) for rank in ranks}
    findings = []
    for (m, rank), ids_TK in router.ids.items():
        for other in (lower for lower in stage[rank] if lower < rank):
            if copies and _same_tokens(router, (m, other), (m, rank)):
                if not torch.equal(router.ids[m, other].sort(1).values, ids_TK.sort(1).values):
                    sentence = f"tp ranks {other} and {rank} hold the same tokens and select different experts"
                    findings.append(Finding("copies", sentence, (other, rank)))
            elif _agree(router, (m, other), (m, rank)):
                sentence = (
                    f"ranks {other} and {rank} hold different tokens and select the same experts; likely cause: both "
                    "drew random logits from the same seed"
                )
                findings.append(Finding("on ranks", sentence, (other, rank)))
    return findings


def _same_tokens(router: RouterExpected, one: Place, other: Place) -> bool:
    batches = router.workload.batches
    return torch.equal(batches[one[0]][one[1]].x_TD, batches[other[0]][other[1]].x_TD)


def _agree(router: RouterExpected, one: Place, other: Place) -> bool:
    """Return whether two places select the same experts for all tokens, where that is unlikely by chance."""
    first_TK, second_TK = router.ids[one], router.ids[other]
    tokens, config = min(len(first_TK), len(second_TK)), router.workload.config
    if chance_alike(tokens, config.top_k, config.experts) > _CHANCE:
        return False
    return torch.equal(first_TK[:tokens].sort(1).values, second_TK[:tokens].sort(1).values)


def _not_normal(expected: RouterExpected, place: Place) -> list[Finding]:
    """Return a finding if logits do not have mean 0 for each expert and variance 1."""
    logits_TE = expected.logits(place)
    if not len(logits_TE):
        return []
    of_experts = _outside([logits_TE], 0.0)
    of_all = _outside(list(logits_TE[:, None]), 0.0)  # independent tokens: the mean square over all
    said = [f"the means over its tokens {of_experts}"] if of_experts else []
    said += [f"the logits {of_all}"] if of_all else []
    sentence = f"the forced logits of rank {place[1]} are not standard normal: "
    return [Finding("normal", sentence + words, (place[1],)) for words in said]


def _outside(draws: list[Tensor], deviation: float) -> str:
    """Return a note if the mean square of the draws, (T, E) each, shows another deviation of a bias, else ""."""
    T, E = draws[0].shape
    low, high = bias_moment_bounds(deviation, T, E, len(draws))
    found = bias_moment(draws)
    return "" if low <= found <= high else f"have a mean square of {found:.4g}; expected {low:.4g} to {high:.4g}"


@judge(WrongSelection, "route")
def judge_bias_draws(reading: Reading) -> Comparisons:
    """Decide whether the forced bias is one number per expert, of the configured standard deviation.

    Where only the bias decides, all tokens of a forward select the same experts. Elsewhere it is visible in the logits,
    which are its sum with noise of variance 1, without the router's own logits.

    Raises:
        NotOffered: not only the bias decides, and the backend does not return the logits.
        WrongForm, WrongSelection: there is no such bias.
    """
    router = expected_of(reading)
    if bias_decides_alone(router.workload):
        return compared_routes(router, _split(router))
    forced = forced_expected_of(reading)
    if forced is None:
        raise NotOffered("the router does not report the forced logits")
    findings = _wrong_deviation(forced)
    for rank in _ranks(router):
        findings = findings or [*without_noise(forced, rank), *following(forced, router, rank)]
    return compared_routes(router, findings)


def _ranks(router: RouterExpected) -> range:
    return range(router.workload.layout.world)


def _split(router: RouterExpected) -> list[Finding]:
    findings = []
    for (m, rank), ids_TK in router.ids.items():
        if not one_choice([ids_TK]):
            first = sorted(ids_TK[:1].flatten().tolist())
            sentence = (
                f"tokens of rank {rank} select {first} and others in forward {m}; expected the same experts "
                "for all tokens, as the forced bias, one per expert for all tokens, dominates the logits"
            )
            findings.append(Finding("split", sentence, (rank,)))
    return findings


def _wrong_deviation(expected: RouterExpected) -> list[Finding]:
    """Return findings for ranks whose logits show another deviation; for a kept bias from the first forward."""
    deviation = expected.workload.config.routing.forced[0][1]
    assert deviation is not None
    findings = []
    for rank in _ranks(expected):
        draws = [expected.logits(place) for place in expected.places if place[1] == rank]
        fewest = min(map(len, draws))
        draws = [logits_TE[:fewest] for logits_TE in draws[: 1 if deviation < 0 else None]]
        if said := _outside(draws, deviation):
            sentence = (
                f"the mean forced logits of the experts on rank {rank}, with a bias of deviation {deviation:g}, {said}"
            )
            findings.append(Finding("deviation", sentence, (rank,)))
    return findings


@judge(WrongSelection, "route")
def judge_bias_on_ranks(reading: Reading) -> Comparisons:
    """Decide whether all ranks of a pipeline stage draw the same bias, where only the bias decides.

    Raises:
        WrongForm, WrongSelection: some ranks select other experts.
    """
    router = expected_of(reading)
    findings = []
    for m in range(len(router.workload.batches)):
        for ranks in stages(router.workload.layout):
            if not one_choice([router.ids[m, rank] for rank in ranks]):
                chosen = {rank: sorted(router.ids[m, rank][0].tolist()) for rank in ranks if len(router.ids[m, rank])}
                said = ", ".join(f"rank {rank} {experts}" for rank, experts in chosen.items())
                sentence = (
                    f"the forced bias is not the same on ranks of one pipeline stage: in forward {m} select {said}"
                )
                findings.append(Finding("ranks", sentence, ranks))
    return compared_routes(router, findings)


@judge(WrongSelection, "route")
def judge_bias_in_turn(reading: Reading) -> Comparisons:
    """Decide whether a bias that decides alone is drawn in every forward, or drawn once per layer and kept.

    Forwards without tokens are not compared.

    Raises:
        WrongForm, WrongSelection: two forwards select the same although the bias is drawn anew, or differ although it
            is kept.
    """
    yield from _turns(reading)


def _turns(reading: Reading) -> Comparisons:
    router = expected_of(reading)
    chosen = {place: ids_TK for place, ids_TK in router.ids.items() if len(ids_TK)}
    pairs = [(one, other) for one, other in combinations(sorted(chosen), 2) if one[1] == other[1]]
    for one, other in pairs:
        wrong = _wrong_turn(router, one, other)
        yield Comparison(one[1], wrong, kind=wrong.split(": ")[-1])
    for place in {place for pair in pairs for place in pair}:
        yield Comparison(place[1], pairs=chosen[place].numel())


@judge(WrongSelection, "route")
def judge_kept_apart(reading: Reading) -> Comparisons:
    """Decide whether two layers keep two biases, where a bias decides alone; elsewhere nothing is compared.

    Raises:
        WrongForm, WrongSelection: as `judge_bias_in_turn`.
    """
    if bias_decides_alone(reading.outcome.workload):
        yield from _turns(reading)


def _wrong_turn(router: RouterExpected, one: Place, other: Place) -> str:
    """Return what is wrong with the choices of two forwards on a rank, "" if nothing is."""
    config, routers = router.workload.config, router.workload.routers
    keeps, same_layer = (config.routing.forced[0][1] or 0.0) < 0, one[0] % routers == other[0] % routers
    alike = one_choice([router.ids[one], router.ids[other]])
    said = f"rank {one[1]} in forwards {one[0]} and {other[0]} of {'one layer' if same_layer else 'two layers'}"
    if keeps and same_layer:
        anew = "the bias that is kept between forwards was drawn again"
        return "" if alike else f"{said} selects different experts; likely cause: {anew}"
    if not alike or chance_alike(1, config.top_k, config.experts) > _CHANCE:
        return ""
    if keeps:
        return f"{said} selects the same experts; likely cause: the layers share one kept bias"
    return f"{said} selects the same experts; likely cause: no new bias was drawn"
