"""Wire formats: rows that travel in eight bits, each block of columns with a scale.

A format is the list of its numbers. A row is cut into blocks of b columns, the last maybe shorter; a block
is divided by its scale, rounded to the nearest number, and multiplied by its scale where it arrives.

Sources: DeepSeek-V3 section 3.3 (fine-grained quantisation, fp8 dispatch); Micikevicius et al. 2022 (fp8 formats).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Format(NamedTuple):
    """Floating point numbers of a sign, some mantissa bits, and exponents from that of the least normal number."""

    name: str
    largest: float
    mantissa_bits: int
    least_exponent: int


E4M3 = Format("e4m3", 448.0, 3, -6)
E5M2 = Format("e5m2", 57344.0, 2, -14)


def block_maxima(x_RD: Tensor, block: int) -> Tensor:
    """Compute the largest |x| of every block, (R, D) -> (R, blocks); NaN or inf where the block holds one.

    >>> block_maxima(torch.tensor([[1.0, -3.0, 2.0]]), 2).tolist()
    [[3.0, 2.0]]
    """
    if block < 1:
        raise ValueError(f"a block of {block} columns is none")
    maxima = [part.abs().amax(dim=1) for part in x_RD.double().split(block, dim=1) if part.shape[1]]
    return torch.stack(maxima, dim=1) if maxima else x_RD.new_zeros(len(x_RD), 0).double()  # (R, blocks)


def spread(scales_RB: Tensor, block: int, hidden: int) -> Tensor:
    """Give every column the scale of its block, (R, blocks) -> (R, D).

    >>> spread(torch.tensor([[5.0, 7.0]]), 2, 3).tolist()
    [[5.0, 5.0, 7.0]]
    """
    if block < 1 or scales_RB.shape[1] != -(-hidden // block):
        raise ValueError(f"{scales_RB.shape[1]} scales for {hidden} columns in blocks of {block}")
    return scales_RB.double().repeat_interleave(block, dim=1)[:, :hidden]  # (R, D)
