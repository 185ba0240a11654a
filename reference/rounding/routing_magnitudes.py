"""Magnitudes of routing: how large the rounding errors of scores, weights and gradients may be.

The router's formulas, logits = x W^T, scores, weights and their derivatives, in the measured numbers of
`rounding.py`. The derivative is written out by hand; that its values are those of autograd is checked below.

Source: the chain rule; the formulas of `routing.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_conformance.reference.rounding.errors import Measured, Rounding, exact, partial, parts_of
from moe_conformance.reference.routing.routes import Score

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def logits_measured(r: Rounding, x_TD: Tensor, router_ED: Tensor) -> Measured:
    """Compute the logits x W^T, (T, D) and (E, D) -> (T, E).

    >>> logits_measured(Rounding(1.0, 0.0), torch.tensor([[3.0, -2.0]]), torch.tensor([[1.0, 1.0]])).worst.item()
    6.0
    """
    return r.products("td,ed->te", exact(x_TD), exact(router_ED))


def scores_measured(r: Rounding, logits_TE: Measured, score: Score) -> Measured:
    """Score every expert, (T, E) -> (T, E), for finite logits; "softmax_topk" scores by the logits themselves.

    Rule: err(s_e) = u |s_e| + sum_j |ds_e/dl_j| err(l_j). The square root of softplus is two functions, and has an
    error of its own for each.

    >>> one = torch.ones(1, 4, dtype=torch.float64)
    >>> logits = Measured(0 * one, one, 0 * one)
    >>> [scores_measured(Rounding(1.0, 0.0), logits, how).worst[0, 0].item() for how in ("softmax", "sigmoid")]
    [0.625, 0.75]
    """
    l_TE = logits_TE.value  # (T, E)
    if score == "softmax_topk":
        return logits_TE
    if score == "softmax":
        return softmax(r, logits_TE)
    if score == "sigmoid":
        s_TE = l_TE.sigmoid()  # (T, E)
        return r.function(s_TE, s_TE * (1 - s_TE), logits_TE)
    if score == "sqrtsoftplus":
        s_TE = torch.logaddexp(l_TE, torch.zeros_like(l_TE)).sqrt()  # (T, E)
        scored = r.function(s_TE, l_TE.sigmoid() / (2 * s_TE), logits_TE, own=2 * s_TE)
        lost_TE = underflow_of_root(r, s_TE)
        return Measured(s_TE, scored.worst + lost_TE, torch.hypot(scored.spread, lost_TE))
    raise ValueError(f"score {score!r} is none of {Score}")


def underflow_of_root(r: Rounding, root: Tensor) -> Tensor:
    """Return what a root may be off by because what it is taken of may be lost below the smallest normal number.

    Rule: there a number errs by the roundoff of the smallest normal one where it is stored, and by all of it where an
    accumulator flushes it to zero, or is kept from zero by a bound; and |sqrt(a) - sqrt(b)| is at most sqrt(|a - b|),
    and at most |a - b| / sqrt(a). Of float32, 1e-38 lost is 1e-19 of a root: softplus(-104) is 0 in it.

    >>> r = Rounding(2.0**-24, 2.0**-24)
    >>> [f"{underflow_of_root(r, torch.tensor(root)).item():.0e}" for root in (0.0, 1e-30, 1.0)]
    ['1e-19', '1e-19', '1e-38']
    """
    known = {torch.finfo(dtype).eps / 2: torch.finfo(dtype).tiny for dtype in _DTYPES}
    lost = r.u * known.get(r.u, 0.0) + known.get(r.v, 0.0)
    return lost / root.clamp_min(lost**0.5) if lost else torch.zeros_like(root)


def softmax(r: Rounding, z: Measured) -> Measured:
    """Apply softmax along the last dimension: ds_e/dl_e = s_e (1 - s_e), ds_e/dl_j = -s_e s_j.

    The sum of all exponentials is off by v for each; errors are added up as in the worst case: of ties they are alike.
    """
    s = z.value.softmax(-1)

    def inherited(error: Tensor) -> Tensor:
        return s * ((1 - 2 * s) * error + (s * error).sum(-1, keepdim=True))

    of_z = Measured(s, inherited(z.worst), inherited(z.spread))
    return r.function(s, torch.ones_like(s), r.added(of_z, of=s, n=s.shape[-1]))


def selection_scores_measured(r: Rounding, scores_TE: Measured, bias_E: Tensor | None) -> Measured:
    """Add the bias, which may have been rounded to the scores' dtype, (T, E) and (E,) -> (T, E).

    >>> selection_scores_measured(Rounding(1.0, 0.0), exact(torch.tensor([[2.0]])), torch.tensor([-1.0])).worst.item()
    2.0
    """
    if bias_E is None:
        return scores_TE
    return r.plus(scores_TE, r.stored(exact(bias_E.expand_as(scores_TE.value))))


def weights_measured(
    r: Rounding,
    logits_TE: Measured,
    ids_TK: Tensor,
    *,
    score: Score,
    normalise: bool = False,
    scale: float = 1.0,
    kept_TK: Tensor | None = None,
) -> Measured:
    """Weigh a given selection as `routing.weights` does, (T, E) and int64 (T, K) -> (T, K).

    Where slots are dropped before the weights are normalised, `kept_TK` marks the others: the sum is over these.

    >>> logits, how = exact(torch.zeros(1, 4)), {"score": "softmax", "scale": 2.0}
    >>> weights_measured(Rounding(1.0, 0.0), logits, torch.tensor([[0, 1]]), **how).worst.tolist()
    [[1.0, 1.0]]
    """
    chosen_TK = _masked(_chosen(r, logits_TE, ids_TK, score), kept_TK)
    if normalise:
        chosen_TK = quotient(r, "tk,t->tk", chosen_TK, r.total(chosen_TK, 1))
    return r.products("tk,->tk", chosen_TK, exact(torch.tensor(scale)))


def gradients_measured(
    r: Rounding,
    x_TD: Tensor,
    router_ED: Tensor,
    ids_TK: Tensor,
    dweights_TK: Tensor | Measured,
    *,
    score: Score,
    normalise: bool = False,
    scale: float = 1.0,
    places: Sequence[int] = (),
    sums: int = 0,
    forced_TE: Measured | None = None,
    kept_TK: Tensor | None = None,
) -> tuple[Measured, Measured]:
    """Take the gradient of the weights back to the tokens and the router, (T, K) -> (T, D) and (E, D).

    Rule: the derivative of each step of `routing.weights`, last step first; the upstream gradient may have
    been rounded to the weights' dtype, and may have errors of its own. For the router over all ranks, measure
    the tokens of all, `places` and `sums` as in `expert_magnitudes.Sharing`. Forced logits take the place of x W^T, and
    hand their gradient on to it as it is (`forcing_scores.straight_through`). `kept_TK` as in `weights_measured`; what
    was dropped has no gradient.

    >>> from moe_conformance.reference.routing.routes import weights
    >>> x, router, dw = (torch.arange(n).cos().double().reshape(-1, 3) for n in (15, 12, 15))
    >>> ids, how = torch.tensor([[0, 1, 3], [3, 1, 2]])[[0, 1, 0, 1, 0]], {"normalise": True, "scale": 2.5}
    >>> for score in ("softmax", "softmax_topk", "sigmoid", "sqrtsoftplus"):
    ...     leaves = [x.clone().requires_grad_(), router.clone().requires_grad_()]
    ...     w = weights(leaves[0] @ leaves[1].T, ids, score=score, **how)
    ...     ours = gradients_measured(Rounding(1.0, 1.0), x, router, ids, dw, score=score, **how)
    ...     print(all(map(torch.allclose, torch.autograd.grad(w, leaves, dw), (each.value for each in ours))))
    True
    True
    True
    True
    >>> from moe_conformance.reference.forcing.scores import straight_through
    >>> forced = torch.arange(20).sin().double().reshape(5, 4)
    >>> w = weights(straight_through(leaves[0] @ leaves[1].T, forced), ids, score="sigmoid", **how)
    >>> further = {"score": "sigmoid", "forced_TE": exact(forced)}
    >>> ours = gradients_measured(Rounding(1.0, 1.0), x, router, ids, dw, **how, **further)
    >>> all(map(torch.allclose, torch.autograd.grad(w, leaves, dw), (each.value for each in ours)))
    True
    >>> from moe_conformance.reference.capacity.after_drops import after_drop
    >>> kept, dw = ids != 1, dw * (ids != 1)
    >>> for score in ("softmax", "softmax_topk", "sigmoid", "sqrtsoftplus"):
    ...     leaves = [x.clone().requires_grad_(), router.clone().requires_grad_()]
    ...     w = weights(leaves[0] @ leaves[1].T, ids, score=score, **how)
    ...     w = after_drop(ids, w, kept, renormalise=True, scale=how["scale"]).weights_TK
    ...     ours = gradients_measured(Rounding(1.0, 1.0), x, router, ids, dw, score=score, **how, kept_TK=kept)
    ...     print(all(map(torch.allclose, torch.autograd.grad(w, leaves, dw), (each.value for each in ours))))
    True
    True
    True
    True
    """
    logits_TE = forced_TE or logits_measured(r, x_TD, router_ED)
    chosen_TK = _chosen(r, logits_TE, ids_TK, score)
    left_TK = _masked(chosen_TK, kept_TK)
    sum_T = r.total(left_TK, 1)
    upstream_TK = dweights_TK if isinstance(dweights_TK, Measured) else exact(dweights_TK)
    d_TK = _masked(r.products("tk,->tk", r.stored(upstream_TK), exact(torch.tensor(scale))), kept_TK)
    if normalise:  # w_k = s_k / S, S = sum_j s_j: dL/ds_k = (dw_k - sum_j dw_j w_j) / S
        d_TK = quotient(r, "tk,t->tk", less_mean(r, d_TK, quotient(r, "tk,t->tk", left_TK, sum_T)), sum_T)
        d_TK = _masked(d_TK, kept_TK)
    if score == "softmax_topk":
        dlogits_TE = _scatter(r.products("tk,tk->tk", chosen_TK, less_mean(r, d_TK, chosen_TK)), ids_TK, logits_TE)
    elif score == "softmax":
        s_TE = softmax(r, logits_TE)
        dlogits_TE = r.products("te,te->te", s_TE, less_mean(r, _scatter(d_TK, ids_TK, logits_TE), s_TE))
    else:
        slope_TE = slope(r, logits_TE, score)
        dlogits_TE = r.products("te,te->te", _scatter(d_TK, ids_TK, logits_TE), slope_TE)
    drouter_ED = r.products("te,td->ed", dlogits_TE, exact(x_TD))
    parts_ED = parts_of("te,td->ed", dlogits_TE, exact(x_TD), "t", places or [len(x_TD)])
    return (
        r.products("te,ed->td", dlogits_TE, exact(router_ED)),
        r.stored(drouter_ED, of=partial(drouter_ED.value, parts_ED), times=sums),
    )


def quotient(r: Rounding, formula: str, a: Measured, b: Measured) -> Measured:
    """Divide by a positive number, in einsum's letters; 0 where b is 0, as `routing.weights` has it.

    >>> r, b = Rounding(1.0, 0.0), exact(torch.tensor([2.0, 0.0]))
    >>> quotient(r, "i,i->i", exact(torch.tensor([6.0, 0.0])), r.stored(b)).worst.tolist()
    [6.0, 0.0]
    """
    inverse = torch.where(b.value > 0, 1 / torch.where(b.value > 0, b.value, 1.0), 0.0)
    squared = inverse.square()
    return r.products(formula, a, Measured(inverse, squared * b.worst, squared * b.spread))


def less_mean(r: Rounding, d: Measured, share: Measured) -> Measured:
    """Subtract from every d_k the mean sum_j d_j share_j of its row.

    Errors of ties are alike, so no sum of squares. Both may be stored once more, where what follows is done to each.
    """
    mean = r.total(r.products("tk,tk->tk", d, share), 1)
    mean_TK = Measured(*(each[:, None].expand_as(d.value) for each in (mean.value, mean.worst, mean.spread)))
    return r.plus(r.stored(d), -r.stored(mean_TK))


def slope(r: Rounding, logits_TE: Measured, score: Score) -> Measured:
    """Differentiate sigmoid, s (1 - s), or sqrtsoftplus, sigmoid / (2 s); both are computed from rounded factors."""
    sigmoid_TE = scores_measured(r, logits_TE, "sigmoid")
    if score == "sigmoid":
        s_TE = sigmoid_TE.value
        value = s_TE * (1 - s_TE)
        return r.function(value, 1 - 2 * s_TE, sigmoid_TE, own=2 * value)
    root_TE = scores_measured(r, logits_TE, score)
    return quotient(r, "te,te->te", sigmoid_TE, Measured(2 * root_TE.value, 2 * root_TE.worst, 2 * root_TE.spread))


def _chosen(r: Rounding, logits_TE: Measured, ids_TK: Tensor, score: Score) -> Measured:
    """Return the scores of the selected (T, K), for "softmax_topk" their softmax."""
    s_TE = scores_measured(r, logits_TE, score)
    chosen_TK = Measured(*(each.gather(1, ids_TK) for each in (s_TE.value, s_TE.worst, s_TE.spread)))
    if score == "softmax_topk":
        chosen_TK = softmax(r, chosen_TK)
    return chosen_TK


def _masked(measured_TK: Measured, kept_TK: Tensor | None) -> Measured:
    """Return exact zeros where `kept_TK` is False, and everything as it is without it."""
    if kept_TK is None:
        return measured_TK
    parts = (measured_TK.value, measured_TK.worst, measured_TK.spread)
    return Measured(*(torch.where(kept_TK, each, 0.0) for each in parts))


def _scatter(d_TK: Measured, ids_TK: Tensor, like_TE: Measured) -> Measured:
    """Put the selected into their places among all E, zeros elsewhere."""
    zero_TE = torch.zeros_like(like_TE.value)
    return Measured(*(zero_TE.scatter(1, ids_TK, each) for each in (d_TK.value, d_TK.worst, d_TK.spread)))
