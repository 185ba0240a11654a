"""Routing: which K of E experts a token goes to, and with which weights.

Compute the logits by a linear gate, score them, select by score plus bias (`selection.py`), weigh by score. Selecting
and weighing are kept apart, so that a judge can weigh *any* selection: where two experts nearly tie, an implementation
may also select the other.

Sources: Switch Transformer section 2.1 and GShard section 2.2 (softmax over all, then top-k); Shazeer et
al. 2017 section 2.1 and Mixtral section 2.1 (softmax over the selected logits); DeepSeek-V3 section 2.1.2
(sigmoid; the bias that takes part in the selection only); DeepSeek-V4 (square root of softplus); behaviour of GPT-OSS
routers (OpenAI 2025), whose gate is a linear layer with a bias.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

import torch
from torch import Tensor

from moe_conformance.reference.routing import selection
from moe_conformance.reference.routing.selection import GroupScore, group_mask, select

__all__ = ["GroupScore", "Routed", "Score", "group_mask", "logits", "margins", "route", "scores", "select"]
__all__ += ["selection_scores", "weights"]

Score = Literal["softmax", "softmax_topk", "sigmoid", "sqrtsoftplus"]


@dataclass(frozen=True)
class Routed:
    """A selection, int64 (T, K), sorted by descending selection score, and its weights, float64 (T, K)."""

    ids_TK: Tensor
    weights_TK: Tensor


def scores(logits_TE: Tensor, score: Score) -> Tensor:
    """Score every expert for every token, (T, E) -> (T, E), differentiable in the logits.

    Rule: softmax(l) over the E experts, sigmoid(l), sqrt(log(1 + exp(l))), or, for "softmax_topk", l
    itself: there the softmax runs over the K selected logits, in `weights`.

    Degenerate: a logit of -inf (a masked expert) scores 0 with gradient 0, and -inf for "softmax_topk". A
    NaN, a +inf or, for either softmax, a row of nothing but -inf is an error: a NaN returned here would
    agree with any NaN that an implementation returns. T = 0 gives (0, E).

    Decides: ROUTE-02. Source: definition of the score functions.

    >>> scores(torch.tensor([[0.0, 0.0, -torch.inf]]), "softmax").tolist()
    [[0.5, 0.5, 0.0]]
    >>> scores(torch.tensor([[0.0, -torch.inf]]), "sigmoid").tolist()
    [[0.5, 0.0]]
    """
    l_TE = logits_TE.double()  # (T, E)
    if bool((l_TE.isnan() | (l_TE == inf)).any()):
        raise ValueError("a logit is NaN or +inf, which has no score; give finite logits, or -inf to mask an expert")
    if score in ("softmax", "softmax_topk") and bool((l_TE == -inf).all(dim=1).any()):
        raise ValueError("every logit of a token is -inf: its softmax is 0/0; leave it an expert")
    if score == "softmax":
        return l_TE.softmax(dim=1)  # (T, E)
    if score == "softmax_topk":
        return l_TE  # (T, E)
    if score == "sigmoid":
        return l_TE.sigmoid()  # (T, E)
    if score == "sqrtsoftplus":
        softplus_TE = torch.logaddexp(l_TE, torch.zeros_like(l_TE))  # (T, E); F.softplus is inexact beyond 20
        positive_TE = softplus_TE > 0  # (T, E); the root's slope at 0 is infinite, and inf * 0 is NaN
        return torch.where(positive_TE, torch.where(positive_TE, softplus_TE, 1.0).sqrt(), 0.0)  # (T, E)
    raise ValueError(f"score {score!r} is none of {Score}")


def selection_scores(logits_TE: Tensor, *, score: Score, bias_E: Tensor | None = None) -> Tensor:
    """Say by what the experts are selected, (T, E) -> (T, E).

    Rule: score plus bias. The expert bias is added to the score, not to the logit, and takes part in the selection
    only (DeepSeek-V3 equation 16). Without a bias these are the `scores`.

    Decides: ROUTE-01, ROUTE-03. Source: DeepSeek-V3 section 2.1.2 (a bias that selects).

    >>> selection_scores(torch.zeros(1, 2), score="sigmoid", bias_E=torch.tensor([-1.0, 0.25])).tolist()
    [[-0.5, 0.75]]
    """
    s_TE = scores(logits_TE, score)  # (T, E)
    return s_TE if bias_E is None else s_TE + bias_E.double()  # (T, E)


def weights(logits_TE: Tensor, ids_TK: Tensor, *, score: Score, normalise: bool = False, scale: float = 1.0) -> Tensor:
    """Weigh any given selection, (T, E) and int64 (T, K) -> (T, K), differentiable in the logits.

    Rule: take the selected experts' scores without the bias (for "softmax_topk" the softmax of the K selected
    logits); if `normalise`, divide them by their sum; then, normalised or not and once, multiply by
    `scale`.

    The division is exact: the 1e-20 that libraries add to the sum shows in float32 only for sums below
    about 1e-13. A sum of 0 (every selected score underflowed or masked) gives weights 0, as their epsilon
    does: a token that likes no expert must not become NaN. K = 1 normalised is 1, with gradient 0; a
    library that does not divide at K = 1 means `normalise=False` there. An empty slot (-1) is an error:
    weigh first, drop afterwards.

    Decides: DROP-04, ROUTE-02, ROUTE-03, ROUTE-05, ROUTE-06, ROUTE-07, ROUTE-08. Source: definition; chain rule.

    >>> logits, ids = torch.tensor([[0.0, 9.0, 0.0]]), torch.tensor([[0, 2]])
    >>> weights(logits, ids, score="sigmoid", normalise=True, scale=3.0).tolist()
    [[1.5, 1.5]]
    """
    if bool((ids_TK < 0).any()):
        raise ValueError("ids hold an empty slot (-1): weigh the selection first, drop afterwards")
    chosen_TK = scores(logits_TE, score).gather(1, ids_TK)  # (T, K)
    if score == "softmax_topk":
        if bool((chosen_TK == -inf).all(dim=1).any()):
            raise ValueError("every chosen logit of a token is -inf: their softmax is 0/0")
        chosen_TK = chosen_TK.softmax(dim=1)  # (T, K)
    if normalise:
        sum_T1 = chosen_TK.sum(dim=1, keepdim=True)  # (T, 1)
        chosen_TK = chosen_TK / torch.where(sum_T1 > 0, sum_T1, 1.0)  # (T, K)
    return scale * chosen_TK  # (T, K)


def route(
    logits_TE: Tensor,
    *,
    top_k: int,
    score: Score,
    normalise: bool = False,
    scale: float = 1.0,
    bias_E: Tensor | None = None,
    groups: tuple[int, int] | None = None,
    group_score: GroupScore = "top2_sum",
) -> Routed:
    """Route every token, (T, E) -> (T, K): `select` by `selection_scores`, then `weights` of that selection.

    Rule: bias and groups decide which experts are selected; only the scores of the selected decide what they weigh.

    >>> bias = torch.tensor([-9.0, 0.0, 0.0])
    >>> routed = route(torch.tensor([[3.0, 2.0, 2.0]]), top_k=2, score="softmax_topk", bias_E=bias)
    >>> routed.ids_TK.tolist(), routed.weights_TK.tolist()
    ([[1, 2]], [[0.5, 0.5]])
    """
    selection_TE = selection_scores(logits_TE, score=score, bias_E=bias_E)  # (T, E)
    ids_TK = select(selection_TE, top_k=top_k, groups=groups, group_score=group_score)  # (T, K)
    return Routed(ids_TK, weights(logits_TE, ids_TK, score=score, normalise=normalise, scale=scale))


def margins(
    logits_TE: Tensor,
    ids_TK: Tensor | None = None,
    *,
    top_k: int,
    score: Score,
    bias_E: Tensor | None = None,
    groups: tuple[int, int] | None = None,
    group_score: GroupScore = "top2_sum",
) -> Tensor:
    """Measure how clearly a selection wins, (T, E) -> (T,), in selection scores; see `selection.margins`.

    Rule: of `ids_TK`, or of what `route` would choose if None. `route`'s own margins are never negative; a
    judge accepts other ids whose margin is at least -2d where the implementation's selection scores are
    within d of these.

    >>> margins(torch.tensor([[4.0, 3.0, 1.0]]), top_k=2, score="softmax_topk").tolist()
    [2.0]
    """
    selection_TE = selection_scores(logits_TE, score=score, bias_E=bias_E)  # (T, E)
    if ids_TK is None:
        ids_TK = select(selection_TE, top_k=top_k, groups=groups, group_score=group_score)  # (T, K)
    if ids_TK.shape[1] != top_k:
        raise ValueError(f"ids have {ids_TK.shape[1]} slots for top_k = {top_k}")
    return selection.margins(selection_TE, ids_TK, groups=groups, group_score=group_score)  # (T,)


def logits(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
    """Compute the logits, (T, D), (E, D) and (E,) -> float64 (T, E), differentiable in all three.

    Rule: l_te = sum_d x_td W_ed + c_e, used for selection and weights alike.

    Degenerate: c = 0 changes no value, and has a gradient. T = 0 gives (0, E).

    Decides: ROUTE-10, ROUTE-11, ROUTE-19. Source: chain rule; behaviour of GPT-OSS routers.

    >>> import torch
    >>> logits(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 1.0], [0.0, 1.0]]), torch.tensor([0.5, -1.0])).tolist()
    [[5.5, 1.0]]
    """
    l_TE = x_TD.double() @ weight_ED.double().T  # (T, E)
    return l_TE if bias_E is None else l_TE + bias_E.double()  # (E,) over all tokens
