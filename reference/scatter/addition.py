"""Scatter-add: rows added back into an output row by row, and what that does to gradients.

Whether it may be done in place is a question of memory: `memory.py`.

Sources: definition of index_add; Higham, Accuracy and Stability of Numerical Algorithms (summation); PyTorch
documentation of autograd mechanics (grad modes).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_conformance.reference.exchange import layer
from moe_conformance.reference.experts import Expert


def scatter_add(out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> Tensor:
    """Add every source row to the output row that its index names.

    Args:
        out_ND: float (N, D), what is there before.
        index_J: int64 (J,), of every source row the output row, 0..N-1; repeats are allowed.
        src_JD: float (J, D).

    Returns:
        float64 (N, D), new memory, differentiable: d out = g, d src_j = g[idx_j].

    Rule: y_i = out_i + sum over j with idx_j = i of src_j.

    Degenerate: a row that no index names is out_i as it is, whatever stands in other rows; no index gives out
    itself, as a copy, and src an empty gradient. A negative index is an error: implementations differ on it.

    Decides: ALIAS-01, ALIAS-05, ALIAS-06. Source: definition of index_add.

    >>> out, src = torch.zeros(4, 2), torch.tensor([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    >>> scatter_add(out, torch.tensor([2, 0, 2]), src).tolist()
    [[10.0, 20.0], [0.0, 0.0], [101.0, 202.0], [0.0, 0.0]]
    """
    _check(out_ND, index_J, src_JD)
    N = len(out_ND)
    both_ND = torch.cat([out_ND.double(), src_JD.double()])  # (N + J, D), so that src has a gradient without rows too
    rows_ND = list(both_ND[:N].unbind())  # N rows of (D,)
    for j, i in enumerate(index_J.tolist()):
        rows_ND[i] = rows_ND[i] + both_ND[N + j]
    return torch.stack(rows_ND) if rows_ND else both_ND.clone()  # (N, D)


def scatter_add_bound(out_ND: Tensor, index_J: Tensor, src_JD: Tensor, unit_roundoff: float) -> Tensor:
    """Say how far each element may lie from the exact sum, in any order of addition, float64 (N, D) (ALIAS-01).

    Args:
        out_ND: float (N, D).
        index_J: int64 (J,).
        src_JD: float (J, D).
        unit_roundoff: u of the dtype that adds, 2**-8 for bfloat16, 2**-11 for float16, 2**-24 for float32.

    Rule: (m_i + 1) u (|out_i| + sum_j |src_j|) / (1 - (m_i + 1) u), m_i the source rows that name row i: m_i
    additions, and a last rounding where the sum was kept wider.

    Degenerate: a row that no index names keeps its bits, bound 0.

    Raises:
        ValueError: so many repeats that (m_i + 1) u >= 1: no value would be wrong. Also as `scatter_add`.

    >>> out, src = torch.ones(3, 2), torch.tensor([[-1.0, 2.0], [3.0, 0.0]])
    >>> scatter_add_bound(out, torch.tensor([0, 0]), src, 0.25).tolist()
    [[15.0, 9.0], [0.0, 0.0], [0.0, 0.0]]
    """
    u = unit_roundoff
    if not 0 < u < 1:
        raise ValueError(f"a unit roundoff lies between 0 and 1; {u} does not")
    sums_ND = scatter_add(out_ND.detach().abs(), index_J, src_JD.detach().abs())  # (N, D)
    m_N1 = torch.bincount(index_J, minlength=len(out_ND))[:, None]  # (N, 1)
    if bool(((m_N1 > 0) & ((m_N1 + 1) * u >= 1)).any()):
        raise ValueError(f"{int(m_N1.max())} addends in a row and u = {u} allow any value; take fewer repeats")
    grown_N1 = (m_N1 + 1).double() * u  # (N, 1)
    return torch.where(m_N1 > 0, grown_N1 * sums_ND / (1 - grown_N1), 0.0)  # (N, D)


def add_routed(base_TD: Tensor, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor, expert: Expert) -> Tensor:
    """Add the routed experts' output to the output of a shared part, (T, D) -> float64 (T, D) (ALIAS-04).

    Rule: y_t = base_t + sum_k w_tk f_{id_tk}(x_t), with base and x as they were, whatever memory they share.
    Differentiable in all but the ids.

    Degenerate: no routed slot at all gives base; T = 0 gives (0, D).

    Decides: ALIAS-04. Source: arithmetic.

    >>> x = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    >>> ids, w = torch.tensor([[1], [-1]]), torch.tensor([[0.5], [9.0]])
    >>> add_routed(x, x, ids, w, lambda rows, e: rows * 10**e).tolist()
    [[6.0, 12.0, 18.0], [4.0, 5.0, 6.0]]
    """
    if base_TD.shape != x_TD.shape:
        raise ValueError(f"base {tuple(base_TD.shape)} and x {tuple(x_TD.shape)} differ in shape")
    return base_TD.double() + layer.forward(x_TD, ids_TK, weights_TK, expert)  # (T, D)


def records_gradient(modes: Sequence[str], requires_grad: Sequence[bool]) -> bool:
    """Return whether an operation has a gradient under nested grad modes, outermost first (ALIAS-07).

    Rule: the innermost of "enable_grad" and "no_grad" decides, on if there is neither; inside any
    "inference_mode" nothing is recorded; and some input must require grad.

    Decides: ALIAS-07. Source: PyTorch documentation of autograd mechanics (grad modes).

    >>> records_gradient(["no_grad", "enable_grad"], [False, True]), records_gradient(["no_grad"], [True])
    (True, False)
    >>> records_gradient(["inference_mode", "enable_grad"], [True])
    False
    """
    on = True
    for mode in modes:
        if mode not in ("enable_grad", "no_grad", "inference_mode"):
            raise ValueError(f"{mode!r} is no grad mode")
        on = mode == "enable_grad"
    return on and "inference_mode" not in modes and any(requires_grad)


def _check(out_ND: Tensor, index_J: Tensor, src_JD: Tensor) -> None:
    """Raise where the shapes do not fit or an index names no row."""
    (N, D), J = out_ND.shape, len(src_JD)
    if src_JD.shape != (J, D) or index_J.shape != (J,) or index_J.dtype != torch.int64:
        shapes = f"out {tuple(out_ND.shape)}, index {index_J.dtype} {tuple(index_J.shape)}, src {tuple(src_JD.shape)}"
        raise ValueError(f"{shapes} do not fit (N, D), int64 (J,) and (J, D)")
    if J and not (0 <= int(index_J.min()) and int(index_J.max()) < N):
        raise ValueError(f"indices {index_J.tolist()} must name rows 0..{N - 1}")
