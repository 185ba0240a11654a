"""Judges of router losses: the reported or returned values, and the gradients of router and input."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.chapters.losses.judge.loss_bounds import main_slope_bound, roundoff, slope_bound, value_bound
from moe_conformance.chapters.losses.judge.loss_rules import CALLED, Part, Parts, Rule, Steps
from moe_conformance.chapters.losses.judge.loss_steps import Step, legal, mistakes, steps_of
from moe_conformance.judging.compare.bounded import Target, compare, compared, factor, within
from moe_conformance.judging.compare.bounds import unit_roundoff
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding, fail, ratio_names, ratio_words
from moe_conformance.judging.observed.cached import once
from moe_conformance.judging.observed.scopes import shard_of
from moe_conformance.judging.verdict import (
    AbsentGradient,
    NotOffered,
    WrongGradient,
    WrongLoss,
)
from moe_conformance.reference.losses.reports import model_loss, reported
from moe_conformance.reference.losses.scaling import router_gradients
from moe_conformance.scenarios.outcome import Outcome


def require_reports(outcome: Outcome) -> None:
    """Raise `NotOffered` if the backend returns its losses and reports none."""
    if not any(step.has_reports for step in steps_of(outcome)):
        raise NotOffered("the backend returns its losses, and reports none")


def require_values(outcome: Outcome) -> None:
    """Raise `NotOffered` if no loss is reported, and ranks share the microbatches whose losses are returned."""
    steps = steps_of(outcome)
    if not any(step.has_reports for step in steps) and len(steps[0].groups()[0]) > 1:
        raise NotOffered("the backend reports no losses, and what ranks return of a microbatch that they share is free")


@judge(WrongLoss, "loss")
def judge_values(outcome: Outcome) -> Comparisons:
    """Decide whether every loss of every step is reported or returned with its right value, on every rank.

    Raises:
        WrongLoss: a loss is missing or has another value.
    """
    yield from once(outcome, _values)


def _values(outcome: Outcome) -> list[Comparison]:
    found: list[Comparison] = []
    for step in steps_of(outcome):
        if step.trained:
            layers = [step.parts(layer) for layer in range(outcome.workload.config.losses.layers)]
            found += [*_reports(outcome, step, layers), *_returned(outcome, step, layers)]
    return found


def _reports(outcome: Outcome, step: Step, layers: list[Parts]) -> Iterator[Comparison]:
    """Yield comparisons of reported losses, which are right if they are right under any legal rule."""
    rules = list(legal(outcome, layers[0]))
    made = {rule: [_of(outcome, step, parts, rule) for parts in layers] for rule in rules}
    for name in made[rules[0]][0].names if step.has_reports else ():
        targets = [_reported(outcome, made[rule], name) for rule in rules]
        for rank, report in enumerate(step.reports):
            if name not in report:
                said = f"rank {rank} reports no {CALLED[name].removeprefix('the ')} after {step.name}"
                yield Comparison(rank, Finding("absent", said, (rank,)))
                continue
            value = _whole(outcome, step, rank, name)
            found = [compare(value, *target) for target in targets]
            best = min(found, key=lambda worst: worst.ratio)
            cause = "" if best.holds else _value_cause(outcome, step, name, value, targets[0], layers)
            said = f"rank {rank} reports {CALLED[name]} of {step.name} as {found[0]}{cause}"
            yield compared(rank, best if best.holds else found[0], name, said, 1)


def _returned(outcome: Outcome, step: Step, layers: list[Parts]) -> Iterator[Comparison]:
    """Yield comparisons of returned losses, with coefficients, where a microbatch belongs to one rank."""
    if len(step.groups()[0]) > 1 or outcome.workload.config.losses.global_batch:
        return
    made = [_of(outcome, step, parts, next(legal(outcome, parts))) for parts in layers]
    for m, place in enumerate(step.trained):
        of_layers, bounds = list[Tensor](), list[Tensor]()
        for steps in made:
            values = {name: steps.values[name][m] for name in steps.names}
            of_layers.append(torch.stack(list(values.values())).sum(0))
            bounds.append(torch.stack([value_bound(steps, *value) for value in values.items()]).sum(0))
        for rank in range(outcome.workload.layout.world):
            if (loss := step.forwards[rank][place]["loss"]) is None:
                continue
            target = Target(
                model_loss([value[rank] for value in of_layers]), model_loss([bound[rank] for bound in bounds])
            )
            worst = compare(loss.reshape(()), *target)
            said = f"rank {rank} returns as the loss of microbatch {m} of {step.name} {worst}"
            yield compared(rank, worst, "returned", said, 1)


def _of(outcome: Outcome, step: Step, parts: Parts, rule: Rule) -> Steps:
    return Steps(outcome.workload.config, rule, parts, step.scale)


def _reported(outcome: Outcome, layers: list[Steps], name: str, with_coefficient: bool | None = None) -> Target:
    """Return the expected report of a loss: its mean over microbatches, groups and layers."""
    if with_coefficient is None:
        with_coefficient = outcome.ranks[0].claims.reported_losses == "with_coefficient"
    by = None if with_coefficient else layers[0].coefficient(name)
    value = reported([steps.values[name] for steps in layers], coefficient=by)
    size = reported([value_bound(steps, name, steps.values[name]) for steps in layers], coefficient=by)
    return Target(value, size)


def _sizes(outcome: Outcome, step: Step) -> dict[str, float]:
    """Return the factors by which a loss is likely to be wrong, by name."""
    layout, config = outcome.workload.layout, outcome.workload.config
    routers = config.losses.layers
    sizes = {
        "tp": layout.tp, "cp": layout.cp, "tp * cp": layout.tp * layout.cp, "dp": layout.dp,
        "the number of microbatches": len(step.trained), "K": config.top_k, "E": config.experts,
        "the number of sequences": step.batches(0)[step.trained[0]].x[0].shape[1], "two": 2.0, "K * K": config.top_k**2,
        "layers with a router": routers,
        "layers with a router over all layers": routers / (routers + config.losses.dense_layers),
    }  # fmt: skip
    return ratio_names(sizes)


def _value_cause(outcome: Outcome, step: Step, name: str, value: Tensor, target: Target, layers: list[Parts]) -> str:
    causes = []
    for words, rule in mistakes(outcome):
        guess = _reported(outcome, [_of(outcome, step, parts, rule) for parts in layers], name)
        if within(value, *guess) and not within(target.expected, *guess):
            causes.append(words)
            break
    made = [_of(outcome, step, parts, next(legal(outcome, parts))) for parts in layers]
    other = outcome.ranks[0].claims.reported_losses == "divided"
    if within(value, *_reported(outcome, made, name, with_coefficient=other)):
        claimed = outcome.ranks[0].claims.reported_losses
        has = "has the coefficient in it" if other else "is divided by the coefficient"
        causes.append(f"it {has}, and Claims.reported_losses is {claimed!r}")
    names = _sizes(outcome, step)
    if (ratio := factor(value, *target, names)) is not None:
        causes.append(f"it is {ratio_words(ratio, names)}")
    return _causes(causes)


def _whole(outcome: Outcome, step: Step, rank: int, name: str) -> Tensor:
    """Return the report of a rank, or the mean over ranks if each is claimed to report a part."""
    if name == "z" and outcome.ranks[0].claims.reported_z == "own":
        return torch.stack([report[name].reshape(()) for report in step.reports if name in report]).mean()
    return step.reports[rank][name].reshape(())


def _causes(causes: list[str]) -> str:
    """Return the likely causes as a note; several mistakes may have the same result."""
    return f"; likely cause: {'; or '.join(causes)}" if causes else ""


# ---- gradients -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Gradients:
    """The expected gradients of one layer in one step, under a rule: of the router, finished, and of the input."""

    steps: Steps
    main: float  # the factor by which finishing multiplies the main loss's gradients

    def router(self) -> Target:
        """Return the expected finished gradient of the router, (E, D)."""
        expected = self.main_part() + sum(self.steps.loss_gradient(name) for name in self.steps.names)
        return Target(expected, self._bound(expected))

    def main_part(self) -> Tensor:
        """Return the part of the router's gradient that comes from the upstream gradients."""
        return self.main * sum(  # type: ignore[return-value]
            router_gradients(part.x_TD, _zeros(part), self.steps.main_slope(part))[1] for part in self._parts()
        )

    def _parts(self) -> Iterator[Part]:
        for row in self.steps.parts:
            yield from row

    def _bound(self, expected: Tensor) -> Tensor:
        allowed = roundoff(self.steps) * expected.abs()
        for m, row in enumerate(self.steps.parts):
            for d, part in enumerate(row):
                size_TE = self.main * main_slope_bound(self.steps, part)
                for name in self.steps.names:
                    size_TE = size_TE + self.main * abs(self._local(name, m, d)) * slope_bound(self.steps, name, part)
                allowed = allowed + 2 * size_TE.T @ part.x_TD.abs()
                # The gradient of each microbatch may be stored in the dtype of the router before it is added.
                stored_ED = self._stored(part, m, d).T @ part.x_TD.abs()
                allowed = allowed + unit_roundoff(self.steps.config.dtype) * self.main * stored_ED
        return allowed

    def _stored(self, part: Part, m: int, d: int) -> Tensor:
        """Return the magnitudes of which unit roundoffs are allowed in a part's slopes and their product, (T, E).

        The slope of each loss and of the main loss may be stored in the dtype of the tokens, and so may each of their
        sums and the product.
        """
        slopes = [self.steps.main_slope(part)]
        slopes += [self._local(name, m, d) * self.steps.slopes[name][m][d] for name in self.steps.names]
        apart_TE = torch.stack([slope_TE.abs() for slope_TE in slopes]).sum(0)
        return len(slopes) * apart_TE + torch.stack(slopes).sum(0).abs()

    def _local(self, name: str, m: int, d: int) -> float:
        return self.steps.local_factor(name, m, d, self.main)

    def input(self, m: int, d: int, router_ED: Tensor) -> Target:
        """Return the expected gradient of the input of a part, (T, D), before finishing."""
        part = self.steps.parts[m][d]
        slope_TE, size_TE = self.steps.main_slope(part), main_slope_bound(self.steps, part)
        for name in self.steps.names:
            slope_TE = slope_TE + self._local(name, m, d) * self.steps.slopes[name][m][d]
            size_TE = size_TE + abs(self._local(name, m, d)) * slope_bound(self.steps, name, part)
        dx_TD, _ = router_gradients(part.x_TD, router_ED, slope_TE)
        stored_TD = unit_roundoff(self.steps.config.dtype) * (self._stored(part, m, d) @ router_ED.abs())
        return Target(dx_TD, 2 * size_TE @ router_ED.abs() + roundoff(self.steps) * dx_TD.abs() + stored_TD)


