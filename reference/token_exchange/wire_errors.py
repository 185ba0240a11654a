"""Wire errors: which scales and values a row may have when it has travelled in eight bits.

Scales are a backend's choice within a factor of two, and so is the way in which it rounds. What is fixed is
how far a value may be from what was sent, and that a scale belongs to its own row and block.

Source: DeepSeek-V3 section 3.3; arithmetic, half a step of the format.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.reference.token_exchange.wire_formats import Format, block_maxima, spread


def scale_bounds(x_RD: Tensor, block: int, fmt: Format) -> tuple[Tensor, Tensor]:
    """Compute the least and the largest allowed scale of every block, (R, D) -> (R, blocks) each.

    Rule: amax / L and 2 max(amax, 1e-4) / L, within 2^-20: the scale that fills the format, above a floor of
    at most 1e-4, or the next power of two. Where a backend delivers values alone, the largest bounds their error.

    Degenerate: a block that holds an inf or NaN has such bounds.

    Decides: EXCH-30. Source: arithmetic.

    >>> from moe_conformance.reference.token_exchange.wire_formats import E4M3
    >>> [bound.tolist() for bound in scale_bounds(torch.tensor([[448.0 * 2**20]]), 1, E4M3)]
    [[[1048575.0]], [[2097154.0]]]
    """
    amax_RB = block_maxima(x_RD, block)  # (R, blocks)
    low_RB = amax_RB / fmt.largest * (1 - 2**-20)
    return low_RB, 2 * amax_RB.clamp(min=1e-4) / fmt.largest * (1 + 2**-20)


def legal_scales(x_RD: Tensor, scales_RB: Tensor, block: int, fmt: Format) -> Tensor:
    """Say of every scale whether it may stand with its row and block, (R, D), (R, blocks) -> bool (R, blocks).

    Rule: it is within `scale_bounds`. A scale of another row or block is not where the largest elements of the
    two differ by more than the factor 2: draw them so.

    Degenerate: a block of zeros may have any finite scale, one with an inf or NaN any scale.

    Raises:
        ValueError: another number of rows or blocks.

    Decides: EXCH-30. Source: DeepSeek-V3 section 3.3.2.

    >>> from moe_conformance.reference.token_exchange.wire_formats import E4M3
    >>> x, s = torch.tensor([[448.0, 4480.0, 0.0]] * 2), torch.tensor([[1.5, 10.0, 9.0], [10.0, 1.5, torch.inf]])
    >>> legal_scales(x, s, 1, E4M3).tolist()
    [[True, True, True], [False, False, False]]
    """
    amax_RB = block_maxima(x_RD, block)  # (R, blocks)
    if scales_RB.shape != amax_RB.shape:
        raise ValueError(f"scales {tuple(scales_RB.shape)} for {tuple(amax_RB.shape)} rows and blocks")
    low_RB, high_RB = scale_bounds(x_RD, block, fmt)
    s_RB = scales_RB.double()  # (R, blocks)
    within_RB = torch.where(amax_RB == 0, s_RB.isfinite(), (low_RB <= s_RB) & (s_RB <= high_RB))
    return within_RB | ~amax_RB.isfinite()  # (R, blocks)


def legal_values(
    x_RD: Tensor, v_RD: Tensor, scales_RB: Tensor, block: int, fmt: Format, *, unit: float = 0.0
) -> Tensor:
    """Say of every value that arrived whether it may be what was sent, (R, D) each -> bool (R, D).

    Args:
        x_RD: what was sent.
        v_RD: what the experts are handed, multiplied by the scales.
        scales_RB: the scales, which are to be judged by `legal_scales`.
        block: columns of a block.
        fmt: the format.
        unit: unit roundoff of the dtype in which v is delivered, 0 where it is exact.

    Rule: |v - x| <= max(u |x|, t s) (1 + 2^-16) + unit |v|, u and t half a step of the format, relative for its
    normal numbers and absolute for those below; and v is 0 or has the sign of x.

    Degenerate: x = 0 gives 0. A finite x gives a finite number. An inf or NaN gives none, and the rest of its
    block is free.

    Raises:
        ValueError: shapes that do not fit, a negative unit.

    Decides: EXCH-30. Source: arithmetic, half a step of the format.

    >>> from moe_conformance.reference.token_exchange.wire_formats import E4M3
    >>> x, v = torch.tensor([[17.0, 17.0, 17.0, 0.0]]), torch.tensor([[16.0, 18.0, 18.1, 2**-12]])
    >>> legal_values(x, v, torch.tensor([[1.0]]), 4, E4M3).tolist()
    [[True, True, False, False]]
    """
    s_RD = spread(scales_RB, block, x_RD.shape[1])  # (R, D)
    if not x_RD.shape == v_RD.shape == s_RD.shape or not unit >= 0:
        shapes = [tuple(each.shape) for each in (x_RD, v_RD, scales_RB)]
        raise ValueError(f"x, v, scales {shapes}, unit {unit}: need (R, D) twice, (R, blocks), and unit >= 0")
    x, v = x_RD.double(), v_RD.double()  # (R, D)
    u = 2.0 ** -(fmt.mantissa_bits + 1)
    t = 2.0 ** (fmt.least_exponent - fmt.mantissa_bits - 1)
    error_RD = torch.maximum(u * x.abs(), t * s_RD) * (1 + 2**-16) + unit * v.abs()  # (R, D)
    near_RD = v.isfinite() & ((v - x).abs() <= error_RD) & ((v == 0) | (v.sign() == x.sign()))  # (R, D)
    spoiled_RD = spread((~block_maxima(x_RD, block).isfinite()).double(), block, x_RD.shape[1]) > 0  # (R, D)
    return torch.where(x.isfinite(), near_RD | spoiled_RD, ~v.isfinite())  # (R, D)
