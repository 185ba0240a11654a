"""Calls the second oracle of losses as the recipe of its golden calls the first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from self_tests.chapters.losses.second import balance, scaling
from self_tests.chapters.losses.second.balance import Loss, Tokens
from self_tests.chapters.routing.golden import ORACLE as ROUTING
from self_tests.chapters.routing.golden import gate_of, limit_of
from self_tests.goldens.second_oracles import arrays, differentiable, second_oracle, tensors, with_tensors


def loss(function: Callable[..., Loss]) -> Any:
    """A loss of logits with its gradient."""
    return differentiable(
        lambda *arguments, **options: function(*arguments, **options).value,
        lambda g, *arguments, **options: [g * function(*arguments, **options).gradient_TE],
    )


def auxiliary(logits_TE: Any, ids_TK: Any, *, score: Any, coefficient: float, padding_T: Any = None) -> Loss:
    """The balance loss of a microbatch."""
    return balance.auxiliary(Tokens(logits_TE, ids_TK, padding_T), score, coefficient)


def by_sequence(
    logits_TE: Any,
    ids_TK: Any,
    sequences_T: Any,
    *,
    score: Any,
    coefficient: float,
    padding_T: Any,
    divisor: int | None = None,
) -> Loss:
    """The balance loss of its sequences."""
    return balance.by_sequence(Tokens(logits_TE, ids_TK, padding_T), sequences_T, score, coefficient, divisor)


def over_a_step(
    logits: Any, ids: Any, *, score: Any, coefficient: float, padding: Any = None, remembers: bool = True
) -> list[tuple[float, list[Any]]]:
    """The global losses of a step, each with its gradients."""
    masks = [[None] * len(row) for row in logits] if padding is None else padding
    step = [[Tokens(*part) for part in zip(*row, strict=True)] for row in zip(logits, ids, masks, strict=True)]
    return balance.over_a_step(step, score, coefficient, remembers=remembers)


def z_of_parts(logits: Any, *, coefficient: float, padding_by_rank: Any) -> tuple[float, list[Any]]:
    """The mean of the z-losses of ranks, with its gradients."""
    masks = [None] * len(logits) if padding_by_rank is None else padding_by_rank
    return balance.z_of_parts(list(zip(logits, masks, strict=True)), coefficient)


@with_tensors
def attached_gradient(
    logits_TE: Any, weigh: partial[Any], upstream_TK: Any, losses: Sequence[Callable[[Any], Any]], *, scale: float = 1.0
) -> Any:
    """The gradient of the logits, from that of the weights and those of the losses."""
    how = dict(weigh.keywords)
    ids_TK = how.pop("ids_TK")
    charges = []
    for charge in losses:
        leaf_TE = logits_TE.clone().requires_grad_()
        value = charge(leaf_TE)
        charges.append(Loss(value.item(), arrays(torch.autograd.grad(value, leaf_TE)[0])))
    logits_TE, ids_TK, upstream_TK = arrays((logits_TE, ids_TK, upstream_TK))
    gate = gate_of(ids_TK.shape[1], **how)
    return tensors(scaling.attached(logits_TE, ids_TK, gate, upstream_TK, charges, scale))


ORACLE = second_oracle(
    normalised_scores=lambda logits_TE, score: balance.shares(score, logits_TE),
    choices=lambda logits_TE, *, score, top_k, padding_T, **limit: balance.own_choices(
        score, logits_TE, top_k, limit_of(limit.get("groups"), limit.get("group_score")), padding_T
    ),
    choice_counts=lambda ids_TK, experts, *, padding_T: balance.count_choices(ids_TK, experts, padding_T),
    auxiliary_loss=loss(auxiliary),
    sequence_loss=loss(by_sequence),
    z_loss=loss(lambda logits_TE, *, coefficient, padding_T=None: balance.z(logits_TE, coefficient, padding_T)),
    global_losses=differentiable(
        lambda *step, **how: np.array([value for value, _ in over_a_step(*step, **how)], dtype=np.float64),
        lambda g_M, *step, **how: [
            g * dlogits_TE for g, (_, back) in zip(g_M, over_a_step(*step, **how), strict=True) for dlogits_TE in back
        ],
    ),
    z_loss_of_parts=differentiable(
        lambda logits, **how: z_of_parts(logits, **how)[0],
        lambda g, logits, **how: [g * dlogits_TE for dlogits_TE in z_of_parts(logits, **how)[1]],
    ),
    whole=scaling.put_together,
    mean_gradient=scaling.mean,
    sum_gradient=lambda table, *, scale: scaling.scaled_sum(table, scale),
    token_gradient=scaling.by_tokens,
    attached_gradient=attached_gradient,
    router_gradients=scaling.through_router,
    route=ROUTING.route,
    weights=gate_of,  # it is not called: attached_gradient takes its arguments
    model_loss=scaling.of_model,
    reported=scaling.report,
    training_forwards=scaling.counted_forwards,
)
