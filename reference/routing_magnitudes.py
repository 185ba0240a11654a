"""Magnitudes of routing: how large the rounding errors of scores, weights and gradients may be, in units of u.

The router's formulas, logits = x W^T, scores, weights and their derivatives, in the measured numbers of
`rounding.py`. The derivative is written out by hand; that its values are those of autograd is checked below.

Source: the chain rule; the formulas of `routing.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reference.rounding import Measured, exact, plus, products, total
from reference.routing import Score


def logits_measured(x_TD: Tensor, router_ED: Tensor) -> Measured:
    """Compute the logits x W^T, (T, D) and (E, D) -> (T, E).

    >>> logits_measured(torch.tensor([[3.0, -2.0]]), torch.tensor([[1.0, 1.0]]))
    Measured(value=tensor([[1.]], dtype=torch.float64), magnitude=tensor([[5.]], dtype=torch.float64))
    """
    return products("td,ed->te", exact(x_TD), exact(router_ED))


def scores_measured(logits_TE: Measured, score: Score) -> Measured:
    """Score every expert, (T, E) -> (T, E), for finite logits; "softmax_topk" scores by the logits themselves.

    Rule: M(s_e) = |s_e| + sum_j |ds_e/dl_j| M(l_j). The square root of softplus is two functions, and has an
    error of its own for each.

    >>> logits = Measured(torch.zeros(1, 4, dtype=torch.float64), torch.ones(1, 4, dtype=torch.float64))
    >>> [scores_measured(logits, score).magnitude[0, 0].item() for score in ("softmax", "sigmoid")]
    [0.625, 0.75]
    """
    l_TE = logits_TE.value  # (T, E)
    if score == "softmax_topk":
        return logits_TE
    if score == "softmax":
        return softmax(logits_TE)
    if score == "sigmoid":
        s_TE = l_TE.sigmoid()  # (T, E)
        return Measured(s_TE, s_TE + s_TE * (1 - s_TE) * logits_TE.magnitude)
    if score == "sqrtsoftplus":
        s_TE = torch.logaddexp(l_TE, torch.zeros_like(l_TE)).sqrt()  # (T, E)
        return Measured(s_TE, 2 * s_TE + l_TE.sigmoid() / (2 * s_TE) * logits_TE.magnitude)
    raise ValueError(f"score {score!r} is none of {Score}")


def softmax(z: Measured) -> Measured:
    """Apply softmax along the last dimension: ds_e/dl_e = s_e (1 - s_e), ds_e/dl_j = -s_e s_j."""
    s = z.value.softmax(-1)
    from_all = (s * z.magnitude).sum(-1, keepdim=True)
    return Measured(s, s + s * ((1 - 2 * s) * z.magnitude + from_all))


def selection_scores_measured(scores_TE: Measured, bias_E: Tensor | None) -> Measured:
    """Add the bias, which may have been rounded to the scores' dtype, (T, E) and (E,) -> (T, E).

    >>> selection_scores_measured(exact(torch.tensor([[2.0]])), torch.tensor([-1.0])).magnitude.item()
    4.0
    """
    if bias_E is None:
        return scores_TE
    return plus(scores_TE, rounded(bias_E.expand_as(scores_TE.value)))


def weights_measured(
    logits_TE: Measured, ids_TK: Tensor, *, score: Score, normalise: bool = False, scale: float = 1.0
) -> Measured:
    """Weigh a given selection as `routing.weights` does, (T, E) and int64 (T, K) -> (T, K).

    >>> logits = exact(torch.zeros(1, 4))
    >>> weights_measured(logits, torch.tensor([[0, 1]]), score="softmax", scale=2.0).magnitude.tolist()
    [[1.0, 1.0]]
    """
    chosen_TK, sum_T = _chosen(logits_TE, ids_TK, score)
    if normalise:
        chosen_TK = quotient("tk,t->tk", chosen_TK, sum_T)
    return products("tk,->tk", chosen_TK, exact(torch.tensor(scale)))


def gradients_measured(
    x_TD: Tensor,
    router_ED: Tensor,
    ids_TK: Tensor,
    dweights_TK: Tensor,
    *,
    score: Score,
    normalise: bool = False,
    scale: float = 1.0,
) -> tuple[Measured, Measured]:
    """Take the gradient of the weights back to the tokens and the router, (T, K) -> (T, D) and (E, D).

    Rule: the derivative of each step of `routing.weights`, last step first; the upstream gradient may have
    been rounded to the weights' dtype. For the router over all ranks, measure the tokens of all.

    >>> from reference.routing import weights
    >>> x, router, dw = (torch.arange(n).cos().double().reshape(-1, 3) for n in (15, 12, 15))
    >>> ids, how = torch.tensor([[0, 1, 3], [3, 1, 2]])[[0, 1, 0, 1, 0]], {"normalise": True, "scale": 2.5}
    >>> for score in ("softmax", "softmax_topk", "sigmoid", "sqrtsoftplus"):
    ...     leaves = [x.clone().requires_grad_(), router.clone().requires_grad_()]
    ...     w = weights(leaves[0] @ leaves[1].T, ids, score=score, **how)
    ...     pairs = zip(
    ...         torch.autograd.grad(w, leaves, dw), gradients_measured(x, router, ids, dw, score=score, **how)
    ...     )
    ...     print(all(torch.allclose(ours.value, autograds) for autograds, ours in pairs))
    True
    True
    True
    True
    """
    logits_TE = logits_measured(x_TD, router_ED)
    chosen_TK, sum_T = _chosen(logits_TE, ids_TK, score)
    d_TK = products("tk,->tk", rounded(dweights_TK), exact(torch.tensor(scale)))
    if normalise:  # w_k = s_k / S, S = sum_j s_j: dL/ds_k = (dw_k - sum_j dw_j w_j) / S
        d_TK = quotient("tk,t->tk", less_mean(d_TK, quotient("tk,t->tk", chosen_TK, sum_T)), sum_T)
    if score == "softmax_topk":
        dlogits_TE = _scatter(products("tk,tk->tk", chosen_TK, less_mean(d_TK, chosen_TK)), ids_TK, logits_TE)
    elif score == "softmax":
        s_TE = softmax(logits_TE)
        dlogits_TE = products("te,te->te", s_TE, less_mean(_scatter(d_TK, ids_TK, logits_TE), s_TE))
    else:
        slope_TE = slope(logits_TE, score)
        dlogits_TE = products("te,te->te", _scatter(d_TK, ids_TK, logits_TE), slope_TE)
    return (
        products("te,ed->td", dlogits_TE, exact(router_ED)),
        products("te,td->ed", dlogits_TE, exact(x_TD)),
    )


def rounded(value: Tensor) -> Measured:
    """Take an input that may have been rounded once."""
    return Measured(value.double(), value.double().abs())


def quotient(formula: str, a: Measured, b: Measured) -> Measured:
    """Divide by a positive number, in einsum's letters; 0 where b is 0, as `routing.weights` has it.

    >>> quotient("i,i->i", exact(torch.tensor([6.0, 0.0])), rounded(torch.tensor([2.0, 0.0]))).magnitude.tolist()
    [6.0, 0.0]
    """
    inverse = torch.where(b.value > 0, 1 / torch.where(b.value > 0, b.value, 1.0), 0.0)
    return products(formula, a, Measured(inverse, inverse.square() * b.magnitude))


def _chosen(logits_TE: Measured, ids_TK: Tensor, score: Score) -> tuple[Measured, Measured]:
    """Return the scores of the chosen (T, K), for "softmax_topk" their softmax, and the sum of these (T,)."""
    s_TE = scores_measured(logits_TE, score)
    chosen_TK = Measured(s_TE.value.gather(1, ids_TK), s_TE.magnitude.gather(1, ids_TK))
    if score == "softmax_topk":
        chosen_TK = softmax(chosen_TK)
    return chosen_TK, total(chosen_TK, 1)


def less_mean(d: Measured, share: Measured) -> Measured:
    """Subtract from every d_k the mean sum_j d_j share_j of its row."""
    mean = products("tk,tk->t", d, share)
    return plus(d, Measured(-mean.value[:, None].expand_as(d.value), mean.magnitude[:, None].expand_as(d.value)))


def _scatter(d_TK: Measured, ids_TK: Tensor, like_TE: Measured) -> Measured:
    """Put the chosen into their places among all E, zeros elsewhere."""
    zero_TE = torch.zeros_like(like_TE.value)
    return Measured(zero_TE.scatter(1, ids_TK, d_TK.value), zero_TE.scatter(1, ids_TK, d_TK.magnitude))


def slope(logits_TE: Measured, score: Score) -> Measured:
    """Differentiate sigmoid, s (1 - s), or sqrtsoftplus, sigmoid / (2 s); both are computed from rounded factors."""
    sigmoid_TE = scores_measured(logits_TE, "sigmoid")
    if score == "sigmoid":
        s_TE = sigmoid_TE.value
        value = s_TE * (1 - s_TE)
        return Measured(value, 2 * value + (1 - 2 * s_TE).abs() * sigmoid_TE.magnitude)
    root_TE = scores_measured(logits_TE, score)
    return quotient("te,te->te", sigmoid_TE, Measured(2 * root_TE.value, 2 * root_TE.magnitude))
