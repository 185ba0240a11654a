"""Z-loss: what a router is charged, in one microbatch, for large logits.

Microbatch, padding and result are those of `losses.py`. An error, in valid rows: a logit that is NaN or +inf,
a row of nothing but -inf.

Source: ST-MoE, Zoph et al. 2022 (router z-loss).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_conformance.reference.losses.balance import valid_tokens
from moe_conformance.reference.routing.routes import scores


def z_loss(logits_TE: Tensor, *, coefficient: float, padding_T: Tensor | None = None) -> Tensor:
    """Charge a microbatch for large logits, (T, E) -> (), differentiable in the logits.

    Rule (LOSS-09, LOSS-14): (c / V) sum over valid t of Z_t^2, Z_t = log sum_e exp(l_te), of the logits
    themselves, whatever the score function.

    Degenerate: V = 0 gives 0; l = 0 gives c log(E)^2; a logit of -inf adds nothing to the sum.

    Decides: LOSS-09. Source: ST-MoE, Zoph et al. 2022.

    >>> z_loss(torch.tensor([[0.5, -torch.inf], [1.5, -torch.inf]]), coefficient=2.0).item()
    2.5
    """
    l_VE = logits_TE[valid_tokens(logits_TE, padding_T)].double()  # (V, E)
    scores(l_VE, "softmax")  # raises where no sum of exponentials is
    Z_V = l_VE.logsumexp(dim=1)  # (V,)
    return coefficient * (Z_V**2).sum() / max(len(Z_V), 1)


def z_loss_of_parts(
    logits_by_rank: Sequence[Tensor], *, coefficient: float, padding_by_rank: Sequence[Tensor | None] | None = None
) -> Tensor:
    """Average the z-losses that the ranks of one tp x cp group charge for their own tokens, -> ().

    Rule (LOSS-09): the mean over the ranks of the mean over a rank's valid tokens. It is the `z_loss` of the
    whole where all ranks hold equally many valid tokens, and allowed beside it where they do not.

    Degenerate: a rank without valid token adds 0 and counts. No rank is an error.

    >>> ranks = [torch.tensor([[1.0]]), torch.tensor([[2.0], [3.0]])]
    >>> z_loss_of_parts(ranks, coefficient=1.0).item()  # (1 + (4 + 9) / 2) / 2, where the whole has 14 / 3
    3.75
    """
    if not logits_by_rank:
        raise ValueError("a z-loss over no rank; give the logits of every rank of the group")
    paddings = [None] * len(logits_by_rank) if padding_by_rank is None else padding_by_rank
    parts = [
        z_loss(logits_TE, coefficient=coefficient, padding_T=padding_T)
        for logits_TE, padding_T in zip(logits_by_rank, paddings, strict=True)
    ]
    return torch.stack(parts).mean()
