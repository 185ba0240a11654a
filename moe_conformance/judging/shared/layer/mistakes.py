"""Mistakes of a whole layer: runs of the oracle in which its parts are combined wrongly, in words.

For example: shared experts left out or added tp times, the gate left out, dropped slots kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from moe_conformance.judging.explain.bounded import Candidate
from moe_conformance.judging.explain.bounded_gradients import Oracle
from moe_conformance.judging.explain.bounded_tokens import Candidates
from moe_conformance.judging.observed.scopes import LOCAL_PART, Place, is_held
from moe_conformance.judging.shared.layer.expected import LayerExpected
from moe_conformance.reference.routing.routes import Routed
from moe_conformance.reference.shared_experts.whole_layer import Drop, LayerGradients, Mix

NO_DROP = "no slot was dropped"
_MOST_NAMES = 2  # of which a message says "A or B"


def candidates_for(expected: LayerExpected, name: str) -> Candidates:
    """Return the function that yields what mistakes give for "y" or "dx"."""

    def candidates(places: Sequence[Place]) -> Iterator[Candidate]:
        for words, run in _other_runs(expected, places, backward=name == "dx"):
            yield words, run.y_TD if name == "y" else run.dx_TD

    return candidates


def gradients_of(expected: LayerExpected) -> Oracle:
    """Return the `Oracle` of parameter gradients over some tokens, and with mistakes."""
    return Oracle(
        expected.workload,
        expected.divisor,
        lambda places: expected.solve(places).parameters,
        lambda places: ((words, run.parameters) for words, run in _other_runs(expected, places, backward=True)),
    )


def _other_runs(
    expected: LayerExpected, places: Sequence[Place], backward: bool
) -> Iterator[tuple[str, LayerGradients]]:
    """Yield runs of the oracle on the tokens of some places, with one mistake each."""
    if backward:
        for words, mix in detached(expected):
            yield words, expected.solve(places, mix=mix)
    for words, mix in mixes(expected):
        yield words, expected.solve(places, mix=mix)
    for words, drop in undropped(expected):
        if backward or words == NO_DROP:
            yield words, expected.solve(places, drop=drop)
    if expected.workload.layout.ep > 1:
        yield LOCAL_PART, expected.solve(places, drop=_local_part(expected, places))


def _local_part(expected: LayerExpected, places: Sequence[Place]) -> Drop:
    """Return a drop that also removes the slots of experts on other ranks."""
    workload = expected.workload
    local_TK = torch.cat(
        [is_held(workload.layout, place[1], expected.ids(place), workload.config.experts) for place in places]
    )
    rule = expected.rule.after_drop(workload.config)
    return lambda ids, w, kept: _emptied(rule(ids, w, kept), local_TK)


def _emptied(routed: Routed, local_TK: torch.Tensor) -> Routed:
    return Routed(torch.where(local_TK, routed.ids_TK, -1), torch.where(local_TK, routed.weights_TK, 0.0))


def mixes(expected: LayerExpected) -> Iterator[tuple[str, Mix]]:
    """Yield wrong combinations of a layer's parts, each in words."""
    workload = expected.workload
    if not workload.config.shared.ffn:
        return
    if workload.config.shared.bias:
        yield from _of_biases(expected)
    yield "the shared experts were left out", lambda r, h, a, b: r
    yield "the routed experts were left out", lambda r, h, a, b: a * h
    if workload.config.shared.gate:
        yield "the gate was left out", lambda r, h, a, b: r + h
        yield "the gate multiplied the output of the routed experts too", lambda r, h, a, b: a * (r + h)
        yield (
            "the gate multiplied the output of the routed experts instead of the shared ones",
            lambda r, h, a, b: a * r + h,
        )
        yield "the sigmoid of the gate was left out", lambda r, h, a, b: r + a.logit() * h
        yield "the gate was applied twice", lambda r, h, a, b: r + a * a * h
    for words, times in _factors(expected):
        yield f"the output of the shared experts was {words}", times_of_shared(times)


