"""What a backend says of its wire decides what its rows are held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moe_conformance.engine import Engine
from moe_conformance.judging.cost import judge_rows
from moe_conformance.judging.reading import read
from moe_conformance.judging.verdict import NotOffered, Tally
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.topology import Layout
from moe_conformance.workloads.corpus import corpus
from self_tests.breaking import broken


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks for the tests of this file."""
    with Engine(preload=("moe_conformance.scenarios.moe_step",)) as engine:
        yield engine


class TestTravelled:
    """What the tally tells of the wire of native on two ranks."""

    def travelled(self, engine: Engine, variant: str, name: str) -> dict[str, float]:
        """Return what the tally says after a workload of the corpus."""
        workload = next(each for each in corpus(variant, Layout(2, ep=2), "quick") if each.name == name)
        tally = Tally()
        judge_rows(read(moe_step(engine, "native", workload)), tally)
        return tally.travelled

    def test_one_expert_per_token_moves_the_least(self, engine: Engine) -> None:
        """Every token whose expert is elsewhere goes once and comes back once; the counts are bytes beside."""
        found = self.travelled(engine, "alltoall", "top-1-even")
        workload = next(each for each in corpus("alltoall", Layout(2, ep=2), "quick") if each.name == "top-1-even")
        away = sum(int((batch.ids_TK // 4 != rank).sum()) for rank, batch in enumerate(workload.batches[0]))
        assert 2 * away == found["rows"] == found["least_rows"] > 0
        assert 4 * 32 * 2 * away == found["least_bytes"] < found["bytes"]
        assert 3 == found["calls"]

    def test_all_experts_of_every_token(self, engine: Engine) -> None:
        """A row for each of the four pairs that lie on the other rank, where one would do; all-gather sends just it."""
        pairs, everything = (self.travelled(engine, variant, "top-all-even") for variant in ("alltoall", "allgather"))
        assert 4 * pairs["least_rows"] == pairs["rows"]
        assert everything["least_rows"] == everything["rows"] == pairs["least_rows"]


class TestWire:
    def test_rows_among_which_are_copies_of_the_adapter_are_not_counted(self) -> None:
        """Where the adapter first copied the tokens to tensor ranks, nothing is said of the rows on the wire."""
        outcome = broken()
        ranks = tuple(replace(rank, resolved={"wire": "copies"}) for rank in outcome.ranks)
        with pytest.raises(NotOffered, match="the adapter copies tokens"):
            judge_rows(read(replace(outcome, ranks=ranks)), Tally())
