"""Judges of routers with a capacity: the weights and gradients of the slots that are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from moe_conformance.judging.compare.bounded import Target, compare
from moe_conformance.judging.findings import Finding, fail
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Place
from moe_conformance.judging.shared.router.routers import judge_router_dx, judge_router_gradient
from moe_conformance.judging.shared.router.rules import explain_weights
from moe_conformance.judging.shared.router.token_drops import Drops, by_design, drops_of, weights_at
from moe_conformance.judging.verdict import Tally, WrongWeight


def judge_drop_weights(reading: Reading, tally: Tally) -> None:
    """Decide whether kept slots have the weights that they had before the drop, within rounding.

    Raises:
        WrongForm, WrongSelection: see `drops_of`.
        WrongWeight: a weight lies outside its bound.
    """
    drops = drops_of(reading)
    actual, targets = {}, {}
    for place in drops.places:
        weights_TK, allowed_TK = drops.weights(place)
        targets[place] = Target(weights_TK, allowed_TK)
        given_TK = weights_at(reading, place, drops.ids[place])
        actual[place] = torch.where(drops.kept[place], given_TK.double(), weights_TK)  # dropped slots are not compared
    with tally.uncounted() as uncounted:
        worst = [compare(actual[place], *targets[place], uncounted) for place in drops.places]
    if not all(element.holds for element in worst):
        _fail_weights(drops, actual, targets)
    for place, element in zip(drops.places, worst, strict=True):
        tally.add(elements=drops.ids[place].numel(), rank=place[1], worst=element.ratio)  # without dropped slots


def _fail_weights(drops: Drops, actual: dict[Place, torch.Tensor], targets: dict[Place, Target]) -> None:
    renormalised = {}
    for place, kept_TK in drops.kept.items():
        w_TK = targets[place].expected * kept_TK
        sum_T1 = w_TK.sum(1, keepdim=True)
        again_TK = w_TK / torch.where(sum_T1 == 0, 1.0, sum_T1) * drops.workload.config.routing.scale
        renormalised[place] = torch.where(kept_TK, again_TK, targets[place].expected)
    filled = {place: target.allowed for place, target in targets.items() if target.allowed.numel()}
    allowed = {place: torch.full_like(errors_TK, 4 * float(errors_TK.max())) for place, errors_TK in filled.items()}
    again = not drops.rule.renormalises(drops.workload.config)
    if again and all(compare(actual[place], renormalised[place], allowed[place]).holds for place in allowed):
        place = max(allowed, key=lambda at: compare(actual[at], *targets[at]).size)
        example = compare(actual[place], *targets[place])
        cause = "they were divided again, by the sum of those that were kept"
        sentence = f"the weights of the kept slots are wrong; likely cause: {cause}; for example {example}"
        findings = [Finding("cause", sentence, tuple(sorted({at[1] for at in allowed})))]
        fail(WrongWeight, "route", findings, note=by_design(drops, _keeps_weights(actual)))
    findings, ratio = explain_weights(drops, actual, targets)
    fail(WrongWeight, "route", findings, ratio=ratio, note=by_design(drops, _keeps_weights(actual)))


def _keeps_weights(actual: Mapping[Place, torch.Tensor]) -> Callable[[Drops, Place], bool]:
    def holds(other: Drops, place: Place) -> bool:
        target, kept_TK = other.weights(place), other.kept[place]
        return compare(torch.where(kept_TK, actual[place], target.expected), *target).holds

    return holds


def judge_drop_gradients(reading: Reading, tally: Tally) -> None:
    """Decide whether only kept slots give gradients to tokens and router, through the sum over all selected.

    Raises:
        NotOffered: the backend finishes no gradients.
        Uncovered, AbsentGradient, WrongForm, WrongGradient: a gradient is missing or has other values.
    """
    drops = drops_of(reading)
    judge_router_dx(reading, tally, drops)
    judge_router_gradient(reading, tally, drops)
