"""Ranks that claim different things are told; what an adapter sees of a rank's own tokens may differ."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_conformance.contract import Claims
from moe_conformance.judging.observed.run import read
from moe_conformance.judging.verdict import MalformedClaim
from moe_conformance.scenarios.outcome import Outcome
from self_tests.judging.breaking import broken, claiming


def second_claims(claims: Claims) -> Outcome:
    """Let rank 1 claim something, and rank 0 that every token is sent to all ranks."""
    outcome = claiming(broken(), Claims(wire="all"))
    first, second = outcome.ranks
    return replace(outcome, ranks=(first, replace(second, claims=claims)))


class TestRanks:
    def test_what_all_ranks_claim_is_read(self) -> None:
        """As one claim of the backend."""
        assert "all" == read(second_claims(Claims(wire="all"))).claims.wire

    @pytest.mark.parametrize("claims", [Claims(), Claims(wire="tokens")])
    def test_another_claim_of_a_rank_is_told(self, claims: Claims) -> None:
        """Also where it is the default: the ranks are one exchange."""
        words = f"rank 1 claims wire = '{claims.wire}' and rank 0 claims 'all'; expected the same"
        with pytest.raises(MalformedClaim, match=words):
            _ = read(second_claims(claims)).claims

    def test_what_a_rank_saw_may_differ(self) -> None:
        """A rank without tokens shows neither a dtype nor where weights are applied."""
        seen = Claims(wire="all", dtype=torch.float32, weights_at="combine")
        assert "all" == read(second_claims(seen)).claims.wire
