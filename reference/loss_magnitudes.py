"""Magnitudes of losses: how large the rounding errors of a loss and its gradient may be, in units of u.

The formulas of `losses.py` and `z_loss.py` and their derivatives, in the measured numbers of `rounding.py`, for
valid tokens and finite logits. Logits are exact as stored, whatever their dtype. The derivatives are written
out here; that their values are those of autograd is checked below. A judge of LOSS-20 multiplies by the u of
float32 and by the length of the longest sum, over E or over tokens.

Source: the chain rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.rounding import Measured, exact, products, total
from reference.routing import Score
from reference.routing_magnitudes import less_mean, quotient, rounded, scores_measured, slope, softmax


def normalised_measured(logits_TE: Tensor, score: Score) -> Measured:
    """Make shares of every token's scores as `losses.normalised_scores` does, (T, E) -> (T, E).

    Rule: LOSS-20. A softmax subtracts the largest logit first, and that rounds too.

    >>> normalised_measured(torch.zeros(1, 4), "softmax").magnitude.tolist()
    [[0.25, 0.25, 0.25, 0.25]]
    """
    if score in ("softmax", "softmax_topk"):
        return softmax(_below_largest(logits_TE.double()))
    s_TE = scores_measured(exact(logits_TE), score)
    return quotient("te,t->te", s_TE, total(s_TE, 1))


def charge_measured(logits_TE: Tensor, f_E: Tensor, *, score: Score, coefficient: float) -> tuple[Measured, Measured]:
    """Charge valid tokens by given fractions f of choices, (T, E) and (E,) -> the loss () and dL/dlogits (T, E).

    Rule: LOSS-20. L = c E sum_e f_e mean_t p_te, the one formula of the auxiliary loss, of a sequence's own and of
    the global loss of one microbatch, which differ in f and in whose tokens they are; f has been rounded once.

    Degenerate: T = 0 gives 0 and magnitude 0.

    >>> from reference.losses import auxiliary_loss, choices
    >>> logits = torch.arange(15).cos().double().reshape(5, 3).requires_grad_()
    >>> for score in ("softmax", "softmax_topk", "sigmoid", "sqrtsoftplus"):
    ...     ids = choices(logits, score=score, top_k=2)
    ...     ours = charge_measured(logits.detach(), ids.flatten().bincount() / 10.0, score=score, coefficient=0.5)
    ...     loss = auxiliary_loss(logits, ids, score=score, coefficient=0.5)
    ...     theirs = [loss.detach(), *torch.autograd.grad(loss, logits)]
    ...     print(all(torch.allclose(our.value, their, rtol=1e-6) for our, their in zip(ours, theirs)))
    True
    True
    True
    True
    """
    T, E = logits_TE.shape
    p_TE = normalised_measured(logits_TE, score)
    share = rounded(torch.tensor(coefficient * E / max(T, 1), dtype=torch.float64))  # of one token
    d_E = products("e,->e", rounded(f_E), share)  # dL/dp_te, the same for every token
    d_TE = Measured(d_E.value.expand(T, E), d_E.magnitude.expand(T, E))
    loss = products("te,te->", p_TE, d_TE)
    around_TE = less_mean(d_TE, p_TE)  # d_te - sum_j d_tj p_tj
    if score in ("softmax", "softmax_topk"):
        return loss, products("te,te->te", p_TE, around_TE)
    logits = exact(logits_TE)
    sum_T = total(scores_measured(logits, score), 1)
    return loss, products("te,te->te", quotient("te,t->te", around_TE, sum_T), slope(logits, score))


def z_measured(logits_TE: Tensor, *, coefficient: float) -> tuple[Measured, Measured]:
    """Charge valid tokens for large logits as `z_loss.z_loss` does, (T, E) -> the loss () and dL/dlogits (T, E).

    Rule: LOSS-20. Z = m + log sum_e exp(l_e - m), m the largest logit. Of Z err the sum m + log; the logarithm;
    in it, relative to the sum, the sum itself, each exp and each l_e - m.

    >>> from reference.z_loss import z_loss
    >>> logits = torch.arange(15).cos().double().reshape(5, 3).requires_grad_()
    >>> loss, ours = z_loss(logits, coefficient=0.5), z_measured(logits.detach(), coefficient=0.5)
    >>> torch.allclose(ours[0].value, loss), torch.allclose(ours[1].value, *torch.autograd.grad(loss, logits))
    (True, True)
    """
    T = len(logits_TE)
    below_TE = _below_largest(logits_TE.double())
    s_TE = softmax(below_TE)
    Z_T = logits_TE.double().logsumexp(dim=1)  # (T,)
    m_T = logits_TE.double().amax(dim=1)  # (T,)
    from_logits_T = (s_TE.value * below_TE.magnitude).sum(dim=1)  # (T,)
    Z = Measured(Z_T, m_T.abs() + 2 * (Z_T - m_T).abs() + 2 + from_logits_T)
    share = rounded(torch.tensor(coefficient / max(T, 1), dtype=torch.float64))  # of one token
    charged_T = products("t,->t", Z, share)
    loss = products("t,t->", charged_T, Z)
    return loss, products("t,te->te", Measured(2 * charged_T.value, 2 * charged_T.magnitude), s_TE)


def _below_largest(logits_TE: Tensor) -> Measured:
    """Take logits as they are, with the error of subtracting the largest of a row; -inf subtracts exactly."""
    below_TE = (logits_TE - logits_TE.amax(dim=1, keepdim=True)).abs()  # (T, E)
    return Measured(logits_TE, torch.where(below_TE.isinf(), 0.0, below_TE))
