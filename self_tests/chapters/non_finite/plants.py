"""EXCH: bugs that show beside tokens that are not finite: zero times NaN, and repairs that hide them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_conformance.backends.native.exchange.dispatchers import AllToAllExchange, Permuted
from moe_conformance.backends.native.layer.experts import Experts, swiglu
from moe_conformance.contract import Delivery, Routing
from self_tests.planted_bugs.plant import Expectation, planted


@planted(
    Expectation("EXCH-41", "spoilt-tokens-even", "combine", "y of rank 1 token 0 is nan", "the token is finite, and"),
    Expectation(
        "EXCH-41", "own-spoilt-tokens-even", "combine", "y of rank 1 token 0 is nan", "the token is finite, and"
    ),
)
class CombineByOneHotMatrix(AllToAllExchange):
    """Answers are added up by a product with a one-hot matrix, in which zero times NaN reaches every token."""

    def _unpermute(self, rows_PD: Tensor, permuted: Permuted) -> Tensor:
        tokens = permuted.pairs.shape[0]
        one_hot_TP = torch.arange(tokens)[:, None] == permuted.pairs.token_P
        weighed_PD = self._weigh(rows_PD, permuted.weights_P)
        return (one_hot_TP.to(rows_PD.dtype) @ weighed_PD).reshape(permuted.shape)


@planted(
    Expectation("EXCH-41", "spoilt-upstream-even", "gradient", "dx of rank 1 token 0 is nan", "rank 1 token 1, rank")
)
class DispatchBackwardByOneHotMatrix(AllToAllExchange):
    """Tokens are copied right, but their gradients are added up by a product with a one-hot matrix."""

    def _permute(self, x: Tensor, routing: Routing, room: int | None) -> tuple[Tensor, Permuted]:
        rows_PD, permuted = super()._permute(x, routing, room)
        one_hot_TP = (torch.arange(permuted.pairs.shape[0])[:, None] == permuted.pairs.token_P).to(x.dtype)
        return _Copied.apply(x.reshape(-1, x.shape[-1]), rows_PD.detach(), one_hot_TP), permuted  # type: ignore[no-untyped-call]


class _Copied(torch.autograd.Function):
    """The rows as they are; the gradient goes to the tokens by a product."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, rows_PD: Tensor, one_hot_TP: Tensor) -> Tensor:
        ctx.one_hot_TP = one_hot_TP
        return rows_PD.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.one_hot_TP @ gradient, None, None


@planted(
    Expectation(
        "EXCH-41", "spoilt-tokens-even", "combine", "rank 1 token 1 is NaN", "but its y is finite; expected: non-finite"
    )
)
class TokensRepaired(AllToAllExchange):
    """Tokens that are no numbers become zero before they are sent, and a run that has diverged looks sound."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        return super().dispatch(x.nan_to_num(0.0, 0.0, 0.0), routing)


@planted(
    Expectation("EXCH-41", "spoilt-dropped-even", "combine", "y of rank 1 token 0 is nan", "the token has no slot"),
    Expectation("EXCH-42", "own-spoilt-dropped-even", "gradient", "of expert 0 on rank 0 is nan instead of"),
    real="huggingface/transformers PR #48205",
)
class EmptySlotsWeighZero(AllToAllExchange):
    """An empty slot goes to expert 0 with a weight of zero, and zero times NaN is NaN."""

    def dispatch(self, x: Tensor, routing: Routing) -> tuple[Delivery, Any]:
        weights_TK = routing.weights_TK * (routing.ids_TK >= 0)
        return super().dispatch(x, replace(routing, ids_TK=routing.ids_TK.clamp_min(0), weights_TK=weights_TK))


@planted(
    Expectation("EXCH-41", "own-spoilt-tokens-even", "gradient", "of expert 1 on rank 0 is nan instead of"),
    real="huggingface/transformers PR #48205",
)
class EveryExpertMeetsEveryRow(Experts):
    """Experts run on the rows of others too, which then count zero times; parameters' gradients are NaN for it."""

    def _loop(self, rows_PD: Tensor, counts_N: list[int]) -> Tensor:
        counts = torch.tensor(counts_N)
        expert_P = torch.arange(len(counts_N)).repeat_interleave(counts)
        weights = zip(self.gate_NFD.unbind(), self.up_NFD.unbind(), self.down_NDF.unbind(), strict=True)
        outs = [(expert_P == n).unsqueeze(1) * swiglu(rows_PD, *w) for n, w in enumerate(weights)]
        return torch.stack(outs).sum(0)
