"""Byte-by-byte comparison of the rows that the experts of a run and of an equivalent run receive."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from moe_conformance.judging.comparisons import Comparison, Comparisons, Start, judge
from moe_conformance.judging.findings import Finding
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import WrongDelivery
from moe_conformance.scenarios.outcome import Handed
from moe_conformance.scenarios.tensors import same_bytes
from moe_conformance.workloads.twins import Twin


@judge(WrongDelivery, "dispatch")
def judge_same_deliveries(original: Reading, twin: Twin, other: Reading) -> Comparisons:
    """Decide whether the experts of an equivalent run receive the original's rows, in the same places and order.

    Only rows for an expert are compared, and their weights only where the equivalent run has those of the original.
    Every microbatch of the equivalent run has all tokens of one microbatch of the original.

    Raises:
        WrongDelivery: a row, its experts, its weights or a count differ.
    """
    yield Start(f"run {twin.how}, ")
    for m, ranks in enumerate(twin.origin):
        sources = {int(row[0]) for rows in ranks for row in rows.source_T3}
        weighed = not any(bool(rows.powers_T.any()) for rows in ranks)
        for rank in range(len(ranks)):
            now = other.seen(m, rank).exchange.handed
            was = original.seen(min(sources, default=m), rank).exchange.handed
            whose = f"rank {rank}" + (f" in microbatch {m}" if len(twin.origin) > 1 else "")
            if len(now) != len(was):
                calls = f"are called {len(now)} times instead of {len(was)} in the original run"
                yield Finding("calls", f"the experts of {whose} {calls}", (rank,))
                continue
            for one, before in zip(now, was, strict=True):
                for kind, words in _differences(one, before, weighed):
                    yield Finding(kind, f"{kind} delivered to {whose} {words}", (rank,))
                yield Comparison(rank, pairs=int((one.ids_RJ >= 0).sum()))


def _differences(now: Handed, was: Handed, weighed: bool) -> Iterator[tuple[str, str]]:
    """Yield the name of each difference, and a description of it."""
    if not same_bytes(now.ids_RJ, was.ids_RJ):
        yield "experts of the rows", f"are {_some(now.ids_RJ)} instead of {_some(was.ids_RJ)} in the original run"
        return
    routed_R = (now.ids_RJ >= 0).any(1)
    if not same_bytes(now.rows_RD[routed_R], was.rows_RD[routed_R]):
        changed = (now.rows_RD.double() != was.rows_RD.double()).any(1) & routed_R
        row = int(changed.nonzero()[0]) if bool(changed.any()) else int(routed_R.nonzero()[0])
        yield "rows", f"differ from the original run, first in row {row}"
    for kind, one, before in (
        ("weights", now.weights_RJ if weighed else None, was.weights_RJ if weighed else None),
        ("counts", now.counts_N, was.counts_N),
    ):
        if (one is None) != (before is None):
            yield kind, "are delivered in one of the two runs only"
        elif one is not None and before is not None:
            held = now.ids_RJ >= 0 if kind == "weights" else torch.ones_like(one, dtype=torch.bool)
            if one.shape != before.shape or not same_bytes(one[held], before[held]):
                yield kind, f"are {_some(one)} instead of {_some(before)} in the original run"


def _some(values: Tensor) -> str:
    flat = values.flatten().tolist()
    return f"{flat[:8]}" if len(flat) <= 8 else f"{str(flat[:8])[:-1]}, ...]"
