"""Sums of rows of few bits, worked out twice: reference.exchange.rounded_sums and loops over single numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moe_conformance.reference.exchange.rounded_sums import ways
from self_tests.chapters.exchange.second import rounded_sums as second


class TestRoundedSums:
    @pytest.mark.parametrize("seed", range(6))
    def test_both_oracles_agree(self, seed: int) -> None:
        """With empty slots, and several experts of one rank, each way has the same exact sums."""
        made = torch.Generator().manual_seed(seed)
        x_TD = torch.randn(4, 5, generator=made).bfloat16()
        owners_TK = torch.randint(-1, 3, (4, 1 + seed), generator=made)
        w_TK = torch.rand(4, 1 + seed, generator=made)
        found = list(ways(x_TD, owners_TK, w_TK, weights=True))
        assert 6 == len(found)
        for way in found:
            expected = second.sums(
                *(x_TD.double().numpy(), owners_TK.numpy(), w_TK.double().numpy()),
                rounded=way.weights,
                products=way.products,
            )
            np.testing.assert_allclose(way.sum_TD.numpy(), expected, rtol=1e-12, atol=1e-15)

    def test_weights_that_stay_as_they_are_have_half_the_ways(self) -> None:
        """Where no weight may be rounded, none of the ways rounds one; without tokens sums are empty."""
        nothing = torch.zeros(0, 5).bfloat16(), torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2)
        found = list(ways(*nothing, weights=False))
        assert [False] * 3 == [way.weights for way in found]
        assert [(0, 5)] * 3 == [tuple(way.sum_TD.shape) for way in found]
