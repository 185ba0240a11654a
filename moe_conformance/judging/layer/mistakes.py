"""Words for wrong results of a whole layer: the factor or the mistake that explains them.

A guess is another run of the oracle with the parts put together by another rule: the shared experts left out, added tp
times, the gate forgotten, the dropped slots kept. The first guess that explains all that is wrong, within its bounds,
is told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from moe_conformance.judging.compare.bounded import Target, compare, factor, too_narrow, within
from moe_conformance.judging.findings import Finding, ratio_words
from moe_conformance.judging.layer.expected import LayerExpected
from moe_conformance.judging.observed.scopes import Place, Shard, backward_places_of, other_sums, shard_of
from moe_conformance.reference.routing.routes import Routed
from moe_conformance.reference.shared_experts.whole_layer import Drop, LayerGradients, Mix, mixed
from moe_conformance.workloads.records.workload import ParameterKey

Found = tuple[list[Finding], float | None]
Guess = Callable[[Sequence[Place]], LayerGradients]


def mixes(expected: LayerExpected) -> Iterator[tuple[str, Mix]]:
    """List the mistakes that there are in putting a layer's parts together, each in words."""
    workload = expected.workload
    if not workload.config.shared_ffn:
        return
    if workload.config.shared_bias:
        yield from _of_biases(expected)
    yield "the shared experts were left out", lambda r, h, a, b: r
    yield "the routed experts were left out", lambda r, h, a, b: a * h
    if workload.config.shared_gate:
        yield "the gate were left out", lambda r, h, a, b: r + h
        yield "the gate multiplied the routed part too", lambda r, h, a, b: a * (r + h)
        yield "the gate multiplied the routed part in place of the shared", lambda r, h, a, b: a * r + h
        yield "the gate were not passed through its sigmoid", lambda r, h, a, b: r + a.logit() * h
        yield "the gate multiplied twice", lambda r, h, a, b: r + a * a * h
    for words, times in _factors(expected):
        yield f"the shared part were {words}", times_of_shared(times)


def detached(expected: LayerExpected) -> Iterator[tuple[str, Mix]]:
    """List what a backward may leave out, each in words."""
    if not expected.workload.config.shared_ffn:
        return
    if expected.workload.config.shared_gate:
        yield "nothing flowed back through the gate", lambda r, h, a, b: r + a.detach() * h
    yield "nothing flowed back through the shared experts", lambda r, h, a, b: r + (a * h).detach()
    yield "nothing flowed back through the routed experts", lambda r, h, a, b: r.detach() + a * h


def undropped(expected: LayerExpected) -> Iterator[tuple[str, Drop]]:
    """List what a backward may make of slots that the forward dropped, each in words."""
    if expected.workload.config.capacity_factor is None:
        return
    yield "nothing had been dropped", lambda ids, w, kept: Routed(ids, w)
    yield (
        "the weights of dropped slots still took gradients to the router",
        lambda ids, w, kept: Routed(ids, torch.where(kept, w, w - w.detach())),
    )


def _guesses(expected: LayerExpected, backward: bool) -> Iterator[tuple[str, Guess]]:
    """List the mistakes in words, each with the run of the oracle that makes it."""
    for words, mix in chain(detached(expected) if backward else (), mixes(expected)):
        yield words, partial(expected.solve, mix=mix)
    for words, drop in undropped(expected) if backward else ():
        yield words, partial(expected.solve, drop=drop)


def times_of_shared(times: float) -> Mix:
    """Return the mix in which the shared part is multiplied by a number."""
    return lambda r, h, a, b: r + times * a * h


def _of_biases(expected: LayerExpected) -> Iterator[tuple[str, Mix]]:
    """List the mistakes with the output biases of shared experts."""
    config = expected.workload.config
    several = len(config.shared_ffn) > 1
    whose = "the biases of the shared experts" if several else "the bias of the shared expert"
    yield f"{whose} were left out", lambda r, h, a, b: r + a * (h - b.sum(0))
    for j in range(len(config.shared_ffn)) if several else ():
        yield f"only the bias of shared expert {j} were added", _only_bias(j)
    if config.shared_gate:
        yield f"{whose} were added behind the gate", lambda r, h, a, b: r + a * (h - b.sum(0)) + b.sum(0)
        yield f"the gate multiplied {whose} alone", lambda r, h, a, b: r + h - (1 - a) * b.sum(0)
        yield f"the gate multiplied {whose} twice", lambda r, h, a, b: r + a * (h - (1 - a) * b.sum(0))
    for words, times in _factors(expected):
        yield f"{whose} were {words}", _times_of_bias(times)


def _only_bias(j: int) -> Mix:
    return lambda r, h, a, b: r + a * (h - b.sum(0) + b[j])


def _times_of_bias(times: float) -> Mix:
    return lambda r, h, a, b: r + a * (h + (times - 1) * b.sum(0))


def _factors(expected: LayerExpected) -> Iterator[tuple[str, float]]:
    config, layout = expected.workload.config, expected.workload.layout
    sizes: dict[float, list[str]] = {}
    for name in ("tp", "ep", "etp", "dp", "cp", "edp", "world"):
        if (size := layout.sizes()[name]) > 1:
            sizes.setdefault(float(size), []).append(name)
    sizes.setdefault(2.0, []).append("two")
    sizes.setdefault(float(config.top_k), []).append("K")
    for times, names in sizes.items():
        yield f"added {times:g} times ({' or '.join(names)})", times
    for times, names in sizes.items():
        yield f"divided by {times:g} ({' or '.join(names)})", 1 / times
    if config.scale != 1:
        yield f"multiplied by the routing scale {config.scale:g}", config.scale
        yield f"divided by the routing scale {config.scale:g}", 1 / config.scale


