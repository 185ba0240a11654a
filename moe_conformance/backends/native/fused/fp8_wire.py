"""Rows sent in float8: e4m3 numbers, and a float32 scale for every block of 128 columns of a row.

A row is sent as D + 4 B bytes, its numbers and then its scales. Scales are powers of two, so that dividing by them and
multiplying loses nothing: what is lost is the rounding to e4m3 alone.

R rows, D hidden, B = ceil(D / 128) blocks of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_conformance.contract import Claims

LARGEST = 448.0  # of e4m3
FLOOR = 1e-4  # of the largest element of a block


class Float8Wire:
    """Packs rows into bytes, and unpacks them; no gradient goes through.

    Implements: COST-09, EXCH-30.
    """

    block = 128

    @property
    def claims(self) -> Claims:
        """The format, and how many columns share a scale."""
        return Claims(wire_format="e4m3", wire_block=self.block)

    def pack(self, rows_RD: Tensor) -> Tensor:
        """Return the bytes of every row, uint8 (R, D + 4 B)."""
        wide_RD = rows_RD.float()
        wide_RD = torch.where(wide_RD.isfinite(), wide_RD, torch.nan)  # the cast to e4m3 makes 448 of infinity
        scales_RB = self._scales(wide_RD)
        numbers_RD = self._round(wide_RD / self._spread(scales_RB, rows_RD.shape[1]))
        parts = [(numbers_RD, numbers_RD.shape[1]), (scales_RB, 4 * scales_RB.shape[1])]
        return torch.cat([_seen_as(part, torch.uint8, columns) for part, columns in parts], dim=1)

    def unpack(self, bytes_R: Tensor, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return rows_RD in a dtype, and scales_RB."""
        numbers_RD = _seen_as(bytes_R[:, :hidden], torch.float8_e4m3fn, hidden)
        scales_RB = _seen_as(bytes_R[:, hidden:], torch.float32, -(-hidden // self.block))
        return (numbers_RD.float() * self._spread(scales_RB, hidden)).to(dtype), scales_RB

    def _scales(self, rows_RD: Tensor) -> Tensor:
        """Return the smallest powers of two that scale the blocks of every row below the largest number."""
        R, D = rows_RD.shape
        blocks = -(-D // self.block)
        padded_RD = F.pad(rows_RD, (0, blocks * self.block - D))
        largest_RB = padded_RD.reshape(R, blocks, self.block).abs().amax(2).clamp_min(FLOOR)
        mantissa_RB, exponent_RB = torch.frexp(largest_RB / LARGEST)  # mantissa in [1/2, 1)
        power_RB = torch.ldexp(torch.ones_like(largest_RB), exponent_RB - (mantissa_RB == 0.5).int())
        return torch.where(largest_RB.isfinite(), power_RB, 1.0)  # what is not finite stays so

    def _round(self, scaled_RD: Tensor) -> Tensor:
        return scaled_RD.to(torch.float8_e4m3fn)

    def _spread(self, scales_RB: Tensor, hidden: int) -> Tensor:
        return scales_RB.repeat_interleave(self.block, dim=1)[:, :hidden]


def _seen_as(rows: Tensor, dtype: torch.dtype, columns: int) -> Tensor:
    """Return the bytes of rows as numbers of a dtype; without a row too, whose strides say nothing."""
    return rows.reshape(-1).view(dtype).reshape(len(rows), columns)
