"""Bounds of gradients beside losses."""

from __future__ import annotations

import pytest
import torch

from moe_conformance.chapters.losses.judge.loss_bounds import main_slope_bound
from moe_conformance.chapters.losses.judge.loss_rules import Part, Rule, Steps
from moe_conformance.contract import Config
from moe_conformance.judging.compare.bounds import unit_roundoff

T, E, K = 64, 8, 3


def steps_of(dtype: torch.dtype, score: str, *, normalise: bool) -> Steps:
    """A step of one microbatch on one rank, with logits and upstream gradients that the dtype has."""
    g = torch.Generator().manual_seed(0)
    logits_TE = torch.randn(T, E, generator=g).to(dtype).double()
    part = Part(
        ranks=(0,),
        tokens=(T,),
        logits_TE=logits_TE,
        x_TD=torch.zeros(T, 1, dtype=torch.float64),
        ids_TK=logits_TE.topk(K).indices,
        upstream_TK=torch.randn(T, K, generator=g).to(dtype).double(),
        padding_T=None,
        sequences_T=torch.zeros(T, dtype=torch.int64),
    )
    routing = {"routing.score": score, "routing.normalise": normalise}
    config = Config(experts=E, top_k=K, dtype=dtype).changed(routing)
    return Steps(config, Rule(), [[part]], 1.0)


class TestMainGradient:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
    @pytest.mark.parametrize("normalise", [False, True], ids=["scores", "normalised"])
    def test_weights_may_be_in_the_dtype_of_the_tokens(self, dtype: torch.dtype, normalise: bool) -> None:
        """A softmax, a sum and a quotient in half precision are within the bound, and a lost factor of 2 is not."""
        steps = steps_of(dtype, "softmax", normalise=normalise)
        part = steps.parts[0][0]
        logits_TE = part.logits_TE.to(dtype).requires_grad_()
        scores_TK = logits_TE.softmax(1).gather(1, part.ids_TK)
        weights_TK = scores_TK / scores_TK.sum(1, keepdim=True) if normalise else scores_TK
        weights_TK.backward(part.upstream_TK.to(dtype))
        expected_TE = steps.main_slope(part)
        allowed_TE = main_slope_bound(steps, part) + unit_roundoff(dtype) * expected_TE.abs()
        assert logits_TE.grad is not None
        assert bool(((logits_TE.grad.double() - expected_TE).abs() <= allowed_TE).all())
        assert bool(((expected_TE / 2 - expected_TE).abs() > allowed_TE).any())

    def test_float32_is_bounded_as_before(self) -> None:
        """An error of bfloat16 is not within the bound of float32."""
        steps = steps_of(torch.float32, "softmax", normalise=False)
        part = steps.parts[0][0]
        narrow_TE = steps.main_slope(part).bfloat16().double()
        assert bool(((narrow_TE - steps.main_slope(part)).abs() > main_slope_bound(steps, part)).any())
