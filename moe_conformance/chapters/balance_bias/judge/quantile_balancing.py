"""Judge of balance biases that are set to quantiles of the step's scores. V valid tokens, K slots, E experts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.chapters.balance_bias.judge.balancing_steps import History, history_of
from moe_conformance.judging.comparisons import Comparison, Comparisons, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.claims import claims_of
from moe_conformance.judging.verdict import NotOffered, WrongBias, WrongForm
from moe_conformance.reference.balance_bias.quantiles import outside, quantile_bounds
from moe_conformance.reference.routing.routes import scores
from moe_conformance.scenarios.outcome import Outcome

_ALLOWED = 64 * 2.0**-24  # allowed error, times one plus the largest bias: scores and biases are float32


@dataclass(frozen=True)
class _How:
    """Which tokens quantiles are taken of. The defaults are right, other values are mistakes."""

    alone: bool = False  # the tokens of one rank only
    padding: bool = False  # padding tokens are included
    last: bool = False  # the last microbatch only


_MISTAKES = {
    "every rank takes quantiles of its own tokens": _How(alone=True),
    "padding tokens are counted": _How(padding=True),
    "the last microbatch alone is counted": _How(last=True),
}


@judge(WrongBias, "finish")
def judge_quantiles(outcome: Outcome) -> Comparisons:
    """Decide whether every bias after an update is between the quantiles of its step, up to a constant.

    Raises:
        NotOffered: the backend estimates quantiles.
        WrongBias: a bias is not between the quantiles.
        WrongForm: a bias has another shape, or is not finite.
    """
    if claims_of(outcome.ranks).balance_quantiles == "estimated":
        raise NotOffered("the backend claims balance_quantiles = 'estimated'")
    history = history_of(outcome)
    for ranks in history.routers():
        for rank in ranks:
            for layer in history.layers:
                yield from _of_router(history, ranks, rank, layer)


def _of_router(history: History, ranks: Sequence[int], rank: int, layer: int) -> Comparisons:
    """Yield comparisons of all updates of one router on one rank."""
    for call in history.steps:
        (update,) = history.seen(call, "updates")[rank]
        bias_E: Tensor = update["now"][layer]
        if bias_E.shape != (history.workload.config.experts,) or not bool(bias_E.isfinite().all()):
            raise WrongForm("finish", f"rank {rank}: the balance bias is {bias_E.tolist()}", ranks=(rank,))
        off = _off(history, ranks, rank, (call, layer), _How())
        allowed = _ALLOWED * (1 + float(bias_E.abs().max()))
        if off <= allowed:
            yield Comparison(rank, elements=len(bias_E), worst=off / allowed)
            continue
        said = f"rank {rank}: after step {call} a balance bias of router {layer} is {off:.3g} outside the"
        said += f" two quantiles of the step's scores between which all loads are equal; allowed {allowed:.3g}"
        found = [words for words, how in _MISTAKES.items() if _off(history, ranks, rank, (call, layer), how) <= allowed]
        cause = f"; likely cause: {found[0]}" if found else ""
        yield Comparison(rank, Finding("quantile", said + cause, (rank,), off))


def _off(history: History, ranks: Sequence[int], rank: int, at: tuple[int, int], how: _How) -> float:
    """Return how far the bias after an update is outside its bounds, with the sign that the oracle uses."""
    call, layer = at
    bias_E = -history.bias(call, rank, layer).double()
    bounds = []
    for parts, padding in _parts(history, (rank,) if how.alone else ranks, at, how):
        bounds.append(quantile_bounds(parts, bias_E, top_k=history.workload.config.top_k, padding=padding))
    low_E, high_E = (torch.stack(sides).mean(0) for sides in zip(*bounds, strict=True))
    return outside(-history.seen(call, "updates")[rank][0]["now"][layer].double(), low_E, high_E)


def _parts(
    history: History, ranks: Sequence[int], at: tuple[int, int], how: _How
) -> Iterator[tuple[list[Tensor], list[Tensor | None]]]:
    """Yield the scores (T, E) and padding masks that quantiles are taken of: of a whole step, or of each part."""
    call, layer = at
    places = [place for place, batch in enumerate(history.batches(call, ranks[0])) if batch.mode == "training"]
    if how.last:
        places = places[-1:]
    pairs = [[(place, rank) for place in places for rank in ranks]]
    if claims_of(history.outcome.ranks).balance_quantiles == "parts":
        size = history.workload.layout.tp * history.workload.layout.cp
        groups = [ranks[first : first + size] for first in range(0, len(ranks), size)]
        pairs = []
        for place in places:
            for group in groups:
                pairs.append([(place, rank) for rank in group])
        pairs = pairs or [[]]
    for part in pairs:
        found = [_scores(history, call, place, layer, rank) for place, rank in part]
        masks = [None if how.padding else history.batches(call, rank)[place].padding_T for place, rank in part]
        yield found, masks


def _scores(history: History, call: int, place: int, layer: int, rank: int) -> Tensor:
    return scores(history.logits(call, place, layer, rank), history.workload.config.routing.score)
