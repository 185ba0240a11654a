"""Bounds: how far an honest implementation may be from the oracle, derived for every element, never one rtol for all.

`reference.magnitudes` and `reference.routing_magnitudes` say how large the error of an element is in units of the error
of one operation. This module says what one operation may err by: unit roundoffs of the dtypes, the lengths of sums, and
how many more roundings than the formula has an honest implementation may make.

Source: Higham, "Accuracy and Stability of Numerical Algorithms", sections 2.2 (rounding), 3.1 (sums), 3.4 (gamma).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.contract import Config
from moe_conformance.topology import Layout

# Operations on the longest path from an input to a result: an error passes through fewer than this many others. Their
# products are the second order, which `gamma` covers.
_DEPTH = 16

# Every magnitude of the layer and of the router charges the whole of an element's addends at least this often
# (self_tests/test_bounds.py holds it against them), so that one rounding more costs a fourth of the magnitude, not all.
_CHARGED = 4


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding to nearest.

    >>> unit_roundoff(torch.bfloat16) == 2**-8, unit_roundoff(torch.float32) == 2**-24
    (True, True)
    """
    return torch.finfo(dtype).eps / 2


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the narrowest dtype in which an honest matrix product adds up: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def gamma(n: float, u: float) -> float:
    """Return the relative error of n roundings of u, all orders included: n u / (1 - n u).

    >>> gamma(1, 0.5), gamma(0, 0.5)
    (1.0, 0.0)

    Raises:
        ValueError: n u >= 1, so that nothing is known about the result.
    """
    if n * u >= 1:
        raise ValueError(f"{n} roundings of {u} leave no digit: compare in a wider dtype or over shorter sums")
    return n * u / (1 - n * u)


def operation(dtype: torch.dtype, *, length: int, tokens: int = 0, more: int = 0) -> float:
    """Return what one operation may err by, relative to the sum of its absolute addends.

    It adds `length` addends in the accumulator, then stores the result in the tokens' dtype. Once, the last sum is over
    `tokens` instead; and on all operations together fall `more` roundings that the magnitude does not count. Products
    of errors are covered by `gamma` over the depth.

    >>> operation(torch.bfloat16, length=32) / 2**-8 < 1.1 < operation(torch.bfloat16, length=32, more=1) / 2**-8
    True
    """
    adding = (length + tokens / _CHARGED) * unit_roundoff(accumulator(dtype))
    first_order = unit_roundoff(dtype) * (1 + more / _CHARGED) + adding
    return gamma(_DEPTH, first_order) / _DEPTH


def allowed(magnitude: Tensor, dtype: torch.dtype, *, length: int, tokens: int = 0, more: int = 0) -> Tensor:
    """Return the largest honest error of every element, given its magnitude; see `operation`.

    Below the smallest normal number errors are no longer relative: each addend may err by the roundoff of that number.
    And what the accumulator lost there, all of it if it flushes, was then multiplied: by the large token that made a
    probability so small, say. Factors up to 1/u are provided for. An element whose addends are all zero has magnitude 0
    and is allowed no error.
    """
    wide = accumulator(dtype)
    lost = torch.finfo(wide).tiny / unit_roundoff(wide)
    underflow = (length + tokens) * (unit_roundoff(dtype) * torch.finfo(dtype).tiny + lost)
    relative = operation(dtype, length=length, tokens=tokens, more=more)
    return torch.where(magnitude > 0, magnitude * relative + underflow, 0.0)


# ---- how many roundings more ---------------------------------------------------------------------------------


def more_in_sums(top_k: int, layout: Layout) -> int:
    """Count the roundings that y and dx may have and their magnitudes do not count.

    K slots of etp parts each are added one by one in the tokens' dtype: K * etp - 1 roundings, of which the magnitude
    counts one. The weight may be rounded to that dtype, and may multiply inside the expert, where addends have not yet
    cancelled: one more each.
    """
    return top_k * layout.etp - 2 + 2


def more_in_weight_gradients(layout: Layout) -> int:
    """Count the same for the gradient of the routing weights.

    The products of upstream gradient and answer may be stored before they are added, the answer may be taken inside
    the expert, the weight itself may have been rounded: one each; and etp - 1 to add the parts.
    """
    return 3 + layout.etp - 1


def more_in_parameter_gradients(microbatches: int, replicas: int) -> int:
    """Count the same for the gradient of a parameter that is summed over microbatches and over replicas.

    Both sums may be made in the tokens' dtype: one rounding for each but the first. The weight may have been rounded,
    and a mean over data parallel ranks divides: one each.
    """
    return (microbatches - 1) + (replicas - 1) + 2


def longest_sum(config: Config) -> int:
    """Return the addends of the longest sum within a token: over D, F or E.

    >>> longest_sum(Config(hidden=32, ffn=16))
    32
    """
    return max(config.hidden, config.ffn, config.experts)
