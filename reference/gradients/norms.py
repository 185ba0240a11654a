"""Gradient norms: the norm of a whole model's gradients, and clipping by it.

How the model lies on ranks is not to be seen in them: put it together first (`gradient_shards.whole`).

Source: Pascanu et al. 2013 section 3.2 (norm clipping).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from math import inf, isfinite, isnan

import torch
from torch import Tensor


def norm(gradients: Mapping[str, Tensor], *, p: float = 2.0) -> Tensor:
    """Compute the norm of a whole model's gradients, of any shapes -> float64 ().

    Rule: (sum |g_i|^p)^(1/p) over all elements of all parameters, dense and expert, or max |g_i| for p = inf.

    Degenerate: no parameter, and only empty or zero ones, give 0. An infinite element gives inf, a NaN NaN.

    Raises:
        ValueError: p < 1 or NaN.

    Decides: GRAD-12. Source: Pascanu et al. 2013 section 3.2.

    >>> g = {"dense": torch.tensor([[3.0], [0.0]]), "expert 5": torch.tensor([-4.0])}
    >>> norm(g).item(), norm(g, p=torch.inf).item(), norm(g, p=1).item()
    (5.0, 4.0, 7.0)
    """
    if not p >= 1:
        raise ValueError(f"p = {p} makes no norm; give p >= 1")
    flat = torch.cat([torch.zeros(1, dtype=torch.float64), *(g.double().reshape(-1) for g in gradients.values())])
    return flat.abs().max() if p == inf else flat.abs().pow(p).sum().pow(1 / p)


def legal_norms(claimed_by_rank: Sequence[float], exact: float) -> bool:
    """Return whether ranks may claim these norms.

    Rule: the same bytes on all ranks, and a relative error of at most 2^-20. Where the exact norm is inf or
    NaN, any claim that is not finite will do, the same everywhere.

    Raises:
        ValueError: no rank; a negative norm.

    Decides: GRAD-12. Source: arithmetic, sums in float32.

    >>> legal_norms([5.000004, 5.000004], 5.0), legal_norms([5.000004, 5.0], 5.0), legal_norms([5.00001], 5.0)
    (True, False, False)
    """
    if not claimed_by_rank or exact < 0:
        raise ValueError(f"claims {list(claimed_by_rank)} of a norm of {exact}: need a rank, and a norm of at least 0")
    if len({struct.pack("d", claim) if not isnan(claim) else b"NaN" for claim in claimed_by_rank}) > 1:
        return False
    claimed = claimed_by_rank[0]
    if not isfinite(exact):
        return not isfinite(claimed)
    return abs(claimed - exact) <= 2**-20 * exact


def clip_factor(norm: float, max_norm: float, *, eps: float = 0.0) -> float:
    """Compute the one factor by which clipping multiplies every gradient of the model.

    Rule: c = min(1, max_norm / (norm + eps)).

    Degenerate: norm = 0 changes nothing, c = 1; an infinite `max_norm` never clips; max_norm = 0 leaves zeros.

    Raises:
        ValueError: a norm that is not finite (what ranks do then is free, as long as all do it) or negative,
            a `max_norm` below 0 or NaN, an eps outside 0..1e-6.

    Decides: GRAD-13. Source: Pascanu et al. 2013 section 3.2.

    >>> clip_factor(8.0, 2.0), clip_factor(8.0, 8.0), clip_factor(8.0, 8.0, eps=1e-6) < 1, clip_factor(0.0, 0.0)
    (0.25, 1.0, True, 1.0)
    """
    if not (isfinite(norm) and norm >= 0 and max_norm >= 0 and 0 <= eps <= 1e-6):
        given = f"norm {norm}, max_norm {max_norm}, eps {eps}"
        raise ValueError(f"{given}: need a finite norm >= 0, max_norm >= 0 and eps in 0..1e-6")
    return 1.0 if norm == 0 else min(1.0, max_norm / (norm + eps))


def clipped(gradients: Mapping[str, Tensor], max_norm: float, *, eps: float = 0.0, p: float = 2.0) -> dict[str, Tensor]:
    """Clip a whole model's gradients, -> float64, shapes kept: each times `clip_factor` of the norm of all.

    Degenerate: a norm with norm + eps <= max_norm changes nothing. Raises as `norm` and `clip_factor`.

    Decides: GRAD-13. Source: Pascanu et al. 2013 section 3.2.

    >>> g = {"dense": torch.tensor([3.0, 0.0]), "expert 5": torch.tensor([[-4.0]])}
    >>> {name: value.tolist() for name, value in clipped(g, 2.5).items()}
    {'dense': [1.5, 0.0], 'expert 5': [[-2.0]]}
    """
    c = clip_factor(norm(gradients, p=p).item(), max_norm, eps=eps)
    return {name: c * g.double() for name, g in gradients.items()}
