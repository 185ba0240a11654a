"""Magnitudes of losses: how large the rounding errors of a loss and its gradient may be.

The formulas of `losses.py` and `z_loss.py` and their derivatives, in the measured numbers of `rounding.py`, for
valid tokens and finite logits. Logits are exact as stored, whatever their dtype. The derivatives are written
out here; that their values are those of autograd is checked below. LOSS-20 asks for the rounding of float32.

Source: the chain rule.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.reference.rounding.errors import Measured, Rounding, exact
from moe_conformance.reference.rounding.routing_magnitudes import less_mean, quotient, scores_measured, slope, softmax
from moe_conformance.reference.routing.routes import Score


def normalised_measured(r: Rounding, logits_TE: Tensor, score: Score) -> Measured:
    """Make shares of every token's scores as `losses.normalised_scores` does, (T, E) -> (T, E).

    Rule: LOSS-20. A softmax subtracts the largest logit first, and that rounds too.

    >>> normalised_measured(Rounding(1.0, 0.0), torch.zeros(1, 4), "softmax").worst.tolist()
    [[0.25, 0.25, 0.25, 0.25]]
    """
    if score in ("softmax", "softmax_topk"):
        return softmax(r, _below_largest(r, logits_TE.double()))
    s_TE = scores_measured(r, exact(logits_TE), score)
    return quotient(r, "te,t->te", s_TE, r.total(s_TE, 1))


def charge_measured(
    r: Rounding, logits_TE: Tensor, f_E: Tensor, *, score: Score, coefficient: float
) -> tuple[Measured, Measured]:
    """Charge valid tokens by given fractions f of choices, (T, E) and (E,) -> the loss () and dL/dlogits (T, E).

    Rule: LOSS-20. L = c E sum_e f_e mean_t p_te, the one formula of the auxiliary loss, of a sequence's own and of
    the global loss of one microbatch, which differ in f and in whose tokens they are; f has been rounded once.

    Degenerate: T = 0 gives 0 and magnitude 0.

    >>> from moe_conformance.reference.losses.balance import auxiliary_loss, choices
    >>> one, logits = Rounding(1.0, 1.0), torch.arange(15).cos().double().reshape(5, 3).requires_grad_()
    >>> for score in ("softmax", "softmax_topk", "sigmoid", "sqrtsoftplus"):
    ...     ids = choices(logits, score=score, top_k=2)
    ...     ours = charge_measured(one, logits.detach(), ids.flatten().bincount() / 10.0, score=score, coefficient=0.5)
    ...     loss = auxiliary_loss(logits, ids, score=score, coefficient=0.5)
    ...     theirs = [loss.detach(), *torch.autograd.grad(loss, logits)]
    ...     print(all(torch.allclose(our.value, their, rtol=1e-6) for our, their in zip(ours, theirs)))
    True
    True
    True
    True
    """
    T, E = logits_TE.shape
    p_TE = normalised_measured(r, logits_TE, score)
    share = r.stored(exact(torch.tensor(coefficient * E / max(T, 1), dtype=torch.float64)))  # of one token
    d_E = r.products("e,->e", r.stored(exact(f_E)), share)  # dL/dp_te, the same for every token
    d_TE = Measured(*(each.expand(T, E) for each in (d_E.value, d_E.worst, d_E.spread)))
    loss = r.total(r.total(r.products("te,te->te", p_TE, d_TE), 1), 0)  # whose errors are alike for every token
    around_TE = less_mean(r, d_TE, p_TE)  # d_te - sum_j d_tj p_tj
    if score in ("softmax", "softmax_topk"):
        return loss, r.products("te,te->te", p_TE, around_TE)
    logits = exact(logits_TE)
    sum_T = r.total(scores_measured(r, logits, score), 1)
    return loss, r.products("te,te->te", quotient(r, "te,t->te", around_TE, sum_T), slope(r, logits, score))


def z_measured(r: Rounding, logits_TE: Tensor, *, coefficient: float) -> tuple[Measured, Measured]:
    """Charge valid tokens for large logits as `z_loss.z_loss` does, (T, E) -> the loss () and dL/dlogits (T, E).

    Rule: LOSS-20. Z = m + log sum_e exp(l_e - m), m the largest logit. Of Z err the sum m + log; the logarithm;
    in it, relative to the sum, the sum itself, each exp and each l_e - m.

    >>> from moe_conformance.reference.losses.z_loss import z_loss
    >>> one, logits = Rounding(1.0, 1.0), torch.arange(15).cos().double().reshape(5, 3).requires_grad_()
    >>> loss, ours = z_loss(logits, coefficient=0.5), z_measured(one, logits.detach(), coefficient=0.5)
    >>> torch.allclose(ours[0].value, loss), torch.allclose(ours[1].value, *torch.autograd.grad(loss, logits))
    (True, True)
    """
    T, E = logits_TE.shape
    below_TE = _below_largest(r, logits_TE.double())
    Z_T = logits_TE.double().logsumexp(dim=1)  # (T,)
    m_T = logits_TE.double().amax(dim=1)  # (T,)
    from_logits_T = (logits_TE.double().softmax(dim=1) * below_TE.worst).sum(dim=1)  # (T,)
    own_T = m_T.abs() + 2 * (Z_T - m_T).abs() + 1  # the sum m + log, the logarithm, each exp
    Z = r.added(r.stored(Measured(Z_T, from_logits_T, from_logits_T), of=own_T), of=torch.ones_like(Z_T), n=E)
    below_Z_TE = r.plus(below_TE, -Measured(*(each[:, None].expand(T, E) for each in (Z.value, Z.worst, Z.spread))))
    s_TE = r.function(below_Z_TE.value.exp(), below_Z_TE.value.exp(), below_Z_TE)  # dZ/dl, however it is computed
    share = r.stored(exact(torch.tensor(coefficient / max(T, 1), dtype=torch.float64)))  # of one token
    charged_T = r.products("t,->t", Z, share)
    loss = r.total(r.products("t,t->t", charged_T, Z), 0)
    doubled_T = Measured(2 * charged_T.value, 2 * charged_T.worst, 2 * charged_T.spread)
    return loss, r.products("t,te->te", doubled_T, s_TE)


def _below_largest(r: Rounding, logits_TE: Tensor) -> Measured:
    """Take logits as they are, with the error of subtracting the largest of a row; -inf subtracts exactly."""
    below_TE = (logits_TE - logits_TE.amax(dim=1, keepdim=True)).abs()  # (T, E)
    below_TE = torch.where(below_TE.isinf(), 0.0, below_TE)
    return r.stored(exact(logits_TE), of=below_TE)
