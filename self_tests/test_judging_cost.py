"""What a backend says of its wire decides what its rows are held against."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_conformance.judging.cost import judge_rows
from moe_conformance.judging.reading import read
from moe_conformance.judging.verdict import NotOffered, Tally
from self_tests.breaking import broken


class TestWire:
    def test_rows_among_which_are_copies_of_the_adapter_are_not_counted(self) -> None:
        """Where the adapter first copied the tokens to tensor ranks, nothing is said of the rows on the wire."""
        outcome = broken()
        ranks = tuple(replace(rank, resolved={"wire": "copies"}) for rank in outcome.ranks)
        with pytest.raises(NotOffered, match="the adapter copies tokens"):
            judge_rows(read(replace(outcome, ranks=ranks)), Tally())
