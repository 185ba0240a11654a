"""Row index: rows fetched and put back by an index, with sentinels for places that hold no token.

An index i with 0 <= i < T names a token. Everything else, commonly -1 or T, is a sentinel: a row of zeros on
the way out, nothing on the way back.

Sources: behaviour of torchtitan's padded permutation and of DeepEP (-1 for a slot that is not local).
"""

from __future__ import annotations

import torch
from torch import Tensor


def gather(x_TD: Tensor, index_R: Tensor) -> Tensor:
    """Fetch rows by index, (T, D) and int64 (R,) -> (R, D), differentiable in x.

    Rule: row r is x_{i_r}, or zeros at a sentinel. dL/dx_t is the sum over all r with i_r = t of what comes
    back in row r; a sentinel adds nothing.

    Degenerate: R = 0 gives (0, D). T = 0 makes every index a sentinel.

    Raises:
        ValueError: an index that is not int64 of one dimension.

    Decides: EXCH-19. Source: arithmetic.

    >>> gather(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1, -1, 0, 2, 1])).tolist()
    [[3.0, 4.0], [0.0, 0.0], [1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]
    """
    T, D = x_TD.shape
    real_R = _names_token(index_R, T)  # (R,)
    rows_RD = torch.zeros(index_R.shape[0], D, dtype=torch.float64)  # (R, D)
    return rows_RD.index_put((real_R.nonzero()[:, 0],), x_TD.double()[index_R[real_R]])  # (R, D)


def scatter(out_RD: Tensor, index_R: Tensor, weights_R: Tensor, tokens: int) -> Tensor:
    """Add weighted rows to their tokens, (R, D), int64 (R,) and (R,) -> (T, D), differentiable in rows and weights.

    Rule: y_t = sum over r with i_r = t of w_r out_r. Backwards, with g = dL/dy: dL/dout_r = w_r g_{i_r} and
    dL/dw_r = <out_r, g_{i_r}>, and at a sentinel both are 0, even where the row or its weight is NaN.

    Degenerate: a token that no index names gets 0. R = 0 gives zeros, T = 0 gives (0, D).

    Raises:
        ValueError: shapes that do not fit, an index that is not int64, a negative number of tokens.

    Decides: EXCH-05, EXCH-19, GRAD-02, GRAD-03. Source: chain rule.

    >>> out = torch.tensor([[1.0, 2.0], [torch.nan, 0.0], [3.0, 4.0]])
    >>> scatter(out, torch.tensor([1, -1, 1]), torch.tensor([1.0, 5.0, 10.0]), 3).tolist()
    [[0.0, 0.0], [31.0, 42.0], [0.0, 0.0]]
    """
    R, D = out_RD.shape
    if index_R.shape != (R,) or weights_R.shape != (R,) or tokens < 0:
        shapes = f"index {tuple(index_R.shape)} and weights {tuple(weights_R.shape)}"
        raise ValueError(f"{R} rows for {tokens} tokens with {shapes}: need (R,), (R,) and T >= 0")
    real_R = _names_token(index_R, tokens)  # (R,)
    weighted_RD = weights_R.double()[real_R][:, None] * out_RD.double()[real_R]  # (real rows, D)
    return torch.zeros(tokens, D, dtype=torch.float64).index_add(0, index_R[real_R], weighted_RD)  # (T, D)


def _names_token(index_R: Tensor, tokens: int) -> Tensor:
    """Tell tokens from sentinels, bool (R,)."""
    if index_R.dim() != 1 or index_R.dtype != torch.int64:
        raise ValueError(f"an index of rows is int64 (R,), not {index_R.dtype} {tuple(index_R.shape)}")
    return (index_R >= 0) & (index_R < tokens)  # (R,)
