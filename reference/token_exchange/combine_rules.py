"""Combine rules: what is added to a token beside its expert outputs, and what is left out.

Sources: Shazeer et al. 2017 equation 1; behaviour of DeepEP (combine with bias; masking of ranks).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor


def combine(answers_TKD: Tensor, ids_TK: Tensor, weights_TK: Tensor, biases: Sequence[Tensor] = ()) -> Tensor:
    """Add up the outputs of a token's experts and the biases, -> (T, D), differentiable in all but the ids.

    Args:
        answers_TKD: of every (token, slot) pair, its expert output.
        ids_TK: int64, -1 = empty slot.
        weights_TK: routing weights.
        biases: (T, D) each.

    Rule: y_t = sum of its biases, each once and unweighted, + sum_k w_tk a_tk. So dL/dbias = dL/dy.

    Degenerate: an empty slot adds nothing and gets no gradient, whatever its output and weight hold, NaN
    included; a token of such slots gets its biases alone. T = 0 gives (0, D).

    Raises:
        ValueError: shapes that do not fit.

    Decides: EXCH-31. Source: behaviour of DeepEP (combine with bias).

    >>> answers, ids = torch.tensor([[[1.0], [2.0]], [[torch.nan], [4.0]]]), torch.tensor([[0, 3], [-1, 3]])
    >>> combine(answers, ids, torch.tensor([[0.5, 0.25]] * 2), [torch.tensor([[10.0], [20.0]])]).tolist()
    [[11.0], [21.0]]
    """
    T, K, D = answers_TKD.shape
    shapes = [tuple(each.shape) for each in (ids_TK, weights_TK, *biases)]
    if shapes != [(T, K), (T, K), *[(T, D) for _ in biases]]:
        raise ValueError(f"ids, weights and biases {shapes} for answers {(T, K, D)}")
    real_TK1 = (ids_TK >= 0)[:, :, None]  # (T, K, 1)
    a_TKD = torch.where(real_TK1, answers_TKD.double(), 0.0)  # (T, K, D)
    w_TK1 = torch.where(real_TK1, weights_TK.double()[:, :, None], 0.0)  # (T, K, 1)
    y_TD = (w_TK1 * a_TKD).sum(dim=1)  # (T, D)
    for bias_TD in biases:
        y_TD = y_TD + bias_TD.double()  # (T, D)
    return y_TD


def without_ranks(ids_TK: Tensor, owners_E: Sequence[Sequence[int]], failed: Collection[int]) -> Tensor:
    """Empty the slots whose expert cannot answer, int64 (T, K) -> (T, K).

    Args:
        ids_TK: the routing of a rank that has not failed.
        owners_E: of every expert, the ranks of the exchange group that hold it or a shard of it.
        failed: ranks that are left out.

    Rule: an expert with a failed owner becomes -1; all else follows from empty slots (`combine`,
    `layer.forward`). A whole expert is needed: without one shard, the sum of the others is not its output.

    Degenerate: no rank failed, nothing changes. Failed ranks that own nothing change nothing.

    Raises:
        ValueError: an id outside -1..E-1, an expert that no rank owns.

    Decides: EXCH-24. Source: behaviour of DeepEP (masking of ranks in low-latency mode).

    >>> without_ranks(torch.tensor([[0, 1], [2, -1]]), [[0, 1], [0, 1], [2, 3]], {3}).tolist()
    [[0, 1], [-1, -1]]
    """
    if bool(((ids_TK < -1) | (ids_TK >= len(owners_E))).any()) or not all(owners_E):
        raise ValueError(f"owners {[list(each) for each in owners_E]}: need one for every expert, and ids among them")
    kept_TK = ids_TK.clone()  # (T, K)
    for e, owners in enumerate(owners_E):
        if set(owners) & set(failed):
            kept_TK[ids_TK == e] = -1
    return kept_TK
