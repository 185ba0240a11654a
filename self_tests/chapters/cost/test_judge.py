"""What ledgers show of a step's cost, and what a backend says of its wire, decide what is judged."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_conformance.chapters.cost.judge.claimed_wires import needed_rows, pair_rows
from moe_conformance.chapters.cost.judge.cost import (
    judge_backward_rows,
    judge_even_calls,
    judge_handed,
    judge_other_bytes,
    judge_rows,
)
from moe_conformance.chapters.cost.judge.declared_wire import judge_declared_rows
from moe_conformance.chapters.cost.judge.reductions import judge_reductions
from moe_conformance.chapters.cost.judge.repetition import judge_repeated
from moe_conformance.contract import Claims
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.engine.ledger.entry import Entry
from moe_conformance.judging.observed.run import read
from moe_conformance.judging.verdict import Costly, NotOffered, Tally
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.recipes import corpus
from moe_conformance.workloads.records.runs import ExpertsStep
from self_tests.judging.breaking import Judge, broken, claiming, edit_handed, judged
from self_tests.judging.simulated_exchange import workload

EP2_EDP2 = Layout(4, ep=2)


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
        with pytest.raises(
            Costly,
            match=r"rank 1 delivers .* rows to its experts in microbatch 0 instead of at most .*, for .* routed pairs",
        ):
            judge_handed(read(longer), Tally())
        judged(judge_handed, claiming(longer, Claims(multiple=16)))

    def test_experts_padded_to_the_largest_load_are_claimed(self) -> None:
        """As many rows for each expert as for the busiest one of the rank: allowed if claimed, and named if not."""

        def padded(rank: int, more: int) -> Outcome:
            outcome = broken(workload(tokens=20))
            loads = Counter(p.expert for p in read(outcome).pairs[0] if p.destination == rank)
            rows = len(outcome.ranks[rank].local_experts) * max(loads.values()) + more
            return edit_handed(outcome, rank, lambda call: replace(call, rows_RD=call.rows_RD.new_zeros(rows, 32)))

        assert {0, 1} <= judged(judge_handed, claiming(padded(1, 0), Claims(handed="batched"))).ranks
        with pytest.raises(Costly, match="pads its experts to the largest load claims handed = 'batched'"):
            judge_handed(read(padded(1, 0)), Tally())
        with pytest.raises(Costly, match=r"for 4 experts with at most \d+ routed pairs"):
            judge_handed(read(claiming(padded(1, 5), Claims(handed="batched"))), Tally())

    def test_a_claim_is_named_where_it_would_hold(self) -> None:
        """A fixed number of rows where all ranks deliver as many; all tokens where that is their number."""

        def delivering(*rows: int) -> str:
            outcome = broken(workload(tokens=20, top_k=1))
            for rank, number in enumerate(rows):
                outcome = edit_handed(
                    outcome,
                    rank,
                    lambda call, n=number: replace(call, rows_RD=call.rows_RD.new_ones(n, 32)),  # type: ignore[misc]
                )
            with pytest.raises(Costly) as raised:
                judge_handed(read(outcome), Tally())
            return raised.value.sentence.partition(";")[2]

        static = " a backend that delivers a fixed number of rows claims handed = 'static'"
        tokens = " a backend that delivers all tokens claims handed = 'tokens'"
        assert static == delivering(400, 400)
        assert "" == delivering(400, 401)
        assert f"{tokens};{static}" == delivering(20 + 19, 20 + 19)

    def test_no_claim_is_named_where_tokens_were_added(self) -> None:
        """Rows of zeros that are for experts are no fixed number of places, though all ranks deliver as many."""
        outcome = broken(workload(tokens=20, top_k=1))
        for rank in (0, 1):
            outcome = edit_handed(outcome, rank, lambda call: replace(call, rows_RD=call.rows_RD.new_zeros(400, 32)))
        with pytest.raises(
            Costly, match=r"; \d+ rows of zeros are for experts: no claim excuses added tokens"
        ) as raised:
            judge_handed(read(outcome), Tally())
        assert "claims handed" not in raised.value.sentence

    def test_what_the_backend_claims_decides(self) -> None:
        """A static number is as large on all ranks, and judged elsewhere."""
        claims = Claims(handed="static")
        with pytest.raises(Costly, match=r"claims handed = 'static', and ranks 0, 1 deliver \d+, \d+ rows"):
            judge_handed(read(claiming(broken(), claims)), Tally())
        fixed = broken()
        for rank in (0, 1):
            fixed = edit_handed(fixed, rank, lambda call: replace(call, rows_RD=call.rows_RD.new_zeros(40, 32)))
        with pytest.raises(NotOffered, match="a fixed number of delivered rows"):
            judge_handed(read(claiming(fixed, claims)), Tally())


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
        with pytest.raises(NotOffered, match="the adapter gathers tokens over tp"):
            judge_rows(read(claiming(broken(), Claims(wire="copies"))), Tally())

    @pytest.mark.parametrize("wire", ["all", "capacity"])
    def test_a_wire_is_as_claimed_or_as_the_pairs(self, wire: Any) -> None:
        """No number between: what is more than the pairs and less than the claim is no wire that there is."""
        outcome, claims = broken(workload(tokens=20)), Claims(wire=wire)
        reading = read(claiming(outcome, claims))
        pairs, claimed = pair_rows(reading, 0), needed_rows(reading, 0)

        def sending(rows: int) -> Outcome:
            sizes = (rows - rows // 2, rows // 2)
            each = [call("send", (size, 32), peer=1 - rank, sequence=None) for rank, size in enumerate(sizes)]
            sent = calling(outcome, lambda rank, phase: [] if phase in ("finish", "done") else [each[rank]])
            return claiming(sent, claims)

        for legal in (pairs, claimed):
            assert 4 == judged(judge_declared_rows, sending(legal)).pairs
        wrongs = {"all": [claimed + 1], "capacity": [pairs + 1, claimed - 1, claimed + 1]}[wire]  # 39 pairs, 39 tokens
        for wrong in wrongs:
            told = f"claims wire = '{wire}', which is {claimed} rows in dispatch:0, and it moves {wrong}; the routed"
            with pytest.raises(Costly, match=told):
                judge_declared_rows(read(sending(wrong)), Tally())

    def test_the_default_wire_is_no_claim(self) -> None:
        """COST-03 counts its rows."""
        with pytest.raises(NotOffered, match="COST-03 counts its rows"):
            judge_declared_rows(read(broken(workload(tokens=20))), Tally())

    def test_places_of_every_expert_are_claimed(self) -> None:
        """C rows to each expert of the other rank, C the largest load: allowed if claimed, and named if not."""
        outcome = broken(workload(tokens=20))
        loads = [torch.bincount(batch.ids_TK[batch.ids_TK >= 0]).max() for batch in outcome.workload.batches[0]]
        E, C = outcome.workload.config.experts, int(max(loads))

        def sending(places: int) -> Outcome:
            rows = call("all_to_all_single", (E * places, 32))
            return calling(outcome, lambda rank, phase: [] if phase in ("finish", "done") else [rows])

        claims = Claims(wire="capacity")
        assert 4 == judged(judge_rows, claiming(sending(C), claims)).pairs  # two halves on two ranks
        with pytest.raises(Costly, match="claims wire = 'capacity'"):
            judge_rows(read(sending(C)), Tally())
        with pytest.raises(Costly, match=f"dispatch:0 moves {E * (C + 1)} rows, .*; allowed: {E * C}"):
            judge_rows(read(claiming(sending(C + 1), claims)), Tally())


def call(op: str, *shapes_in: tuple[int, ...], ranks: tuple[int, ...] = (0, 1), **fields: Any) -> Entry:
    """A call among some ranks, which gives float32 tensors of these shapes."""
    given: dict[str, Any] = {
        "order": 0, "op": op, "group": "g", "ranks": ranks, "sequence": 1, "in_splits": None, "out_splits": None,
        "shapes_in": shapes_in, "shapes_out": (), "dtype": "float32", "bytes_in": 4 * sum(map(math.prod, shapes_in)),
        "bytes_out": 0, "reduce": "SUM" if "reduce" in op else None, "root": None, "peer": None, "tag": None,
        "asynchronous": False, "where": "",
    }  # fmt: skip
    return Entry(**(given | fields))


def calling(outcome: Outcome, calls: Callable[[int, str], Sequence[Entry]]) -> Outcome:
    """Let every rank have made calls, by rank and phase, in forwards and backwards one after the other."""
    microbatches = range(len(outcome.workload.batches))
    steps = [f"{name}:{m}" for m in microbatches for name in ("forward", "answered", "backward")]
    ranks = []
    for rank in outcome.ranks:
        ledger: list[Entry] = []
        phases = []
        for phase in (*steps, "finish", "done"):
            phases.append((phase, len(ledger)))
            ledger += calls(rank.rank, phase)
        ranks.append(replace(rank, ledger=tuple(ledger), phases=tuple(phases)))
    return replace(outcome, ranks=tuple(ranks))


class TestUnseen:
    @pytest.mark.parametrize(
        "judge",
        [judge_even_calls, judge_rows, judge_declared_rows, judge_backward_rows, judge_other_bytes, judge_repeated],
    )
    def test_what_travels_past_the_ledger_is_not_judged(self, judge: Judge) -> None:
        """A transport without collectives, or rows that are packed with their weights, is neither right nor wrong."""
        outcome = claiming(broken(workload(tokens=20, microbatches=3)), Claims(wire="tokens"))
        packed = calling(outcome, lambda rank, phase: [call("all_to_all_single", (40, 34))])
        for unseen in (calling(outcome, lambda rank, phase: []), packed):
            with pytest.raises(NotOffered, match=r"the ledger has 0 of at least .* rows of width D in dispatch:0"):
                judge_of(judge, unseen)

    def test_messages_that_are_not_empty_are_one_exchange(self) -> None:
        """How many of them there are is not judged; with collectives beside them, these are."""
        outcome = broken(workload(tokens=20, microbatches=2))

        def calls(rank: int, phase: str, *, counts: bool) -> list[Entry]:
            messages = [call("send", (40, 32), peer=1 - rank, sequence=None)] * (2 if phase.endswith("1") else 1)
            return [*([call("all_to_all_single", (2, 1))] if counts else []), *messages]

        assert {0, 1} == judged(judge_even_calls, calling(outcome, lambda r, phase: calls(r, phase, counts=True))).ranks
        with pytest.raises(NotOffered, match="point-to-point messages are not counted"):
            judge_of(judge_even_calls, calling(outcome, lambda r, phase: calls(r, phase, counts=False)))
        with pytest.raises(Costly, match=r"forward takes different numbers of collectives .*\[1, 1\] in forward:1"):
            judge_of(
                judge_even_calls,
                calling(outcome, lambda r, phase: calls(r, phase, counts=True) * (2 if phase == "forward:0" else 1)),
            )


class TestReductions:
    """Every expert is on two of four ranks: the replicas of those of rank 0 are on rank 2."""

    def outcome(self, makers: Mapping[str, Callable[[int], Sequence[Entry]]], layout: Layout = EP2_EDP2) -> Outcome:
        """The calls, by phase, of ranks that hold experts and finish their gradients."""
        probed = workload(layout, tokens=1)
        own = replace(probed, run=ExpertsStep(), parameters={("gate", 0): torch.zeros(16, 32)})
        outcome = broken(probed)
        ranks = tuple(replace(rank, grads_final={}) for rank in outcome.ranks)
        return calling(
            replace(outcome, workload=own, ranks=ranks),
            lambda rank, phase: makers[phase](rank) if phase in makers else (),
        )

    @pytest.mark.parametrize("phase", ["backward:0", "finish"])
    def test_replicas_may_reduce_at_any_time(self, phase: str) -> None:
        """In a backward, or while gradients are finished, by a collective or by messages of a larger group."""

        def message(rank: int) -> list[Entry]:
            return [call("send", (4, 512), ranks=(0, 1, 2, 3), peer=(rank + 2) % 4)]

        for calls in (among_replicas, message):
            assert {0, 1, 2, 3} == judged(judge_reductions, self.outcome({phase: calls})).ranks

    def test_replicas_that_do_nothing_together_are_not_judged(self) -> None:
        """Their gradients are added up where the ledger does not see it, or not at all."""
        with pytest.raises(NotOffered, match=r"no reduction of gradients over replicas: rank 0 with group \(0, 2\)"):
            judge_of(judge_reductions, self.outcome({}))
        assert {0, 1} == judged(judge_reductions, self.outcome({}, Layout(2, ep=2))).ranks

    def test_an_exchange_may_reduce_gradients_of_tokens(self) -> None:
        """Rows among its own ranks; as many as a parameter are too many for so few tokens, and elsewhere at once."""

        def outcome(rows: int, ranks_by_rank: Sequence[tuple[int, ...]]) -> Outcome:
            def calls(rank: int) -> list[Entry]:
                rows_RD = call("reduce_scatter_tensor", (rows, 32), ranks=ranks_by_rank[rank])
                return [*among_replicas(rank), rows_RD]

            return self.outcome({"backward:0": calls})

        own, all_ranks = [(0, 1), (0, 1), (2, 3), (2, 3)], [(0, 1, 2, 3)] * 4
        judged(judge_reductions, outcome(2, own))
        with pytest.raises(Costly, match=r"rank 0 reduces 2048 elements by reduce_scatter_tensor on group \(0, 1\) in"):
            judge_of(judge_reductions, outcome(64, own))
        with pytest.raises(
            Costly, match=r"rank 0 reduces 512 elements by .* in backward:0; the replicas of its experts are group"
        ):
            judge_of(judge_reductions, outcome(16, all_ranks))


def among_replicas(rank: int) -> list[Entry]:
    """A reduction of a parameter between a rank and its only replica."""
    return [call("all_reduce", (4, 512), ranks=(rank % 2, rank % 2 + 2))]


def judge_of(judge: Judge, outcome: Outcome) -> None:
    """Judge an outcome that is expected to raise."""
    judge(read(outcome), Tally())
