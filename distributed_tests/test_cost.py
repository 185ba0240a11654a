"""COST: collectives and bytes of a step, counted by the ledgers of the ranks."""

from __future__ import annotations

from moe_conformance.chapters.cost.judge.cost import (
    judge_backward_rows,
    judge_beside_rows,
    judge_even_calls,
    judge_handed,
    judge_no_calls,
    judge_rows,
)
from moe_conformance.chapters.cost.judge.declared_wire import judge_declared_rows
from moe_conformance.chapters.cost.judge.more_experts import judge_calls_of_sizes
from moe_conformance.chapters.cost.judge.reductions import judge_reductions
from moe_conformance.chapters.cost.judge.repetition import judge_kept_memory, judge_repeated
from moe_conformance.chapters.cost.workloads import more_experts
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.equivalence.runs import RunTwins
from moe_conformance.judging.verdict import Tally
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.features import all_alike, exchanges, likened_once, repeated, without_gradients
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep, LayerStep
from moe_conformance.workloads.records.workload import Workload


def alone(workload: Workload) -> bool:
    """Whether every rank exchanges with itself."""
    return not exchanges(workload.layout) and workload.layout.tp == 1


def counted(workload: Workload) -> bool:
    """Whether rows leave ranks, in the dtype that every backend has, one step after the other, and none is added."""
    plain = workload.asynchrony == "plain" and workload.schedule.startswith("F0 B0")
    plain = plain and workload.config.padding.tokens == "no"
    return exchanges(workload.layout) and plain and workload.config.dtype.itemsize == 4


def unpadded(workload: Workload) -> bool:
    """Whether there are no rows but routed ones, and all is done as in training."""
    return not workload.config.capacity.padded and not without_gradients(workload) and workload.asynchrony == "plain"


def by_turns(workload: Workload) -> bool:
    """Whether microbatches follow each other, and there are some to compare."""
    return counted(workload) and len(workload.batches) > 1


def takes_equal_steps(workload: Workload) -> bool:
    """Whether it takes equal steps of which nothing is kept (R)."""
    return "R" in workload.schedule


def of_other_sizes(workload: Workload) -> bool:
    """Whether it is held against a run with more experts and slots."""
    return counted(workload) and likened_once(workload) and not all_alike(workload)


class TestExchange:
    @requirement("COST-01", run=ExchangeStep(), when=alone)
    def test_one_rank_calls_nobody(self, reading: Reading, tally: Tally) -> None:
        """A rank that holds all experts calls no collective in forward or backward."""
        judge_no_calls(reading, tally)

    @requirement("COST-02", run=ExchangeStep(), when=by_turns)
    def test_calls_do_not_depend_on_tokens(self, reading: Reading, tally: Tally) -> None:
        """Every microbatch calls the same number of collectives, whatever its tokens and routing."""
        judge_even_calls(reading, tally)

    @requirement("COST-02", run=ExchangeStep(), when=of_other_sizes)
    def test_calls_do_not_depend_on_experts(self, reading: Reading, twins: RunTwins, tally: Tally) -> None:
        """A step with twice the experts and twice the slots calls the same number of collectives."""
        judge_calls_of_sizes(reading, twins(more_experts(reading.outcome.workload)), tally)

    @requirement("COST-03", run=ExchangeStep(), when=counted)
    def test_no_row_travels_that_need_not(self, reading: Reading, tally: Tally) -> None:
        """Dispatch and combine each send a row for every pair, or every token, as the backend states, and no more."""
        judge_rows(reading, tally)

    @requirement("COST-04", run=ExchangeStep(), when=counted)
    def test_rows_travel_as_is_declared(self, reading: Reading, tally: Tally) -> None:
        """A token once to each rank of its experts, to all ranks, or at the capacity: as the backend states."""
        judge_declared_rows(reading, tally)

    @requirement("COST-05", run=ExchangeStep(), when=counted)
    def test_backward_moves_no_more_than_forward(self, reading: Reading, tally: Tally) -> None:
        """The backward sends each row of dispatch back once and each row of combine once, and no counts."""
        judge_backward_rows(reading, tally)

    @requirement("COST-06", run=ExchangeStep(), when=counted)
    def test_little_travels_beside_the_rows(self, reading: Reading, tally: Tally) -> None:
        """Counts take one number per rank and expert, and the metadata of a row a few numbers."""
        judge_beside_rows(reading, tally)

    @requirement("COST-10", run=ExchangeStep(), when=unpadded)
    def test_experts_are_handed_what_is_for_them(self, reading: Reading, tally: Tally) -> None:
        """The experts of a rank receive the rows that are routed to it, not those of the worst case."""
        judge_handed(reading, tally)

    @requirement("COST-07", run=ExchangeStep(), when=repeated)
    def test_a_step_costs_what_the_last_one_did(self, reading: Reading, tally: Tally) -> None:
        """A repeated microbatch makes the same calls as before, creates no process group and keeps no memory."""
        judge_repeated(reading, tally)


class TestLayers:
    @requirement("COST-07", run=LayerStep(), when=takes_equal_steps)
    def test_equal_steps_of_a_layer_keep_no_memory(self, reading: Reading, tally: Tally) -> None:
        """A router, experts and shared experts keep nothing of the tokens of a step that has ended."""
        judge_kept_memory(reading, tally)


class TestOwnExperts:
    @requirement("COST-08", run=ExpertsStep(), when=lambda workload: workload.layout.world > 1)
    def test_gradients_travel_between_replicas_only(self, reading: Reading, tally: Tally) -> None:
        """Gradients of experts are reduced over the ranks that hold the same experts, and nowhere else."""
        judge_reductions(reading, tally)