def detached(expected: LayerExpected) -> Iterator[tuple[str, Mix]]:
    """Yield the parts that a backward may leave out, each in words."""
    if not expected.workload.config.shared.ffn:
        return
    if expected.workload.config.shared.gate:
        yield "no gradient passed through the gate", lambda r, h, a, b: r + a.detach() * h
    yield "no gradient passed through the shared experts", lambda r, h, a, b: r + (a * h).detach()
    yield "no gradient passed through the routed experts", lambda r, h, a, b: r.detach() + a * h


def undropped(expected: LayerExpected) -> Iterator[tuple[str, Drop]]:
    """Yield what a backward may do with slots that the forward dropped, each in words."""
    if expected.workload.config.capacity.factor is None:
        return
    yield NO_DROP, lambda ids, w, kept: Routed(ids, w)
    yield (
        "dropped slots passed gradients to the router",
        lambda ids, w, kept: Routed(ids, torch.where(kept, w, w - w.detach())),
    )


def times_of_shared(times: float) -> Mix:
    """Return the mix in which the output of the shared experts is multiplied by a number."""
    return lambda r, h, a, b: r + times * a * h


def _of_biases(expected: LayerExpected) -> Iterator[tuple[str, Mix]]:
    """Yield mistakes with the output biases of shared experts, each in words."""
    config = expected.workload.config
    several = len(config.shared.ffn) > 1
    of = "the biases of the shared experts" if several else "the bias of the shared expert"
    whose = f"{of} {'were' if several else 'was'}"
    yield f"{whose} left out", lambda r, h, a, b: r + a * (h - b.sum(0))
    for j in range(len(config.shared.ffn)) if several else ():
        yield f"only the bias of shared expert {j} was added", _only_bias(j)
    if config.shared.gate:
        yield f"{whose} added after the gate", lambda r, h, a, b: r + a * (h - b.sum(0)) + b.sum(0)
        yield f"the gate multiplied {of} alone", lambda r, h, a, b: r + h - (1 - a) * b.sum(0)
        yield f"the gate multiplied {of} twice", lambda r, h, a, b: r + a * (h - (1 - a) * b.sum(0))
    for words, times in _factors(expected):
        yield f"{whose} {words}", _times_of_bias(times)


def _only_bias(j: int) -> Mix:
    return lambda r, h, a, b: r + a * (h - b.sum(0) + b[j])


def _times_of_bias(times: float) -> Mix:
    return lambda r, h, a, b: r + a * (h + (times - 1) * b.sum(0))


def _factors(expected: LayerExpected) -> Iterator[tuple[str, float]]:
    """Yield the factors by which a shared part may be off, each in words."""
    config, layout = expected.workload.config, expected.workload.layout
    sizes: dict[float, list[str]] = {}
    for name in ("tp", "ep", "etp", "dp", "cp", "edp", "world"):
        if (size := layout.sizes()[name]) > 1:
            sizes.setdefault(float(size), []).append(name)
    sizes.setdefault(2.0, [])
    sizes.setdefault(float(config.top_k), []).append("K")
    for times, names in sizes.items():
        yield f"added {times:g} times{_named(names)}", times
    for times, names in sizes.items():
        yield f"divided by {times:g}{_named(names)}", 1 / times
    if config.routing.scale != 1:
        yield f"multiplied by the routing scale {config.routing.scale:g}", config.routing.scale
        yield f"divided by the routing scale {config.routing.scale:g}", 1 / config.routing.scale


def _named(names: Sequence[str]) -> str:
    """Return the size that a factor is: tp, over which shared experts are added up, or one of two; of more none."""
    if "tp" in names:
        return " (tp)"
    return f" ({' or '.join(names)})" if 0 < len(names) <= _MOST_NAMES else ""
