"""Gradients at the rows that were handed over, laid beside what they should be, exactly."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.judging.exact import wrong
from moe_conformance.judging.expected import blocks
from moe_conformance.judging.reading import Match, Reading
from moe_conformance.scenarios.outcome import Handed
from moe_conformance.workloads import tags


@dataclass(frozen=True)
class Compared:
    """The gradient at one row, the match that it belongs to, and what it should be."""

    match: Match
    actual_D: Tensor
    expected_D: Tensor
    wrong: bool


def compare_out_gradients(reading: Reading) -> list[Compared]:
    """Compare the gradient at the output for every delivered pair, where there is one."""

    def one(match: Match) -> Tensor:
        return _upstream(reading, match, weighted=reading.applied_to(match.entry) == "combine")

    return _compared(reading, reading.matching.matches, one, lambda handed: handed.out_grad_RD)


def compare_rows_gradients(reading: Reading) -> list[Compared]:
    """Compare the gradient at every row handed over, where there is one and the row is for delivered pairs alone."""
    config = reading.outcome.workload.config
    block_ED = blocks(config.experts, config.hidden)
    by_row: dict[tuple[int, int, int, int], list[Match]] = defaultdict(list)
    for match in reading.matching.matches:
        by_row[_row(match)].append(match)
    entries = Counter((e.rank, e.microbatch, e.call, e.row) for e in reading.entries)

    def whole(match: Match) -> Tensor:
        weighted = reading.applied_to(match.entry) != "input"
        total_D = torch.zeros(config.hidden, dtype=torch.float64)
        for at in by_row[_row(match)]:
            factor = tags.gain(at.entry.expert) * reading.parts[at.entry.rank]
            total_D += factor * block_ED[at.entry.expert] * _upstream(reading, at, weighted)
        return total_D

    complete = [matches[0] for row, matches in by_row.items() if len(matches) == entries[row]]
    return _compared(reading, complete, whole, lambda handed: handed.rows_grad_RD)


def _compared(
    reading: Reading,
    matches: Sequence[Match],
    expect: Callable[[Match], Tensor],
    gradient: Callable[[Handed], Tensor | None],
) -> list[Compared]:
    """Compare all rows at once; matches whose gradient is absent or not asked for are left out."""
    present = [
        (match, grad_RD[match.entry.row])
        for match in matches
        if reading.goes_backward(match.entry.microbatch)
        and (grad_RD := gradient(reading.handed(match.entry))) is not None
    ]
    if not present:
        return []
    actual_ND = torch.stack([row_D for _, row_D in present])
    expected_ND = torch.stack([expect(match) for match, _ in present])
    wrong_N = wrong(actual_ND, expected_ND).any(1).tolist()
    return [
        Compared(match, actual_D, expected_D, bad)
        for (match, _), actual_D, expected_D, bad in zip(present, actual_ND, expected_ND, wrong_N, strict=True)
    ]


def _upstream(reading: Reading, match: Match, weighted: bool) -> Tensor:
    microbatch, pair = match.entry.microbatch, match.pair
    upstream_D = reading.batches[microbatch][pair.source].upstream[pair.token].double()
    return upstream_D * reading.weight(microbatch, pair) if weighted else upstream_D


def _row(match: Match) -> tuple[int, int, int, int]:
    return match.entry.rank, match.entry.microbatch, match.entry.call, match.entry.row