def _zeros(part: Part) -> Tensor:
    return part.x_TD.new_zeros(part.logits_TE.shape[1], part.x_TD.shape[1])


def _main(outcome: Outcome, steps: Steps) -> float:
    """Return the factor by which finishing multiplies the gradients of the main loss."""
    layout = outcome.workload.layout
    if outcome.workload.config.losses.per_token:
        return 1 / max(1, sum(steps.valid(part) for row in steps.parts for part in row))
    return 1 / (layout.dp * layout.cp) if outcome.ranks[0].loss_convention == "mean_over_dp" else 1.0


@judge(WrongGradient, "loss")
def judge_gradients(outcome: Outcome) -> Comparisons:
    """Decide whether the gradients of routers, finished, and of their inputs include every loss once.

    Raises:
        WrongGradient: a gradient has another value.
        AbsentGradient: a gradient is None.
    """
    found = once(outcome, _gradients)
    wrong = [finding for comparison in found for finding in comparison.findings()]
    if wrong and all(finding.kind == "absent" for finding in wrong):
        fail(AbsentGradient, "loss", wrong)
    yield from found


def _gradients(outcome: Outcome) -> list[Comparison]:
    found: list[Comparison] = []
    for step in steps_of(outcome):
        for layer in range(outcome.workload.config.losses.layers) if step.trained else ():
            found += _of_layer(outcome, step, layer)
    return found


