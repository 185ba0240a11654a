"""Judge of combine where rows have fewer bits than weights: one rounding of the result, or what is claimed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from moe_conformance.judging.compare.bounds import unit_roundoff
from moe_conformance.judging.comparisons import Comparison, Comparisons, Note, judge
from moe_conformance.judging.findings import count
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import WrongForm, WrongOutput
from moe_conformance.reference.exchange.rounded_sums import Way, ways
from moe_conformance.workloads.records.workload import Batch


class _At(NamedTuple):
    """The output of a rank for a microbatch, and what may be added up there, by way."""

    m: int
    rank: int
    y_TD: Tensor
    ways: Sequence[Way]


@judge(WrongOutput, "combine")
def judge_rounded_sums(reading: Reading) -> Comparisons:
    """Decide whether y is rounded as the backend claims: `Claims.combine_weights` and `Claims.combine_sums`.

    The same is rounded in all rows of a run. With sums in float32, y is their sum within the error of float32, rounded
    once; without that claim each addition may be rounded to the dtype of the rows.

    Raises:
        WrongForm: y is missing, or has another shape.
        WrongOutput: an element is none that the claims allow.
    """
    claims, run, K = reading.claims, list(_run(reading)), reading.outcome.workload.config.top_k
    legal = [n for n, way in enumerate(run[0].ways) if not way.weights or claims.combine_weights == "rows"]
    once = claims.combine_sums == "float32"
    wrong = {n: [~_within(at.y_TD, at.ways[n], K, once=once) for at in run] for n in legal}
    best = min(legal, key=lambda n: sum(int(wrong_TD.sum()) for wrong_TD in wrong[n]))
    for at, wrong_TD in zip(run, wrong[best], strict=True):
        yield Comparison(at.rank, _words(at, at.ways[best], wrong_TD), elements=at.y_TD.numel())
    yield Note(lambda: _assumed(reading) + _cause(run, K, legal))


def _run(reading: Reading) -> Iterator[_At]:
    for m, ranks in enumerate(reading.batches):
        for rank, batch in enumerate(ranks):
            y = reading.seen(m, rank).y
            if y is None or y.shape != batch.x_TD.shape:
                found = "None" if y is None else f"of the shape {tuple(y.shape)}"
                raise WrongForm("combine", f"y of rank {rank} is {found}", ranks=(rank,))
            owners_TK = _owners(reading, rank, batch)
            yield _At(m, rank, y, ways(batch.x_TD, owners_TK, batch.weights_TK, weights=True))


def _owners(reading: Reading, rank: int, batch: Batch) -> Tensor:
    """Return the place in its ep group of the rank that holds the expert of each slot, -1 for an empty slot."""
    group = next(group for group in reading.outcome.workload.layout.groups()["ep"] if rank in group)
    of_expert = {e: at for at, member in enumerate(group) for e in reading.ranks[member].local_experts}
    owners = [[of_expert.get(e, -1) for e in ids] for ids in batch.ids_TK.tolist()]
    return torch.tensor(owners, dtype=torch.int64).reshape(batch.ids_TK.shape)


def _within(y_TD: Tensor, way: Way, K: int, *, once: bool) -> Tensor:
    """Return whether y lies between the roundings of the least and of the most that the sum of K may be."""
    error_TD = 2 * K * unit_roundoff(torch.float32) * way.size_TD
    if not once:
        error_TD = error_TD + (K - 1) * unit_roundoff(y_TD.dtype) * way.size_TD
    low_TD, high_TD = ((way.sum_TD + sign * error_TD).to(y_TD.dtype) for sign in (-1, 1))
    return (low_TD <= y_TD) & (y_TD <= high_TD)


def _words(at: _At, way: Way, wrong_TD: Tensor) -> str:
    if not bool(wrong_TD.any()):
        return ""
    t, column = wrong_TD.nonzero()[0].tolist()
    values = f"{float(at.y_TD[t, column]):.9g} instead of {float(way.sum_TD[t, column]):.9g}, rounded once"
    of = f"; {count(int(wrong_TD.sum()), 'element')} of {wrong_TD.numel()} are wrong"
    return f"y of rank {at.rank} token {t} in column {column} is {values}{of}"


def _assumed(reading: Reading) -> str:
    """Return what the claims allow to be rounded, in words."""
    claims, dtype = reading.claims, reading.outcome.workload.config.dtype
    weights = "weights stay float32" if claims.combine_weights == "float32" else f"weights may be rounded to {dtype}"
    sums = "sums are in float32" if claims.combine_sums == "float32" else f"every addition may be rounded to {dtype}"
    words = f"combine_weights = {claims.combine_weights!r} and combine_sums = {claims.combine_sums!r}"
    return f"; assumed, as the backend claims {words}: {weights}, products may be rounded to {dtype}, {sums}"


def _cause(run: Sequence[_At], K: int, legal: Sequence[int]) -> str:
    """Return what was rounded in a run that would be right with other claims, "" if there is none."""

    def fits(n: int, *, once: bool) -> bool:
        return all(bool(_within(at.y_TD, at.ways[n], K, once=once).all()) for at in run)

    everything = range(len(run[0].ways))
    if any(fits(n, once=True) for n in everything if run[0].ways[n].weights):
        return f"; likely cause: weights were rounded to {run[0].y_TD.dtype} before they were multiplied"
    if any(fits(n, once=False) for n in legal):
        return f"; likely cause: partial sums were rounded to {run[0].y_TD.dtype}"
    return ""
