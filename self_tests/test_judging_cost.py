"""What a backend says of its wire decides what its rows are held against."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from moe_conformance.engine import Engine
from moe_conformance.judging.cost import judge_handed, judge_rows
from moe_conformance.judging.reading import read
from moe_conformance.judging.verdict import Costly, NotOffered, Tally, WrongForm
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.topology import Layout
from moe_conformance.workloads.corpus import corpus
from self_tests.breaking import broken, edit_handed, judged


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks for the tests of this file."""
    with Engine(preload=("moe_conformance.scenarios.moe_step",)) as engine:
        yield engine


class TestHanded:
    def test_what_is_routed_is_allowed(self) -> None:
        """Every rank's experts are compared."""
        assert {0, 1} <= judged(judge_handed, broken()).ranks

    def test_a_buffer_of_the_worst_case_is_told(self) -> None:
        """Rows beyond those that are routed, and one for each expert; a multiple that is named excuses them."""
        longer = edit_handed(
            broken(), 1, lambda call: replace(call, rows_RD=call.rows_RD.new_zeros(len(call.rows_RD) + 5, 32))
        )
        with pytest.raises(Costly, match=r"rank 1 hands .* rows to its experts in microbatch 0, of .* routed pairs"):
            judge_handed(read(longer), Tally())
        judged(judge_handed, says(longer, multiple="16"))

    def test_what_the_backend_says_decides(self) -> None:
        """A static number is judged elsewhere, all tokens are few, and an unknown word is a fault."""
        with pytest.raises(NotOffered, match="a static number of rows"):
            judge_handed(read(says(broken(), handed="static")), Tally())
        with pytest.raises(WrongForm, match="hands over 'most', which is none of"):
            judge_handed(read(says(broken(), handed="most")), Tally())


def says(outcome: Outcome, **resolved: str) -> Outcome:
    """Let all ranks say something of the exchange."""
    return replace(outcome, ranks=tuple(replace(rank, resolved=resolved) for rank in outcome.ranks))


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