def _of_layer(outcome: Outcome, step: Step, layer: int) -> list[Comparison]:
    """Return the comparisons of one layer under the first legal rule by which it is right, else the first rule.

    A cause is looked for under the first rule alone, and once for ranks that hold the same gradient: that takes the
    gradients of every known mistake.
    """
    first, parts = None, step.parts(layer)
    for rule in legal(outcome, parts):
        steps = _of(outcome, step, parts, rule)
        expected = _Gradients(steps, _main(outcome, steps))
        found = list(_under_rule(outcome, step, layer, expected, lambda final_ED, target: ""))
        if not any(comparison.findings() for comparison in found):
            return found
        first = first or expected
    assert first is not None, "no rule is legal"
    causes: dict[bytes, str] = {}

    def cause(final_ED: Tensor, target: Target) -> str:
        key = final_ED.numpy().tobytes()
        if key not in causes:
            causes[key] = _gradient_cause(outcome, step, layer, final_ED, target, first)
        return causes[key]

    return list(_under_rule(outcome, step, layer, first, cause))


def _under_rule(
    outcome: Outcome, step: Step, layer: int, expected: _Gradients, cause_of: Callable[[Tensor, Target], str]
) -> Iterator[Comparison]:
    of = "" if outcome.workload.config.losses.layers == 1 else f" of layer {layer}"
    whole = expected.router()
    for rank, finals in enumerate(step.finals):
        final_ED = finals[layer] if layer < len(finals) else None
        if final_ED is None:
            absent = f"rank {rank}: the router{of} has no gradient after {step.name}"
            yield Comparison(rank, Finding("absent", absent, (rank,)))
            continue
        shard = step.shards[rank][layer]
        target = Target(shard_of(whole.expected, shard), shard_of(whole.allowed, shard))
        worst, cause = compare(final_ED, *target), ""
        if not worst.holds and not shard:
            cause = cause_of(final_ED.double(), target)
        said = f"rank {rank}: the finished gradient of the router{of} in {step.name} is {worst}{cause}"
        yield compared(rank, worst, "router", said, final_ED.numel())
    router_ED = outcome.workload.parameters["router", layer].double()
    for m, place in enumerate(step.trained):
        for d, part in enumerate(expected.steps.parts[m]):
            whole = expected.input(m, d, router_ED)
            for number, rank in enumerate(part.ranks):
                dx = step.forwards[rank][place]["dx"][layer]
                if dx is None:
                    absent = f"rank {rank}: x{of} has no gradient in {step.name}"
                    yield Comparison(rank, Finding("absent", absent, (rank,)))
                    continue
                target = Target(part.of_rank(whole.expected, number), part.of_rank(whole.allowed, number))
                worst = compare(dx.reshape(target.expected.shape), *target)
                said = f"rank {rank}: dL/dx{of} of microbatch {m} in {step.name} is {worst}"
                yield compared(rank, worst, "input", said, dx.numel())


