"""Extreme routing: logits that are huge, or mask an expert with -inf.

Many scores underflow to one value there, and several answers are allowed. So these functions judge answers
instead of giving one. Logits that are no numbers are in `bad_tokens.py`.

Sources: arithmetic, 0/0 in a normalisation; behaviour of SGLang's fused top-k on underflowed scores.
"""

from __future__ import annotations

from math import inf, isfinite

import torch
from torch import Tensor

from moe_conformance.reference.forcing.routes import legal_ids as are_routes
from moe_conformance.reference.routing.routes import Score, scores


def legal_ids(
    logits_TE: Tensor,
    ids_TK: Tensor,
    *,
    score: Score,
    bias_E: Tensor | None = None,
    among_TE: Tensor | None = None,
    error: float = 2.0**-126,
) -> Tensor:
    """Say of every token whether its choice respects masks, (T, E), int64 (T, K) -> bool (T,).

    Args:
        logits_TE: finite, or -inf to mask an expert.
        ids_TK: what was chosen.
        score: the score function.
        bias_E: the expert bias, if any.
        among_TE: bool, the experts that groups leave to choose from (`selection.group_mask`); all by default.
        error: by how much a selection score may be wrong; scores below the default underflow in float32.

    Rule: K different ids in 0..E-1, and no masked expert among them whose selection score is more than
    2 `error` below that of an unmasked one that was left out. A masked expert scores 0, or -inf with softmax
    over the selected; a bias is added to that.

    Degenerate: where every logit of a token is -inf, any K different experts are allowed.

    Raises:
        ValueError: a NaN or +inf, another T, K outside 1..E, a negative error.

    Decides: ROUTE-14. Source: definition of a mask; arithmetic, scores that underflow tie with it.

    >>> logits, ids = torch.tensor([[0.0, -torch.inf, -9.0]] * 3), torch.tensor([[2, 0], [1, 0], [2, 2]])
    >>> legal_ids(logits, ids, score="softmax").tolist()
    [True, False, False]
    >>> logits[:, 2] = -1e30
    >>> legal_ids(logits, ids, score="softmax").tolist(), legal_ids(logits, ids, score="softmax_topk").tolist()
    ([True, True, False], [True, False, False])
    """
    l_TE, E = _checked(logits_TE, ids_TK), logits_TE.shape[1]
    if not error >= 0:
        raise ValueError(f"an error of {error} is not at least 0")
    selection_TE = _scores(l_TE, score)  # (T, E)
    if among_TE is not None and among_TE.shape != l_TE.shape:
        raise ValueError(f"experts to choose among {tuple(among_TE.shape)} for logits {tuple(l_TE.shape)}")
    if bias_E is not None:
        selection_TE = selection_TE + bias_E.double()  # (T, E)
    legal = are_routes(ids_TK, E).tolist()  # T
    for t, chosen in enumerate(ids_TK.tolist()):
        l_E, s_E = l_TE[t].tolist(), selection_TE[t].tolist()
        masked = [s_E[e] for e in chosen if legal[t] and l_E[e] == -inf]
        among = range(E) if among_TE is None else among_TE[t].nonzero()[:, 0].tolist()
        left_out = [s_E[e] for e in among if e not in chosen and l_E[e] > -inf]
        if masked and left_out:
            legal[t] = max(left_out) - min(masked) <= 2 * error
    return torch.tensor(legal, dtype=torch.bool)  # (T,)


def legal_weights(
    logits_TE: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor,
    *,
    score: Score,
    normalise: bool = False,
    scale: float = 1.0,
    rounding: float = 2.0**-20,
) -> Tensor:
    """Say of every token whether its weights are allowed ones at all, (T, K) -> bool (T,).

    Rule: finite, and 0 where the selected logit is -inf. With normalisation, or softmax over the selected, their
    sum is `scale` within a relative `rounding` where the selected scores sum to more than 1e-12, and between 0
    and that where they do not: an epsilon in the division may have taken any part of it.

    Degenerate: where all K selected logits are -inf, any finite weights are allowed.

    Raises:
        ValueError: as `legal_ids`; ids that are no K different experts, a scale of 0 or below.

    Decides: ROUTE-14. Source: arithmetic, 0/0 in a normalisation.

    >>> logits, ids = torch.tensor([[0.0, -torch.inf, -1e30]] * 3), torch.tensor([[0, 1]] * 3)
    >>> w = torch.tensor([[2.0, 0.0], [1.5, 0.5], [1.0, 0.0]])
    >>> legal_weights(logits, ids, w, score="sigmoid", normalise=True, scale=2.0).tolist()
    [True, False, False]
    """
    l_TE = _checked(logits_TE, ids_TK)
    if not bool(are_routes(ids_TK, l_TE.shape[1]).all()) or weights_TK.shape != ids_TK.shape or not scale > 0:
        weighed = f"weights {tuple(weights_TK.shape)} of ids {ids_TK.tolist()}"
        raise ValueError(f"{weighed}, scale {scale}: need one for each of K different experts, and a scale above 0")
    chosen_TK = l_TE.gather(1, ids_TK)  # (T, K)
    ones_T = torch.ones(len(l_TE), dtype=torch.float64)  # (T,)
    sum_T = ones_T if score == "softmax_topk" else _scores(l_TE, score).gather(1, ids_TK).sum(dim=1)  # (T,)
    legal = []
    for l_K, w_K, sum_of_scores in zip(chosen_TK.tolist(), weights_TK.tolist(), sum_T.tolist(), strict=True):
        decided = max(l_K) > -inf
        at_masks = [w for logit, w in zip(l_K, w_K, strict=True) if logit == -inf]
        fine = all(isfinite(w) for w in w_K) and not (decided and any(at_masks))
        if fine and decided and (normalise or score == "softmax_topk"):
            lowest = scale * (1 - rounding) if sum_of_scores > 1e-12 else 0.0
            fine = lowest <= sum(w_K) <= scale * (1 + rounding)
        legal.append(fine)
    return torch.tensor(legal, dtype=torch.bool)  # (T,)


def finite_gradients(dlogits_TE: Tensor) -> Tensor:
    """Say of every token whether the gradient of its logits is finite, (T, E) -> bool (T,).

    Decides: ROUTE-14. Source: arithmetic, 0/0 in a normalisation, 1/0 in the slope of a root.

    >>> finite_gradients(torch.tensor([[0.0, 1e30], [0.0, torch.nan]])).tolist()
    [True, False]
    """
    return dlogits_TE.isfinite().all(dim=1)  # (T,)


def _scores(l_TE: Tensor, score: Score) -> Tensor:
    """Score the experts, (T, E); where all are masked, by the value of that, 0 or -inf."""
    nothing_left_T1 = (l_TE == -inf).all(dim=1, keepdim=True)  # (T, 1)
    s_TE = scores(torch.where(nothing_left_T1, 0.0, l_TE), score)  # (T, E)
    return torch.where(nothing_left_T1, -inf if score == "softmax_topk" else 0.0, s_TE)  # (T, E)


def _checked(logits_TE: Tensor, ids_TK: Tensor) -> Tensor:
    """Return the logits, (T, E), or raise where they are no numbers or do not fit the ids."""
    (T, E), K = logits_TE.shape, ids_TK.shape[1]
    if len(ids_TK) != T or not 1 <= K <= E:
        raise ValueError(f"ids {tuple(ids_TK.shape)} for logits {(T, E)}: need as many tokens, and K in 1..E")
    if bool((logits_TE.isnan() | (logits_TE == inf)).any()):
        raise ValueError("a logit is NaN or +inf: ask bad_tokens.py about its token")
    return logits_TE.double()  # (T, E)
