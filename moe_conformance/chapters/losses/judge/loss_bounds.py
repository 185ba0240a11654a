"""Error bounds of losses and their gradients, computed from the router's logits in float32.

T tokens, E experts. The terms of a loss are all positive, so its error is relative to the loss. Those of a gradient are
not, and its error is relative to the sum of their magnitudes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_conformance.chapters.losses.judge.loss_rules import IS_GLOBAL, Part, Steps
from moe_conformance.judging.compare.bounds import unit_roundoff
from moe_conformance.reference.losses.balance import normalised_scores

_DEPTH = 64  # operations from logits to a loss or a gradient, without sums
_NARROW = 3  # roundings of routing weights in half precision, beside a sum over slots: of score, quotient and scale


def roundoff(steps: Steps) -> float:
    """Return the relative error of all operations together: sums over tokens and experts, and all others."""
    wide = torch.promote_types(steps.config.dtype, torch.float32)
    terms = sum(len(part.logits_TE) for row in steps.parts for part in row) + 4 * steps.config.experts
    return unit_roundoff(wide) * (terms + _DEPTH)


def value_bound(steps: Steps, name: str, value: Tensor) -> Tensor:
    """Return the allowed error of a loss, or of a mean of losses.

    That of a z-loss includes the errors of the exponentials of logits.
    """
    if name != "z":
        return roundoff(steps) * value.abs()
    finite = [part.logits_TE.masked_fill(part.logits_TE.isinf(), 0.0) for row in steps.parts for part in row]
    largest = max((float(logits.abs().max()) for logits in finite if logits.numel()), default=0.0) + 4.0
    # (Z + d)^2 - Z^2 with |d| a few roundings of the largest logit.
    return roundoff(steps) * (value.abs() + steps.coefficient("z") * largest**2)


def slope_bound(steps: Steps, name: str, part: Part) -> Tensor:
    """Return the allowed error of the gradient of a loss with respect to the logits of a part, (T, E)."""
    logits_TE = part.logits_TE
    p_TE = logits_TE.softmax(1)
    if name == "z":
        Z_T1 = logits_TE.logsumexp(1, keepdim=True).abs() + logits_TE.abs().amax(1, keepdim=True)
        return roundoff(steps) * 2 * steps.coefficient("z") * (Z_T1 + 1) * p_TE / max(1, _valid(steps, name, part))
    p_TE = normalised_scores(logits_TE, steps.config.routing.score)
    # |dL/dl_te| <= c E / V p_te (f_e + sum_e' f_e' p_te'), and no fraction is above 1; K where fractions are of tokens.
    most = steps.config.top_k if steps.rule.fractions == "tokens" else 1
    size_TE = steps.coefficient(name) * steps.config.experts * most * 2 * p_TE
    fewest = _fewest(steps, name, part)
    return roundoff(steps) * size_TE / max(1, fewest)


def _valid(steps: Steps, name: str, part: Part) -> int:
    if name == IS_GLOBAL:
        rows = [row for row in steps.parts if any(part is other for other in row)]
        return min((sum(other.valid for other in row) for row in rows), default=1)
    return min(part.valid, *(_of_rank(part, number) for number in range(len(part.ranks))))


def _fewest(steps: Steps, name: str, part: Part) -> int:
    """Return the smallest number of tokens that a term is divided by."""
    if name != "sequence":
        return _valid(steps, name, part) if name == IS_GLOBAL else part.valid
    valid_T = torch.ones(len(part.logits_TE), dtype=torch.bool) if part.padding_T is None else ~part.padding_T
    sizes = [int((valid_T & (part.sequences_T == label)).sum()) for label in part.sequences_T.unique()]
    return min((size for size in sizes if size), default=1)


def _of_rank(part: Part, number: int) -> int:
    if part.padding_T is None:
        return part.tokens[number]
    return max(1, int((~part.of_rank(part.padding_T, number)).sum()))


def main_slope_bound(steps: Steps, part: Part) -> Tensor:
    """Return the allowed error of the gradient of the main loss with respect to a part's logits, (T, E).

    Losses are computed in float32 at least. Of the routing weights nothing of that kind is said: scores, weights, their
    sum over K and the gradients of these may be in the dtype of the tokens.
    """
    if not bool(part.upstream_TK.any()):
        return torch.zeros_like(part.logits_TE)
    ids_TK = part.ids_TK.clamp_min(0)
    w_TK = steps.weigh(part)(part.logits_TE)
    through_TK = (w_TK * part.upstream_TK).abs()
    p_TE = part.logits_TE.softmax(1) + torch.zeros_like(part.logits_TE).scatter_add(1, ids_TK, w_TK)
    direct_TE = torch.zeros_like(part.logits_TE).scatter_add(1, ids_TK, through_TK)
    allowed = roundoff(steps)
    if (dtype := steps.config.dtype).itemsize < torch.float32.itemsize:
        allowed += unit_roundoff(dtype) * (steps.config.top_k + _NARROW)
    return allowed * 2 * (direct_TE + through_TK.sum(1, keepdim=True) * p_TE)
