"""COST: collectives and bytes of a step, counted by the ledgers of the ranks."""

from __future__ import annotations

from moe_conformance.chapters.cost.judge.cost import (
    judge_backward_rows,
    judge_even_calls,
    judge_handed,
    judge_no_calls,
    judge_other_bytes,
    judge_rows,
)
from moe_conformance.chapters.cost.judge.declared_wire import judge_declared_rows
from moe_conformance.chapters.cost.judge.more_experts import judge_calls_of_sizes
from moe_conformance.chapters.cost.judge.reductions import judge_reductions
from moe_conformance.chapters.cost.judge.repetition import judge_kept_memory, judge_repeated
from moe_conformance.chapters.cost.workloads import more_experts
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.features import all_alike, exchanges, likened_once, repeated, without_gradients
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep, LayerStep
from moe_conformance.workloads.records.schedule import executes
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
    """Whether it takes equal steps of which nothing is kept."""
    return executes(workload.schedule, "repeat")


def of_other_sizes(workload: Workload) -> bool:
    """Whether it is held against a run with more experts and slots."""
    return counted(workload) and likened_once(workload) and not all_alike(workload)


class TestExchange:
    test_one_rank_calls_nobody = Row("COST-01", ExchangeStep(), judge_no_calls, when=alone)
    """A rank that holds all experts calls no collective in forward or backward."""

    test_calls_do_not_depend_on_tokens = Row("COST-02", ExchangeStep(), judge_even_calls, when=by_turns)
    """Every microbatch calls the same number of collectives, whatever its tokens and routing."""

    test_calls_do_not_depend_on_experts = Row(
        "COST-02", ExchangeStep(), judge_calls_of_sizes, when=of_other_sizes, twins=more_experts
    )
    """A step with twice the experts and twice the slots calls the same number of collectives."""

    test_no_row_travels_that_need_not = Row("COST-03", ExchangeStep(), judge_rows, when=counted)
    """Dispatch and combine each send a row for every pair, or every token, as the backend states, and no more."""

    test_rows_travel_as_is_declared = Row("COST-04", ExchangeStep(), judge_declared_rows, when=counted)
    """A token once to each rank of its experts, to all ranks, or at the capacity: as the backend states."""

    test_backward_moves_no_more_than_forward = Row("COST-05", ExchangeStep(), judge_backward_rows, when=counted)
    """The backward sends each row of dispatch back once and each row of combine once, and no counts."""

    test_little_travels_beside_the_rows = Row("COST-06", ExchangeStep(), judge_other_bytes, when=counted)
    """Counts take one number per rank and expert, and the metadata of a row a few numbers."""

    test_experts_are_handed_what_is_for_them = Row("COST-10", ExchangeStep(), judge_handed, when=unpadded)
    """The experts of a rank receive the rows that are routed to it, not those of the worst case."""

    test_a_step_costs_what_the_last_one_did = Row("COST-07", ExchangeStep(), judge_repeated, when=repeated)
    """A repeated microbatch makes the same calls as before, creates no process group and keeps no memory."""


class TestLayers:
    test_equal_steps_of_a_layer_keep_no_memory = Row("COST-07", LayerStep(), judge_kept_memory, when=takes_equal_steps)
    """A router, experts and shared experts keep nothing of the tokens of a step that has ended."""


class TestOwnExperts:
    test_gradients_travel_between_replicas_only = Row(
        "COST-08", ExpertsStep(), judge_reductions, when=lambda workload: workload.layout.world > 1
    )
    """Gradients of experts are reduced over the ranks that hold the same experts, and nowhere else."""
