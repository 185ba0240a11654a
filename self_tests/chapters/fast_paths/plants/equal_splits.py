"""Equal splits with padding in the wrong place, with a part in gradients, or of another size on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.backends.native.exchange.dispatchers import Plan
from moe_conformance.backends.native.exchange.equal_splits import EqualSplits, EqualSplitsExchange
from self_tests.planted_bugs.plant import Expectation, planted


@planted(
    Expectation("FAST-01", "equal-splits", "dispatch", "the rows padded", "in splits of"),
    real="saforem2/torchtitan pull request 11: its automated review proposed (0, 0, n, 0)",
)
class PaddedInFront(EqualSplits):
    """Zeros stand before the rows of a piece."""

    def pad(self, rows_RD: Tensor, pieces: Sequence[int], size: int) -> Tensor:
        """Pad the head."""
        split = rows_RD.split(list(pieces))
        return torch.cat([F.pad(piece_nD, (0, 0, size - len(piece_nD), 0)) for piece_nD in split])


@planted(Expectation("FAST-02", "equal-splits", "dispatch", "the rows cut back", "in splits of"))
class LastRowsKept(EqualSplits):
    """The last rows of a split are kept in place of the first."""

    def compact(self, rows_PD: Tensor, pieces: Sequence[int], size: int) -> Tensor:
        """Cut the head."""
        return torch.cat([rows_PD[(w + 1) * size - n : (w + 1) * size] for w, n in enumerate(pieces)])


@planted(Expectation("FAST-03", "equal-splits", "gradient", "the gradient of the rows to pad", "nan"))
class PaddingByMask(EqualSplits):
    """Padding repeats a row and is multiplied by zero, so that a gradient of NaN at padding reaches the row."""

    def pad(self, rows_RD: Tensor, pieces: Sequence[int], size: int) -> Tensor:
        """Multiply."""
        if not len(rows_RD):
            return super().pad(rows_RD, pieces, size)
        starts_P = torch.tensor(pieces).cumsum(0).sub(torch.tensor(pieces)).repeat_interleave(size)
        place_P = torch.arange(size).repeat(len(pieces))
        real_P = place_P < torch.tensor(pieces).repeat_interleave(size)
        at_P = (starts_P + place_P).clamp_max(len(rows_RD) - 1)
        return rows_RD[at_P] * real_P[:, None]


@planted(
    Expectation("FAST-04", "equal-splits", "dispatch", "every rank takes the largest of its own pieces"),
    real="saforem2/torchtitan pull request 11: the size has to be a maximum over the group",
)
class OwnLargest(EqualSplits):
    """Every rank pads to the largest of its own pieces."""

    def size(self, pieces: Sequence[int]) -> int:
        """Ask nobody."""
        return max(pieces, default=0)


@planted(Expectation("FAST-04", "equal-splits-even", "run", "has the splits", "instead of equal ones"))
class BackUnpadded(EqualSplitsExchange):
    """Only dispatch is padded; combine sends uneven splits."""

    def _send_back(self, rows: Tensor, plan: Plan) -> Tensor:
        return super(EqualSplitsExchange, self)._send_back(rows, plan)


@planted(Expectation("FAST-05", "equal-splits-even", "dispatch", "are exchanged", "was not delivered", "rows of zeros"))
class CutBackBySent(EqualSplitsExchange):
    """Received splits are cut back by the rows that were sent."""

    def _exchanged(self, rows: Tensor, sent_C: Sequence[int], received_C: Sequence[int], size: int) -> Tensor:
        kept = super()._exchanged(rows, sent_C, sent_C, size)
        missing = sum(received_C) - len(kept)
        return F.pad(kept, (0, 0, 0, missing)) if missing > 0 else kept[: sum(received_C)]


@planted(Expectation("FAST-03", "equal-splits", "gradient", "the gradient of the rows to pad"))
class GradientsFromTheEnd(EqualSplits):
    """The gradients of rows come back in reverse order."""

    def pad(self, rows_RD: Tensor, pieces: Sequence[int], size: int) -> Tensor:
        """Take the values of the rows, and the gradients of their mirror images."""
        mirrored_RD = rows_RD.flip(0)
        return super().pad(rows_RD.detach() + mirrored_RD - mirrored_RD.detach(), pieces, size)
