"""Views of y or dx of all ranks together with the oracle's values, by row and by block of an expert.

y and dx have the same structure: the columns of expert e in token t's row hold weight * gain(e) * unit, where the unit
is the token's own row (for y) or its upstream gradient (for dx), and zero where the token is not routed to e. So a
wrong block shows what happened to one (token, expert), whatever happened to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_conformance.judging.compare.tensors import wrong
from moe_conformance.judging.observed.run import Reading

Ranks = Sequence[Tensor]  # a (T, D) tensor of every rank


@dataclass(frozen=True)
class WrongRow:
    """A row with wrong elements, and the experts whose blocks they are in."""

    microbatch: int
    rank: int
    token: int
    experts: tuple[int, ...]  # E stands for the columns left over, which belong to no expert

    def without(self, expert: int) -> WrongRow:
        """Return the row without the block of an expert, once that block is explained."""
        others = tuple(e for e in self.experts if e != expert)
        return WrongRow(self.microbatch, self.rank, self.token, others)


@dataclass(frozen=True)
class Sheets:
    """y or dx by microbatch and rank: actual values, expected values and units, float64 except `actual`."""

    reading: Reading
    name: str  # "y" or "dx"
    noun: str  # the name of an expert's contribution: "answer" or "gradient"
    unit: str  # the name of the unit: "row" or "upstream gradient"
    units: Mapping[int, Ranks]
    actual: Mapping[int, Ranks]
    expected: Mapping[int, Ranks]

    @property
    def experts(self) -> int:
        """The number of experts E."""
        return self.reading.outcome.workload.config.experts

    def columns(self, expert: int) -> slice:
        """Return the columns of an expert's block; for the index E, the columns that belong to no expert."""
        hidden = self.reading.outcome.workload.config.hidden
        width = hidden // self.experts
        return slice(expert * width, hidden if expert == self.experts else (expert + 1) * width)

    def sides(self, ranks: Sequence[int], columns: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Return actual and expected elements in the given columns of the given ranks, over all microbatches."""
        places = [(m, rank) for m in self.expected for rank in ranks]
        actual = [self.actual[m][rank][:, columns].double().flatten() for m, rank in places]
        return torch.cat(actual), torch.cat([self.expected[m][rank][:, columns].flatten() for m, rank in places])

    def wrong_rows(self) -> Iterator[WrongRow]:
        """Yield every row that has a wrong element."""
        width = self.columns(0).stop
        for m, ranks in self.expected.items():
            for rank, expected_TD in enumerate(ranks):
                wrong_TD = wrong(self.actual[m][rank], expected_TD)
                for token in wrong_TD.any(1).nonzero().flatten().tolist():
                    at = wrong_TD[token].nonzero().flatten() // width
                    yield WrongRow(m, rank, token, tuple(at.clamp_max(self.experts).unique().tolist()))

    def wrong_microbatches(self) -> set[int]:
        """Return every microbatch that has a wrong element."""
        return {row.microbatch for row in self.wrong_rows()}

    def row_name(self, row: WrongRow) -> str:
        """Return the name of a row, as messages write it."""
        return f"{self.name} of {self.token_name(row.microbatch, row.rank, row.token)}"

    def token_name(self, microbatch: int, rank: int, token: int) -> str:
        """Return the name of a token, as messages write it."""
        of = f" of microbatch {microbatch}" if len(self.expected) > 1 else ""
        return f"rank {rank} token {token}{of}"