def explain_tokens(
    expected: LayerExpected,
    name: str,
    field: Callable[[LayerGradients], Tensor],
    actual: Mapping[Place, Tensor],
    targets: Mapping[Place, Target],
    names: Mapping[str, float],
) -> Found:
    """Say why y or dx is wrong: a mistake or one factor for all, a mistake of some ranks, or each token by itself."""
    places = [place for place in expected.places if place in actual]
    runs = tuple(_guesses(expected, backward=name != "y"))

    def mistake(of: Sequence[Place], spare: Tensor) -> str | None:
        value = torch.cat([actual[place].double() for place in of])
        found = (words for words, guess in runs if within(value, field(guess(of)), spare[: len(value)]))
        return next(found, None)

    value = torch.cat([actual[place].double() for place in places])
    target = Target(*(torch.cat(parts) for parts in zip(*(targets[place] for place in places), strict=True)))
    tokens = [
        finding
        for place in places
        for finding in _wrong_tokens(name, place, actual[place], targets[place], expected.kept[place])
    ]
    ranks = tuple(sorted({rank for finding in tokens for rank in finding.ranks}))
    spare = target.allowed.max().expand_as(target.allowed)
    if words := mistake(places, spare):
        return [Finding("cause", f"{name} is as if {words}; for example {tokens[0].sentence}", ranks)], None
    ratio = factor(value, *target, names)
    if ratio is not None:
        sentence = f"every element of {name} is {ratio_words(ratio, names)}"
        return [Finding("factor", sentence, ranks, abs(ratio - 1))], ratio
    if narrow := too_narrow(value, target, expected.workload.config.dtype):
        return [Finding("cause", f"{name} is as if {narrow}; for example {tokens[0].sentence}", ranks)], None
    if words := mistake([place for place in places if place[1] in ranks], spare):
        sentence = f"{name} of ranks {list(ranks)} alone is as if {words}; for example {tokens[0].sentence}"
        return [Finding("cause", sentence, ranks)], None
    return tokens, None


def _wrong_tokens(name: str, place: Place, actual_TD: Tensor, target: Target, kept_TK: Tensor) -> list[Finding]:
    findings = []
    for t, row_D in enumerate(actual_TD):
        worst = compare(row_D, target.expected[t], target.allowed[t])
        if not worst.holds:
            of = f" of microbatch {place[0]}" if place[0] else ""
            kind, what = ("zero", "zero") if not bool(row_D.any()) else ("outside", str(worst))
            sentence = f"{name} of rank {place[1]} token {t}{of}{_kept_words(kept_TK[t])} is {what}"
            findings.append(Finding(kind, sentence, (place[1],), worst.size))
    return findings


def _kept_words(kept_K: Tensor) -> str:
    """Say what a token has lost; nothing where it kept everything."""
    if bool(kept_K.all()):
        return ""
    if not bool(kept_K.any()):
        return ", which lost all its slots,"
    return f", which kept {int(kept_K.sum())} of {len(kept_K)} slots,"


def explain_parameter(
    expected: LayerExpected, rank: int, key: ParameterKey, shard: Shard, actual: Tensor, names: Mapping[str, float]
) -> Finding:
    """Say why one rank's finished gradient of one parameter is wrong."""
    stage = next(at for at, ranks in enumerate(expected.stages) if rank in ranks)
    target = Target(*(shard_of(each, shard) for each in expected.parameter(stage, key)))
    worst = compare(actual, *target)
    who = f"the gradient of {part_name(key, shard)} on rank {rank}"
    example = f"for example {worst}"
    spare = target.allowed.max().expand_as(target.allowed)

    def matches(result: LayerGradients) -> bool:
        return within(actual, shard_of(result.parameters[key], shard) / expected.divisor, spare)

    if expected.idle(stage, key):
        return Finding("leftover", f"{who} is {worst}, and no token reached the expert", (rank,), worst.size)
    if not bool(actual.any()):
        return Finding("zero", f"{who} is zero", (rank,), worst.size)
    ratio = factor(actual, *target, names)
    if ratio is not None:
        return Finding("factor", f"{who} is {ratio_words(ratio, names)}", (rank,), abs(ratio - 1))
    for words, places in other_sums(expected.workload, rank):
        if matches(expected.solve(places)):
            return Finding("sum", f"{who}: {words}; {example}", (rank,), worst.size)
    everything = backward_places_of(expected.workload, expected.stages[stage])
    for words, guess in _guesses(expected, backward=True):
        if matches(guess(everything)):
            return Finding("cause", f"{who} is as if {words}; {example}", (rank,), worst.size)
    for other, result in expected.solve(everything, mixed).parameters.items():
        cut = None if shard is not None and result.shape[shard[0]] % shard[2] else shard_of(result, shard)
        if other != key and cut is not None and within(actual, cut / expected.divisor, spare):
            return Finding("other", f"{who} is that of {part_name(other, None)}; {example}", (rank,), worst.size)
    return Finding("outside", f"{who} is {worst}", (rank,), worst.size)


def part_name(key: ParameterKey, shard: Shard) -> str:
    """Name a parameter, or the part of it that is held, in words."""
    name, number = key
    part = f" (part {shard[1]} of {shard[2]})" if shard and shard[2] > 1 else ""
    if number is None:
        return f"{name}{part}"
    whose = "shared expert" if name.startswith("shared_") else "expert"
    return f"{name.removeprefix('shared_')} of {whose} {number}{part}"
