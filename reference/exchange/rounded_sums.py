"""Combine where rows have fewer bits than routing weights: which sums correct code may make of the rows of a token.

Sources: behaviour of Megatron-Core (weights in float32 at the experts, sums in the dtype of the rows), of torchtitan
(products in float32, stored in the dtype of the rows) and of Mixtral in transformers (weights cast to that dtype).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Stored = Literal["nowhere", "pairs", "ranks"]


class Way(NamedTuple):
    """What is rounded to the dtype of the rows before the sum, and what correct code then adds up."""

    weights: bool  # the routing weights
    products: Stored  # nowhere; each weighted row; or the sum of a rank's rows, each times its weight
    sum_TD: Tensor  # float64, the exact sum of what is added up
    size_TD: Tensor  # float64, the sum of the magnitudes


def ways(x_TD: Tensor, owners_TK: Tensor, weights_TK: Tensor, *, weights: bool) -> tuple[Way, ...]:
    """List what may be added up for each token, with experts that return their rows.

    Args: the tokens, in bfloat16 or float16; of each slot the rank that holds its expert, -1 for an empty slot; the
    routing weights, float32; and whether these may be rounded to the dtype of the tokens.

    Rule: y_t = sum over k of stored(w_tk x_t), with w_tk as it is or rounded first; products are computed in float32
    and stored in the dtype of the tokens, or not stored; rows of one rank may be added up before they are.

    Degenerate: a token without a slot has zeros in every way. No token: nothing, of shape (0, D).

    Decides: EXCH-05. Source: definition of combine; see above.

    >>> x, w = torch.tensor([[1.0]], dtype=torch.bfloat16), torch.tensor([[1 + 2**-8, 2**-8]])
    >>> [(*way[:2], way.sum_TD.item() - 1) for way in ways(x, torch.tensor([[0, 0]]), w, weights=False)]
    [(False, 'nowhere', 0.0078125), (False, 'pairs', 0.00390625), (False, 'ranks', 0.0078125)]
    """
    dtype, filled_TK = x_TD.dtype, owners_TK >= 0
    found: list[Way] = []
    for rounded in (False, True) if weights else (False,):
        w_TK = torch.where(filled_TK, weights_TK, 0)
        w_TK = w_TK.to(dtype).to(weights_TK.dtype) if rounded else w_TK
        exact_TKD = w_TK.double()[..., None] * x_TD.double()[:, None]
        pairs_TKD = (w_TK[..., None] * x_TD.to(w_TK.dtype)[:, None]).to(dtype).double()
        ranks_TRD = _by_rank(w_TK, owners_TK)[..., None] * x_TD.to(w_TK.dtype)[:, None]
        of: dict[Stored, Tensor] = {"nowhere": exact_TKD, "pairs": pairs_TKD, "ranks": ranks_TRD.to(dtype).double()}
        for products, parts_TPD in of.items():
            found.append(Way(rounded, products, parts_TPD.sum(1), parts_TPD.abs().sum(1)))
    return tuple(found)


def _by_rank(w_TK: Tensor, owners_TK: Tensor) -> Tensor:
    """Add up the weights of the slots on each rank, (T, ranks)."""
    ranks = int(owners_TK.max()) + 1 if owners_TK.numel() else 0
    return w_TK.new_zeros(len(w_TK), max(ranks, 1)).scatter_add(1, owners_TK.clamp_min(0), w_TK)
