"""Wire formats: rows that travel in eight bits, each block of columns with a scale.

A format is the list of its numbers. A row is cut into blocks of b columns, the last maybe shorter; a block
is divided by its scale, rounded to the nearest number, and multiplied by its scale where it arrives.

Sources: DeepSeek-V3 section 3.3 (fine-grained quantisation, fp8 dispatch); Micikevicius et al. 2022 (fp8 formats).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from reference.forcing_scores import straight_through


class Format(NamedTuple):
    """Floating point numbers of a sign, some mantissa bits, and exponents from that of the least normal number."""

    name: str
    largest: float
    mantissa_bits: int
    least_exponent: int


E4M3 = Format("e4m3", 448.0, 3, -6)
E5M2 = Format("e5m2", 57344.0, 2, -14)


def numbers(fmt: Format) -> Tensor:
    """List the numbers of a format from 0 to its largest, ascending, (numbers,).

    Every second one, from 0 on, has an even mantissa.

    >>> len(numbers(E4M3)), numbers(E4M3)[[1, 8, -2, -1]].tolist() == [2**-9, 2**-6, 416.0, 448.0]
    (127, True)
    """
    steps = 2**fmt.mantissa_bits  # from one power of two to the next
    made, exponent = [step / steps * 2.0**fmt.least_exponent for step in range(steps)], fmt.least_exponent
    while made[-1] < fmt.largest:
        made += [(1 + step / steps) * 2.0**exponent for step in range(steps)]
        exponent += 1
    return torch.tensor([number for number in made if number <= fmt.largest], dtype=torch.float64)


def scales(x_RD: Tensor, block: int, fmt: Format, *, power_of_two: bool = False, floor: float = 1e-4) -> Tensor:
    """Scale every block so that its largest element becomes the format's largest number, (R, D) -> (R, blocks).

    Rule: s = max(amax, floor) / L, or the smallest power of two that is not less. One allowed way of many.

    Degenerate: a block of zeros has the scale of the floor.

    Raises:
        ValueError: an element that is not finite, a block < 1, a floor outside of (0, 1e-4].

    Decides: EXCH-30. Source: DeepSeek-V3 section 3.3.2.

    >>> x = torch.tensor([[448.0, -896.0, 0.0], [0.0, 0.0, -45.0]])
    >>> scales(x, 2, E4M3, power_of_two=True).tolist() == [[2.0, 2**-22], [2**-22, 0.125]]
    True
    """
    if not bool(x_RD.isfinite().all()) or not 0 < floor <= 1e-4:
        raise ValueError(f"floor {floor}, or an element that is not finite: no scale keeps to its bounds")
    s_RB = block_maxima(x_RD, block).clamp(min=floor) / fmt.largest  # (R, blocks)
    if power_of_two:
        mantissa_RB, exponent_RB = torch.frexp(s_RB)  # s = mantissa 2^exponent, mantissa in [1/2, 1)
        s_RB = torch.where(mantissa_RB == 0.5, s_RB, torch.ldexp(torch.ones_like(s_RB), exponent_RB))
    return s_RB


def quantise(x_RD: Tensor, scales_RB: Tensor, block: int, fmt: Format) -> Tensor:
    """Divide by the scale of the block and round to the format, (R, D), (R, blocks) -> (R, D).

    Rule: the nearest number, of two that are as near the one of even mantissa. Beyond the largest, that.

    Raises:
        ValueError: a scale that is not positive and finite, an element that is not finite, shapes.

    Decides: EXCH-30. Source: Micikevicius et al. 2022.

    >>> quantise(torch.tensor([[17.0, -19.0, 9.0, 1e9]]), torch.tensor([[1.0, 0.5]]), 2, E4M3).tolist()
    [[16.0, -20.0, 18.0, 448.0]]
    """
    s_RD = spread(scales_RB, block, x_RD.shape[1])  # (R, D)
    if s_RD.shape != x_RD.shape or not bool((x_RD.isfinite() & s_RD.isfinite() & (s_RD > 0)).all()):
        raise ValueError(f"scales {tuple(scales_RB.shape)} of rows {tuple(x_RD.shape)}: need finite rows, scales > 0")
    grid = numbers(fmt)
    z_RD = (x_RD.double() / s_RD).abs().clamp(max=fmt.largest).contiguous()  # (R, D)
    above_RD = torch.searchsorted(grid, z_RD)  # (R, D); the place of the first number that is not below
    below_RD = (above_RD - 1).clamp(min=0)  # (R, D)
    up_RD, down_RD = grid[above_RD] - z_RD, z_RD - grid[below_RD]  # (R, D)
    go_up_RD = (up_RD < down_RD) | ((up_RD == down_RD) & (above_RD % 2 == 0))  # (R, D)
    return torch.where(go_up_RD, grid[above_RD], grid[below_RD]).copysign(x_RD.double())  # (R, D)


def dequantise(q_RD: Tensor, scales_RB: Tensor, block: int) -> Tensor:
    """Multiply by the scale of the block, (R, D), (R, blocks) -> (R, D).

    Decides: EXCH-30. Source: DeepSeek-V3 section 3.3.2.

    >>> dequantise(torch.tensor([[16.0, -20.0, 18.0]]), torch.tensor([[1.0, 0.5]]), 2).tolist()
    [[16.0, -20.0, 9.0]]
    """
    return q_RD.double() * spread(scales_RB, block, q_RD.shape[1])  # (R, D)


def sent(x_RD: Tensor, block: int, fmt: Format, *, power_of_two: bool = False) -> Tensor:
    """Send rows through a format, (R, D) -> (R, D): there and back, with the gradient of the identity.

    Decides: EXCH-30. Source: Bengio et al. 2013 (straight-through estimator).

    >>> x = torch.tensor([[17.0, 448.0]], requires_grad=True)
    >>> v = sent(x, 2, E4M3)
    >>> v.tolist(), torch.autograd.grad((v**2).sum(), x)[0].tolist()
    ([[16.0, 448.0]], [[32.0, 896.0]])
    """
    s_RB = scales(x_RD.detach(), block, fmt, power_of_two=power_of_two)  # (R, blocks)
    v_RD = dequantise(quantise(x_RD.detach(), s_RB, block, fmt), s_RB, block)  # (R, D)
    return straight_through(x_RD, v_RD)  # (R, D)


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