def _gradient_cause(
    outcome: Outcome, step: Step, layer: int, final_ED: Tensor, target: Target, expected: _Gradients
) -> str:
    """Return the likely cause: another rule, or a factor of one loss or of all."""
    parts, names = expected.steps.parts, _sizes(outcome, step)
    causes = []
    for words, rule in mistakes(outcome):
        steps = _of(outcome, step, parts, rule)
        guess = _Gradients(steps, expected.main).router()
        if within(final_ED, *guess) and not within(target.expected, *guess):
            causes.append(words)
            break
    main_ED = expected.main_part()
    gradients = {name: expected.steps.loss_gradient(name) for name in expected.steps.names}
    total_ED = sum(gradients.values(), torch.zeros_like(main_ED))
    if (ratio := factor(final_ED - main_ED, total_ED, target.allowed, names)) is not None:
        who = CALLED[expected.steps.names[0]] if len(gradients) == 1 else "all losses together"
        causes.append(f"the gradient of {who} is {ratio_words(ratio, names)}")
    for name, gradient_ED in gradients.items() if len(gradients) > 1 and not causes else ():
        rest_ED = final_ED - main_ED - (total_ED - gradient_ED)
        if (ratio := factor(rest_ED, gradient_ED, target.allowed, names)) is not None:
            causes.append(f"the gradient of {CALLED[name]} is {ratio_words(ratio, names)}")
            break
    return _causes(causes)
