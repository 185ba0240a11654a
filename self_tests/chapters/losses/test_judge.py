"""Bounds of losses: honest float32 stays within them for logits of any dtype, a bug or a narrower dtype does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from moe_conformance.judging.compare import bounds
from moe_conformance.judging.compare.bounded import compare
from moe_conformance.reference.losses.balance import auxiliary_loss, choice_counts, choices
from moe_conformance.reference.losses.z_loss import z_loss
from moe_conformance.reference.rounding.errors import Measured
from moe_conformance.reference.rounding.loss_magnitudes import charge_measured, z_measured
from moe_conformance.reference.routing import routes

SCORES = get_args(routes.Score)
SIZES = [(1, 5, 2), (37, 4, 1), (101, 60, 8)]  # T, E, K
C = 0.01
FLOAT32 = bounds.rounding(torch.float32)

Loss = Callable[[Tensor], Tensor]


def drawn_logits(T: int, E: int, dtype: torch.dtype, spread: float = 3.0) -> Tensor:
    """Logits as a router stores them: leaning towards the first experts, none near a tie of the others."""
    random = torch.Generator().manual_seed(1000 * T + E)
    return (spread * torch.randn(T, E, generator=random) - torch.arange(E) / E).to(dtype)


def honest_scores(logits_TE: Tensor, score: routes.Score) -> Tensor:
    """Normalised scores in the dtype of the logits, with the operations that libraries use."""
    if score in ("softmax", "softmax_topk"):
        return logits_TE.softmax(dim=1)
    s_TE = logits_TE.sigmoid() if score == "sigmoid" else torch.nn.functional.softplus(logits_TE).sqrt()
    return s_TE / (s_TE.sum(dim=1, keepdim=True) + 1e-20)


def honest_balance(ids_TK: Tensor, score: routes.Score, dtype: torch.dtype) -> Loss:
    """The auxiliary loss as libraries compute it: sums first, one factor last."""

    def loss(logits_TE: Tensor) -> Tensor:
        T, E = logits_TE.shape
        n_E = choice_counts(ids_TK, E).to(dtype)
        summed = (honest_scores(logits_TE.to(dtype), score).sum(dim=0) * n_E).sum()
        return summed * (E * C / (ids_TK.shape[1] * T * T))

    return loss


def honest_z(dtype: torch.dtype) -> Loss:
    """The z-loss as libraries compute it."""
    return lambda logits_TE: logits_TE.to(dtype).logsumexp(dim=1).square().mean() * C


def worst_ratios(logits_TE: Tensor, loss: Loss, measured: tuple[Measured, Measured]) -> tuple[float, float]:
    """Observed / allowed error in float32 of the value and of the gradient, as float32 sees the logits."""
    leaf_TE = logits_TE.detach().float().clone().requires_grad_()
    value = loss(leaf_TE)
    (gradient_TE,) = torch.autograd.grad(value, leaf_TE)
    T, E = logits_TE.shape
    value_ratio, gradient_ratio = (
        compare(actual.detach(), of.value, bounds.allowed(of.error, torch.float32, addends=E + T)).ratio
        for actual, of in zip((value, gradient_TE), measured, strict=True)
    )
    return value_ratio, gradient_ratio


def balance_measured(logits_TE: Tensor, ids_TK: Tensor, score: routes.Score) -> tuple[Measured, Measured]:
    """The measured auxiliary loss and gradient."""
    f_E = choice_counts(ids_TK, logits_TE.shape[1]).double() / ids_TK.numel()
    return charge_measured(FLOAT32, logits_TE, f_E, score=score, coefficient=C)


class TestHonestFloat32IsWithin:
    @pytest.mark.parametrize("score", SCORES)
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_of_balance_losses(self, score: routes.Score, dtype: torch.dtype) -> None:
        """Value and gradient are within their bounds, and these are loose by less than two orders."""
        found = []
        for T, E, K in SIZES:
            logits_TE = drawn_logits(T, E, dtype)
            ids_TK = choices(logits_TE, score=score, top_k=K)
            ratios = worst_ratios(
                logits_TE, honest_balance(ids_TK, score, torch.float32), balance_measured(logits_TE, ids_TK, score)
            )
            found.append(ratios)
        assert all(ratio <= 1 for ratios in found for ratio in ratios), found
        assert max(gradient for _, gradient in found) > 0.01, found

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
    def test_of_the_z_loss(self, dtype: torch.dtype) -> None:
        """Value and gradient are within their bounds, and these are loose by less than two orders."""
        found = []
        for T, E, _ in SIZES:
            logits_TE = drawn_logits(T, E, dtype)
            measured = z_measured(FLOAT32, logits_TE, coefficient=C)
            found.append(worst_ratios(logits_TE, honest_z(torch.float32), measured))
        assert all(ratio <= 1 for ratios in found for ratio in ratios), found
        assert max(gradient for _, gradient in found) > 0.01, found

    @pytest.mark.parametrize("score", SCORES)
    @pytest.mark.parametrize("logits", ["saturated", "all equal", "one expert for all"])
    def test_of_extremes(self, score: routes.Score, logits: str) -> None:
        """Saturated scores, exact ties and collapse leave both losses and their gradients finite and within."""
        T, E, K = 12, 7, 2
        logits_TE = {
            "saturated": torch.where(torch.arange(T * E).reshape(T, E) % 3 == 0, 80.0, -80.0),
            "all equal": torch.full((T, E), 1.5),
            "one expert for all": 30.0 * (torch.arange(E) == 3).expand(T, E),
        }[logits]
        ids_TK = choices(logits_TE, score=score, top_k=K)
        balance = honest_balance(ids_TK, score, torch.float32)
        assert 1 >= max(worst_ratios(logits_TE, balance, balance_measured(logits_TE, ids_TK, score)))
        assert 1 >= max(worst_ratios(logits_TE, honest_z(torch.float32), z_measured(FLOAT32, logits_TE, coefficient=C)))


class TestWrongArithmeticIsOutside:
    @pytest.mark.parametrize("score", SCORES)
    def test_of_balance_losses(self, score: routes.Score) -> None:
        """The scores in bfloat16, one choice counted elsewhere, and V = T - 1 all show."""
        T, E, K = SIZES[2]
        logits_TE = drawn_logits(T, E, torch.bfloat16)
        ids_TK = choices(logits_TE, score=score, top_k=K)
        measured = balance_measured(logits_TE, ids_TK, score)
        elsewhere_TK = ids_TK.clone()
        elsewhere_TK[0, 0] = next(e for e in range(E) if e not in ids_TK[0].tolist())
        honest = honest_balance(ids_TK, score, torch.float32)
        wrong: dict[str, Any] = {
            "bfloat16": honest_balance(ids_TK, score, torch.bfloat16),
            "elsewhere": honest_balance(elsewhere_TK, score, torch.float32),
            "one less": lambda logits: honest(logits) * T / (T - 1),
        }
        for name, loss in wrong.items():
            assert max(worst_ratios(logits_TE, loss, measured)) > 1, name

    def test_of_the_z_loss(self) -> None:
        """A logarithm in bfloat16 and V = T - 1 show."""
        T, E, _ = SIZES[2]
        logits_TE = drawn_logits(T, E, torch.bfloat16)
        measured = z_measured(FLOAT32, logits_TE, coefficient=C)
        honest = honest_z(torch.float32)
        wrong: list[Loss] = [honest_z(torch.bfloat16), lambda logits: honest(logits) * T / (T - 1)]
        assert all(max(worst_ratios(logits_TE, loss, measured)) > 1 for loss in wrong)


class TestValuesAreTheOracles:
    @pytest.mark.parametrize("score", SCORES)
    def test_of_a_padded_microbatch(self, score: routes.Score) -> None:
        """Measured on the valid tokens alone, value and gradient are those of the oracle under a mask."""
        logits_TE = drawn_logits(9, 5, torch.float64).requires_grad_()
        padding_T = torch.tensor([0, 1, 0, 0, 1, 0, 0, 0, 1]).bool()
        ids_TK = choices(logits_TE.detach(), score=score, top_k=2)
        valid_VE = logits_TE.detach()[~padding_T]
        cases = [
            (
                auxiliary_loss(logits_TE, ids_TK, score=score, coefficient=C, padding_T=padding_T),
                balance_measured(valid_VE, ids_TK[~padding_T], score),
            ),
            (z_loss(logits_TE, coefficient=C, padding_T=padding_T), z_measured(FLOAT32, valid_VE, coefficient=C)),
        ]
        for loss, (value, gradient) in cases:
            (theirs_TE,) = torch.autograd.grad(loss, logits_TE)
            torch.testing.assert_close(value.value, loss.detach(), rtol=1e-13, atol=0.0)
            torch.testing.assert_close(gradient.value, theirs_TE[~padding_T], rtol=1e-10, atol=1e-15)
