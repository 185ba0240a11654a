"""Causes of finished parameter gradients that are out of their bounds: by kind, expert, rank or single tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_conformance.judging.compare.bounded import Target, compare, factor
from moe_conformance.judging.explain.bounded import Candidate, Cause, Found, cause_of
from moe_conformance.judging.findings import Finding, likeliest, ratio_words
from moe_conformance.judging.observed.cached import Kept
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.observed.scopes import Place, Shard, backward_places_of, other_sums, shard_of, stages
from moe_conformance.judging.observed.stage_expected import StageAnswers
from moe_conformance.judging.verdict import Stage, Tally
from moe_conformance.scenarios.outcome import Grad
from moe_conformance.workloads.records.workload import ParameterKey, Workload

Gradients = Mapping[ParameterKey, Tensor]  # of whole parameters, summed over some tokens
Run = tuple[str, Gradients]

_EXPLAINED = 24  # wrong tensors whose mistake is looked for; more add no information, and each takes milliseconds


def part_name(key: ParameterKey, shard: Shard) -> str:
    """Return the name of a parameter, with the shard of it that is held."""
    name, number = key
    part = f" (part {shard[1]} of {shard[2]})" if shard and shard[2] > 1 else ""
    if number is None:
        return f"{name}{part}"
    whose = "shared expert" if name.startswith("shared_") else "expert"
    return f"{name.removeprefix('shared_')} of {whose} {number}{part}"


@dataclass(frozen=True)
class Held:
    """The finished gradient of one parameter on one rank, and its expected value."""

    rank: int
    stage: int  # of the pipeline
    key: ParameterKey
    shard: Shard
    actual: Tensor | None
    target: Target
    idle: bool = False  # in microbatches that go backward, no token of the stage is routed to the expert

    @property
    def part(self) -> str:
        """The name of the parameter, with the shard that is held."""
        return part_name(self.key, self.shard)

    @property
    def name(self) -> str:
        """The name of the parameter and of the rank."""
        return f"{self.part} on rank {self.rank}"

    @property
    def value(self) -> Tensor:
        """The gradient; zeros where it is None, which is judged before values are."""
        return torch.zeros_like(self.target.expected) if self.actual is None else self.actual

    def holds(self, tally: Tally | None = None) -> bool:
        """Return whether every element is within its bound; if so, count them in the tally."""
        return compare(self.value, *self.target, tally, self.rank).holds


def replicas(held: Sequence[Held]) -> Iterator[tuple[Held, Held]]:
    """Yield the pairs of gradients of one part that several ranks of a stage hold: the first with every other."""
    groups: dict[tuple[int, ParameterKey, Shard], list[Held]] = {}
    for gradient in held:
        groups.setdefault((gradient.stage, gradient.key, gradient.shard), []).append(gradient)
    for first, *others in groups.values():
        yield from ((first, other) for other in others)


class Oracle(NamedTuple):
    """Computes other gradients of a workload: over the tokens of some places only, or with one mistake."""

    workload: Workload
    divisor: int  # of finished gradients: 1 where they are summed, dp * cp where they are averaged
    solve: Callable[[Sequence[Place]], Gradients]
    mistakes: Callable[[Sequence[Place]], Iterator[Run]]


def explain_gradients(oracle: Oracle, held: Sequence[Held], names: Mapping[str, float]) -> Found:
    """Return findings that explain wrong parameter gradients.

    A factor of all gradients, of an expert or of a rank is tried first, then each tensor by itself.

    Args:
        oracle: computes the gradients that mistakes would give.
        held: all gradients that were judged, right and wrong.
        names: factors that have a name (see `findings.ratio_words`).
    """
    explained = [
        found
        for group in (_kind, _owner, _rank, _role)
        if (found := _by_group(held, group, names, alone=group is _kind))
    ]
    if explained:
        causes = min(explained, key=len)
        everything = len(causes) == 1 and len({_kind(gradient) for gradient in held}) == 1 and causes == explained[0]
        return [finding for finding, _ in causes], causes[0][1] if everything else None
    explainer, wrong = _Explainer(oracle, names), [gradient for gradient in held if not gradient.holds()]
    findings = likeliest([explainer.explain(gradient) for gradient in wrong[:_EXPLAINED]])
    return findings + [explainer.briefly(gradient) for gradient in wrong[_EXPLAINED:]], None


def stage_of(reading: Reading, expected: StageAnswers[Any], wrong: Sequence[Held]) -> Stage:
    """Return "finish" if the gradients before `finish_gradients` add up to the expected ones, else "gradient".

    Also "finish" where a backend shows no gradients before finishing (they are None, and not zero afterwards).
    """
    for stage, key, shard in dict.fromkeys((gradient.stage, gradient.key, gradient.shard) for gradient in wrong):
        finished = [
            gradient.value
            for gradient in wrong
            if (gradient.stage, gradient.key, gradient.shard) == (stage, key, shard)
        ]
        grads = [reading.ranks[rank].grads_local.get(key) for rank in expected.stages[stage]]
        parts = [part.double() for grad in grads if grad and (part := _cut(grad, shard)) is not None]
        if not parts:
            if not any(bool(value.any()) for value in finished):
                return "gradient"
            continue
        full = expected.parameter(stage, key)
        target = Target(*(shard_of(side * expected.divisor, shard) for side in full))
        if not compare(torch.stack(parts).sum(0), *target).holds:
            return "gradient"
    return "finish"


def _cut(grad: Grad, shard: Shard) -> Tensor | None:
    """Return the shard of a gradient that a window is on; None if the gradient is None or sharded otherwise."""
    if grad.value is None or grad.shard == shard:
        return grad.value
    if shard is None:
        return None
    dim, index, of = shard
    held_dim, held_index, held_of = grad.shard or (dim, 0, 1)
    times = of // held_of
    if held_dim != dim or of % held_of or index // times != held_index:
        return None
    return shard_of(grad.value, (dim, index % times, times))


# ---- groups of tensors with one factor -----------------------------------------------------------------------------


def _kind(held: Held) -> str:
    name, number = held.key
    if number is None:
        return f"every element of the {name}'s gradient"
    return f"every {'shared expert' if name.startswith('shared_') else 'expert'} gradient"


def _owner(held: Held) -> str:
    return f"every gradient of {held.part.split(' (')[0].split(' of ')[-1]}"


def _rank(held: Held) -> str:
    return f"{_kind(held)} on rank {held.rank}"


def _role(held: Held) -> str:
    name = held.key[0]
    return f"every gradient of {name.removeprefix('shared_')}" + (
        " of shared experts" if name.startswith("shared_") else ""
    )


def _by_group(
    held: Sequence[Held], group: Callable[[Held], str], names: Mapping[str, float], alone: bool
) -> list[tuple[Finding, float]]:
    """Return a finding and a factor for each group with a wrong gradient; nothing if one of these has no factor.

    A group of one tensor has a factor only with `alone`.
    """
    groups: dict[str, list[Held]] = {}
    for gradient in held:
        groups.setdefault(group(gradient), []).append(gradient)
    findings = []
    for what, same in groups.items():
        if all(gradient.holds() for gradient in same):
            continue
        ratio = _common(same, names) if alone or len(same) > 1 else None
        if ratio is None:
            return []
        ranks = tuple(sorted({gradient.rank for gradient in same}))
        sentence = f"{what} is {ratio_words(ratio, names)}"
        beyond = max(compare(gradient.value, *gradient.target).counted for gradient in same)
        findings.append((Finding(what if alone else "factor", sentence, ranks, abs(ratio - 1), beyond), ratio))
    return findings


def _common(held: Sequence[Held], names: Mapping[str, float]) -> float | None:
    actual = torch.cat([gradient.value.double().flatten() for gradient in held])
    expected = torch.cat([gradient.target.expected.flatten() for gradient in held])
    allowed = torch.cat([gradient.target.allowed.flatten() for gradient in held])
    return factor(actual, expected, allowed, names)


# ---- one tensor ----------------------------------------------------------------------------------------------------


class _Explainer:
    """Explains wrong tensors one by one, and caches the oracle's solutions for all of them."""

    def __init__(self, oracle: Oracle, names: Mapping[str, float]) -> None:
        self.oracle, self.names = oracle, names
        self.solved: dict[tuple[Place, ...], Gradients] = {}
        self.mistakes: dict[int, Kept[Run]] = {}

    def explain(self, held: Held) -> list[Finding]:
        """Return the findings that may explain one wrong tensor, for `likeliest`; their kind is the cause."""
        if held.idle:
            return [self._finding(held, "leftover", ", and no token reached the expert")]
        causes = self._causes(held)
        if causes and causes[0].ratio is not None:
            first, *causes = causes
            found = [self._factor(held, first)]
        else:
            found = [] if causes else [self._finding(held, "outside")]
        return found + [self._finding(held, cause.words, f"; likely cause: {cause.words}") for cause in causes]

    def briefly(self, held: Held) -> Finding:
        """Return the finding about one more wrong tensor, whose cause is looked for in its own values alone."""
        cause = cause_of(held.value, held.target, (), self.names, self.oracle.workload.config.dtype)
        if cause is None:
            return self._finding(held, "not explained")
        if cause.ratio is not None:
            return self._factor(held, cause)
        return self._finding(held, cause.words, f"; likely cause: {cause.words}")

    def _factor(self, held: Held, cause: Cause) -> Finding:
        worst = compare(held.value, *held.target)
        sentence = f"the gradient of {held.name} is {cause.words}: {worst}"
        return Finding(f"factor {cause.words}", sentence, (held.rank,), worst.size, worst.counted)

    def _finding(self, held: Held, kind: str, more: str = "") -> Finding:
        worst = compare(held.value, *held.target)
        return Finding(kind, f"the gradient of {held.name} is {worst}{more}", (held.rank,), worst.size, worst.counted)

    def _causes(self, held: Held) -> list[Cause]:
        dtype = self.oracle.workload.config.dtype
        cause = cause_of(held.value, held.target, self._candidates(held), self.names, dtype)
        if cause is None or bool(held.value.any()):
            return [cause] if cause else []
        # Zero, or the sum over tokens that have no gradient for this expert: what explains the other tensors.
        return [cause, *(Cause(words) for words, value in self._partial_sums(held) if not bool(value.any()))]

    def _candidates(self, held: Held) -> Iterator[Candidate]:
        """Yield the gradients that mistakes would give: other parameters', partial sums and other oracle runs."""
        yield from self._partial_sums(held)
        yield from self._of_others(held)
        for words, run in self._mistakes(held.stage):
            yield words, self._cut(held, run)
        for words, value in self._partial_sums(held):
            ratio = factor(held.value, value, held.target.allowed, self.names)
            if ratio is not None:
                named = ratio_words(ratio, self.names).partition(": ")[2]
                times = f"{ratio:.3f}" + (f" ({named})" if named else "")
                yield f"{words}, and it is multiplied by {times}", ratio * value

    def _partial_sums(self, held: Held) -> Iterator[Candidate]:
        for words, places in other_sums(self.oracle.workload, held.rank):
            yield words, self._cut(held, self._solve(places))

    def _of_others(self, held: Held) -> Iterator[Candidate]:
        """Yield the gradients of other parameters: of experts with the same local index, and of other shards."""
        workload, (name, number) = self.oracle.workload, held.key
        right = self._solve(self._stage_places(held.stage))
        for other, full in right.items():
            if other != held.key and full.shape == right[held.key].shape:
                whose = other[0] if other[1] == number else f"{'expert'} {other[1]}" if other[0] == name else None
                words = f"it is the gradient of {whose or part_name(other, None)}"
                yield words, self._cut(held, right, other)
        if number is not None and not name.startswith("shared_"):
            per_rank = workload.config.experts // workload.layout.ep
            alike = range(number % per_rank, workload.config.experts, per_rank)
            added = torch.stack([self._cut(held, right, (name, e)) for e in alike]).sum(0)
            yield f"it is the sum over experts {list(alike)}, which have the same local index on their ranks", added
        dim, index, of = held.shard or (0, 0, 1)
        parts = [shard_of(right[held.key], (dim, i, of)) / self.oracle.divisor for i in range(of)]
        yield from ((f"it is the gradient of part {i}", part) for i, part in enumerate(parts) if i != index)
        if of > 1:
            words = f"it is the sum over all {of} parts: it was reduced over ranks that hold other parts"
            yield words, torch.stack(parts).sum(0)

    def _mistakes(self, stage: int) -> Iterable[Run]:
        if stage not in self.mistakes:
            self.mistakes[stage] = Kept(self.oracle.mistakes(self._stage_places(stage)))
        return self.mistakes[stage]

    def _cut(self, held: Held, gradients: Gradients, key: ParameterKey | None = None) -> Tensor:
        return shard_of(gradients[key or held.key], held.shard) / self.oracle.divisor

    def _stage_places(self, stage: int) -> tuple[Place, ...]:
        return backward_places_of(self.oracle.workload, stages(self.oracle.workload.layout)[stage])

    def _solve(self, places: tuple[Place, ...]) -> Gradients:
        if places not in self.solved:
            self.solved[places] = self.oracle.solve(places)
        return self.solved[places]
