"""Words for wrong results of the backend's own experts: the factor, the place or the mistake that explains them.

A guess is another run of the oracle with one mistake on purpose: gate and up swapped, a slot missing, the tokens of one
rank only. The first guess that explains what is wrong, within its bounds, is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from moe_conformance.judging.compare.bounded import Target, compare, factor, too_narrow, within
from moe_conformance.judging.experts.expected import Held, OwnExpected, solve
from moe_conformance.judging.experts.mistakes import Run, other_runs
from moe_conformance.judging.findings import Finding, likeliest, ratio_words
from moe_conformance.judging.observed.cached import Kept
from moe_conformance.judging.observed.scopes import Place, backward_places_of, other_sums, shard_of
from moe_conformance.reference.exchange.layer import Gradients

Found = tuple[list[Finding], float | None]  # and the factor if there is one for all

_EXPLAINED = 24  # wrong parameters told in words; hundreds of them say nothing new, and every one takes milliseconds


# ---- tokens --------------------------------------------------------------------------------------------------


def explain_tokens(
    expected: OwnExpected,
    name: str,
    actual: Mapping[Place, Tensor],
    targets: Mapping[Place, Target],
    names: Mapping[str, float],
) -> Found:
    """Say why y, dx or dweights is wrong: one factor, one mistake for all, or each wrong token by itself.

    Args:
        expected: the oracle.
        name: "y", "dx" or "dweights".
        actual: what came back, of every place, well formed.
        targets: what should have come back.
        names: factors that have a name (see `diagnosis.ratio_words`).

    Returns the findings, and the factor if there is one for all.
    """
    everything = [torch.cat([each.double() for each in actual.values()])]
    everything += [torch.cat(parts) for parts in zip(*(targets[place] for place in actual), strict=True)]
    ranks = _wrong_ranks(actual, targets)
    ratio = factor(everything[0], everything[1], everything[2], names)
    if ratio is not None:
        sentence = f"every element of {name} is {ratio_words(ratio, names)}"
        return [Finding("factor", sentence, ranks, abs(ratio - 1))], ratio
    cause = _cause(expected, name, actual, everything[0], everything[2])
    of_ranks = _factors_of_ranks(name, actual, targets, names)
    if cause is None and of_ranks:
        return of_ranks, None
    tokens = [finding for place in actual for finding in _wrong_tokens(name, place, actual[place], targets[place])]
    if cause is None:
        return tokens, None
    example = max(tokens, key=lambda finding: finding.size).sentence
    return [Finding("cause", f"{name} is as if {cause}; for example {example}", ranks)], None


def _wrong_ranks(actual: Mapping[Place, Tensor], targets: Mapping[Place, Target]) -> tuple[int, ...]:
    return tuple(sorted({place[1] for place in actual if not within(actual[place], *targets[place])}))


def _factors_of_ranks(
    name: str, actual: Mapping[Place, Tensor], targets: Mapping[Place, Target], names: Mapping[str, float]
) -> list[Finding]:
    """Find one factor for each rank that is wrong; none at all if one of these has none."""
    findings = []
    for rank in _wrong_ranks(actual, targets):
        places = [place for place in actual if place[1] == rank]
        value = torch.cat([actual[place].double() for place in places])
        target = [torch.cat(parts) for parts in zip(*(targets[place] for place in places), strict=True)]
        ratio = factor(value, target[0], target[1], names)
        if ratio is None:
            return []
        sentence = f"every element of {name} on rank {rank} is {ratio_words(ratio, names)}"
        findings.append(Finding("factor of a rank", sentence, (rank,), abs(ratio - 1)))
    return findings


def _wrong_tokens(name: str, place: Place, actual_T: Tensor, target: Target) -> list[Finding]:
    """Tell every token of one place that is out of its bounds."""
    findings = []
    for t, row in enumerate(actual_T):
        worst = compare(row, target.expected[t], target.allowed[t])
        if worst.holds:
            continue
        of = f" of microbatch {place[0]}" if place[0] else ""
        what = f"{worst}"
        kind = "outside"
        if not bool(torch.isfinite(row).all()):
            kind = "not finite"
        elif not bool(row.any()):
            kind, what = "zero", "zero"
        elif (ratio := factor(row, target.expected[t], target.allowed[t], {})) is not None:
            kind, what = "factor of a token", f"{ratio_words(ratio, {})}: {worst}"
        sentence = f"{name} of rank {place[1]} token {t}{of} is {what}"
        findings.append(Finding(kind, sentence, (place[1],), worst.size))
    return findings


def _cause(
    expected: OwnExpected, name: str, actual: Mapping[Place, Tensor], actual_T: Tensor, allowed_T: Tensor
) -> str | None:
    """Return the first mistake that explains all tokens of all ranks."""
    field = {"y": "y_TD", "dx": "dx_TD", "dweights": "dweights_TK"}[name]
    places = tuple(actual)
    spare_T = allowed_T.max().expand_as(allowed_T)  # errors are those of the other run: of larger weights, say
    for words, result in other_runs(expected, places):
        if within(actual_T, getattr(result, field), spare_T):
            return words
    right_T = getattr(solve(expected.workload, places, expected.weights_at), field)
    for by in range(1, right_T.shape[1]) if name == "dweights" else ():
        if within(actual_T, right_T.roll(-by, 1), spare_T):
            return f"slot k had the gradient of slot (k + {by}) modulo {right_T.shape[1]}"
    return too_narrow(actual_T, Target(right_T, allowed_T), expected.workload.config.dtype)


# ---- parameters ----------------------------------------------------------------------------------------------


def explain_parameters(expected: OwnExpected, held: Sequence[Held], names: Mapping[str, float]) -> Found:
    """Say why gradients of parameters are wrong: factors of all, of an expert, of a rank; or each tensor by itself.

    Args:
        expected: the oracle.
        held: all gradients that were judged, right and wrong.
        names: factors that have a name (see `diagnosis.ratio_words`).
    """
    everything = _common("every expert gradient", held, names)
    if everything is not None:
        return [everything[0]], everything[1]
    groupings: tuple[Callable[[Held], str], ...] = (
        lambda each: f"every gradient of expert {each.key[1]}",
        lambda each: f"every expert gradient on rank {each.rank}",
        lambda each: f"every gradient of {each.key[0]}",
    )
    explained = [found for group in groupings if (found := _by_group(held, group, names))]
    if explained:
        return min(explained, key=len), None
    explainer, wrong = _Explainer(expected, names), [each for each in held if not each.holds()]
    findings = likeliest([explainer.explain(each) for each in wrong[:_EXPLAINED]])
    for each in wrong[_EXPLAINED:]:
        findings.append(Finding("not explained", f"the gradient of {each.name} is wrong too", (each.rank,)))
    return findings, None


def _by_group(held: Sequence[Held], group: Callable[[Held], str], names: Mapping[str, float]) -> list[Finding]:
    """Find a factor for each group that holds something wrong; none at all if one of these has none."""
    groups: dict[str, list[Held]] = {}
    for each in held:
        groups.setdefault(group(each), []).append(each)
    findings = []
    for what, same in groups.items():
        if all(each.holds() for each in same):
            continue
        common = _common(what, same, names)
        if common is None:
            return []
        findings.append(common[0])
    return findings


def _common(what: str, held: Sequence[Held], names: Mapping[str, float]) -> tuple[Finding, float] | None:
    actual = torch.cat([each.value.double().flatten() for each in held])
    expected = torch.cat([each.target.expected.flatten() for each in held])
    allowed = torch.cat([each.target.allowed.flatten() for each in held])
    ratio = factor(actual, expected, allowed, names)
    if ratio is None:
        return None
    ranks = tuple(sorted({each.rank for each in held}))
    return Finding("factor", f"{what} is {ratio_words(ratio, names)}", ranks, abs(ratio - 1)), ratio


class _Explainer:
    """Explains one tensor after the other; keeps the other runs of the oracle, which all of them ask for."""

    def __init__(self, expected: OwnExpected, names: Mapping[str, float]) -> None:
        self.expected, self.names = expected, names
        self._held = expected.workload.config.experts // expected.workload.layout.ep
        self.runs: dict[int, Kept[Run]] = {}
        self.sums: dict[int, Kept[Run]] = {}
        self.partial: dict[tuple[Place, ...], Gradients] = {}

    def explain(self, held: Held) -> list[Finding]:
        """Return the findings that may explain one wrong tensor, see `likeliest`; their kind is the mistake."""
        worst = compare(held.value, *held.target)
        told = [
            Finding(said, f"{said}: {held.name} has {worst}", (held.rank,), worst.size) for said in self._said(held)
        ]
        return told or [Finding("outside", f"the gradient of {held.name} has {worst}", (held.rank,), worst.size)]

    def _said(self, held: Held) -> list[str]:
        if bool(held.value.any()):
            said = self._mistake(held)
            return [said] if said else []
        empty = [words for words, candidate in self._partial_sums(held) if not bool(candidate.any())]
        return ["the gradient is zero", *empty]  # because those whose tokens are in it have none for this expert

    def _mistake(self, held: Held) -> str | None:
        if not bool(torch.isfinite(held.value).all()):
            return "the gradient is not finite"
        for words, candidate in self._candidates(held):
            if within(held.value, candidate, held.target.allowed):
                return words
        for words, candidate in self._partial_sums(held):
            ratio = factor(held.value, candidate, held.target.allowed, self.names)
            if ratio is not None:
                return f"{words}, and it is {ratio_words(ratio, self.names)} of that"
        ratio = factor(held.value, *held.target, self.names)
        if ratio is not None:
            return f"the gradient is {ratio_words(ratio, self.names)}"
        narrow = too_narrow(held.value, held.target, self.expected.workload.config.dtype)
        return f"the gradient is as if {narrow}" if narrow else None

    def _candidates(self, held: Held) -> Iterator[tuple[str, Tensor]]:
        """Gradients that are right for something else, then those of wrong runs."""
        yield from self._partial_sums(held)
        name, expert = held.key
        for other in range(self.expected.workload.config.experts):
            if other != expert:
                yield f"holds the gradient of expert {other}", self._part(held, (name, other))
        if name in ("gate", "up"):
            other_name = "up" if name == "gate" else "gate"
            yield f"holds the gradient of {other_name}", self._part(held, (other_name, expert))
        alike = range(expert % self._held, self.expected.workload.config.experts, self._held)
        added = torch.stack([self._part(held, (name, e)) for e in alike]).sum(0)
        yield f"holds the sum over experts {list(alike)}, which have the same place on their ranks", added
        if held.shard:
            whole = self.expected.parameter(held.stage, held.key).expected
            dim, index, of = held.shard
            for i in range(of):
                if i != index:
                    yield f"holds the gradient of part {i}", shard_of(whole, (dim, i, of))
        for words, result in self._runs(held.stage):
            yield f"the gradient is as if {words}", self._divided(held, result)

    def _partial_sums(self, held: Held) -> Iterator[tuple[str, Tensor]]:
        if held.rank not in self.sums:
            self.sums[held.rank] = Kept(self._other_sums(held.rank))
        for words, result in self.sums[held.rank]:
            yield words, self._divided(held, result)

    def _other_sums(self, rank: int) -> Iterator[Run]:
        for words, places in other_sums(self.expected.workload, rank):
            if places not in self.partial:
                self.partial[places] = solve(self.expected.workload, places, self.expected.weights_at)
            yield words, self.partial[places]

    def _part(self, held: Held, key: tuple[str, int]) -> Tensor:
        return shard_of(self.expected.parameter(held.stage, key).expected, held.shard)

    def _divided(self, held: Held, result: Gradients) -> Tensor:
        return shard_of(result.parameters[held.key], held.shard) / self.expected.divisor

    def _runs(self, stage: int) -> Kept[Run]:
        if stage not in self.runs:
            places = backward_places_of(self.expected.workload, self.expected.stages[stage])
            self.runs[stage] = Kept(other_runs(self.expected, places))
        return self.runs[stage]
