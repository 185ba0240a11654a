"""Exact comparison of the gradients at the rows delivered to experts, one result per row."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.judging.compare.tensors import wrong
from moe_conformance.judging.observed.cached import once
from moe_conformance.judging.observed.probe_expected import blocks
from moe_conformance.judging.observed.run import Match, Reading
from moe_conformance.judging.observed.scopes import Place
from moe_conformance.scenarios.outcome import Handed
from moe_conformance.workloads.records import tags


@dataclass(frozen=True)
class Compared:
    """The comparison of the gradient at one delivered row: row n of `actual_ND` and `expected_ND`."""

    match: Match
    wrong: bool
    n: int
    actual_ND: Tensor
    expected_ND: Tensor

    @property
    def actual_D(self) -> Tensor:
        """The gradient of the row."""
        return self.actual_ND[self.n]

    @property
    def expected_D(self) -> Tensor:
        """The expected gradient of the row."""
        return self.expected_ND[self.n]


def compare_out_gradients(reading: Reading) -> list[Compared]:
    """Compare the gradient at the experts' output for every delivered pair that has one."""

    def expect(matches: Sequence[Match]) -> Tensor:
        return _upstream(reading, matches, [reading.applied_to(match.entry) == "combine" for match in matches])

    return _compared(reading, reading.matching.matches, expect, lambda handed: handed.out_grad_RD)


def compare_rows_gradients(reading: Reading) -> list[Compared]:
    """Compare the gradient at every delivered row that has one and belongs to delivered pairs only."""
    config = reading.outcome.workload.config
    block_ED = blocks(config.experts, config.hidden)
    by_row: dict[tuple[int, int, int, int], list[Match]] = defaultdict(list)
    for match in reading.matching.matches:
        by_row[_row(match)].append(match)
    entries = Counter((e.rank, e.microbatch, e.call, e.row) for e in reading.entries)

    def whole(matches: Sequence[Match]) -> Tensor:
        parts = [(n, at) for n, match in enumerate(matches) for at in by_row[_row(match)]]
        row_S, of_S = torch.tensor([n for n, _ in parts]), [at for _, at in parts]
        expert_S = torch.tensor([at.entry.expert for at in of_S])
        factors = [tags.gain(at.entry.expert) * reading.parts[at.entry.rank] for at in of_S]
        factor_S = torch.tensor(factors, dtype=torch.float64)
        upstream_SD = _upstream(reading, of_S, [reading.applied_to(at.entry) != "input" for at in of_S])
        part_SD = factor_S[:, None] * block_ED[expert_S] * upstream_SD
        return torch.zeros(len(matches), config.hidden, dtype=torch.float64).index_add_(0, row_S, part_SD)

    complete = [matches[0] for row, matches in by_row.items() if len(matches) == entries[row]]
    return _compared(reading, complete, whole, lambda handed: handed.rows_grad_RD)


def _compared(
    reading: Reading,
    matches: Sequence[Match],
    expect: Callable[[Sequence[Match]], Tensor],
    gradient: Callable[[Handed], Tensor | None],
) -> list[Compared]:
    """Compare all rows at once; matches whose gradient is absent or not required are left out."""
    grads, starts, end = list[Tensor](), dict[tuple[int, int, int], int](), 0
    for call, entry in {_row(match)[:3]: match.entry for match in matches}.items():
        if reading.goes_backward(entry.microbatch) and (grad_RD := gradient(reading.handed(entry))) is not None:
            grads.append(grad_RD)
            starts[call], end = end, end + len(grad_RD)
    present = [match for match in matches if _row(match)[:3] in starts]
    if not present:
        return []
    rows = [starts[_row(match)[:3]] + match.entry.row for match in present]
    actual_ND, expected_ND = torch.cat(grads)[rows], expect(present)
    wrong_N = wrong(actual_ND, expected_ND).any(1).tolist()
    return [
        Compared(match, bad, n, actual_ND, expected_ND)
        for n, (match, bad) in enumerate(zip(present, wrong_N, strict=True))
    ]


def _upstream(reading: Reading, matches: Sequence[Match], weighted: Sequence[bool]) -> Tensor:
    """Return the upstream gradients of matches, (N, D), times their weights where `weighted` is True.

    They are scaled as the exchange claims to scale what reaches its experts (`Claims.expert_gradients`).
    """
    upstream_TD, starts = once(reading, _upstream_of_all)
    token_N = torch.tensor([starts[match.entry.microbatch, match.pair.source] + match.pair.token for match in matches])
    weights = [
        reading.weight(match.entry.microbatch, match.pair) if times else 1.0
        for match, times in zip(matches, weighted, strict=True)
    ]
    share = 1 / reading.outcome.workload.layout.ep if reading.claims.expert_gradients == "mean_over_ep" else 1.0
    factor_N = torch.tensor(weights, dtype=torch.float64) * share
    return upstream_TD[token_N] * factor_N[:, None]


def _upstream_of_all(reading: Reading) -> tuple[Tensor, dict[Place, int]]:
    """Return the upstream gradients of all places as one tensor, (all T, D), and the first row of each place."""
    starts, end = dict[Place, int](), 0
    for m, ranks in enumerate(reading.batches):
        for rank, batch in enumerate(ranks):
            starts[m, rank], end = end, end + len(batch.upstream)
    return torch.cat([batch.upstream.double() for ranks in reading.batches for batch in ranks]), starts


def _row(match: Match) -> tuple[int, int, int, int]:
    return match.entry.rank, match.entry.microbatch, match.entry.call, match.entry.row
