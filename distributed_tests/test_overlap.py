"""OVLP: asynchronous collectives, whose data is watched, and steps and exchanges that overlap with computation."""

from __future__ import annotations

from moe_conformance.chapters.overlap.workloads import OverlapStep
from moe_conformance.judging.observed.ledgers import judge_hazards
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries
from moe_conformance.judging.shared.exchange.gradients import judge_dweights, judge_dx
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.shared.exchange.row_gradients import judge_rows_gradients
from moe_conformance.judging.shared.overlapped.accepted import judge_options
from moe_conformance.judging.shared.overlapped.evidence import judge_calls, judge_order, judge_overlapping
from moe_conformance.judging.shared.overlapped.steps import judge_step_gradients, judge_step_tokens
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.features import exchanges
from moe_conformance.workloads.records.runs import AcceptedStep, ExchangeStep, ExpertsStep, LayerStep
from moe_conformance.workloads.records.workload import Workload


def watched(workload: Workload) -> bool:
    """Whether reads and writes of data in flight are recorded."""
    return workload.asynchrony == "watched"


def several_ranks(workload: Workload) -> bool:
    """Whether there is another rank to wait for; a handle without a wait is recorded in every run."""
    return workload.layout.world > 1


class TestExchange:
    test_nothing_is_touched_before_it_was_waited_for = Row(
        "OVLP-01", ExchangeStep(), judge_hazards, "output touched", "output written", when=watched
    )
    """The data that a collective delivers is neither read nor written between its call and its wait."""

    test_what_is_sent_stays_as_it_was = Row("OVLP-02", ExchangeStep(), judge_hazards, "sent data changed", when=watched)
    """The data that a collective sends is not changed between its call and its wait."""

    test_every_collective_is_waited_for = Row(
        "OVLP-03", ExchangeStep(), judge_hazards, "never waited", when=several_ranks
    )
    """No handle of an asynchronous collective is left without a wait at the end of the step."""


class TestOwnExpertsAndFinish:
    test_own_experts_touch_nothing_early = Row(
        "OVLP-01", ExpertsStep(), judge_hazards, "output touched", "output written", when=watched
    )
    """Nor by the backend's own experts, or while their gradients are finished."""

    test_own_experts_leave_alone_what_is_sent = Row(
        "OVLP-02", ExpertsStep(), judge_hazards, "sent data changed", when=watched
    )
    """Nor by the backend's own experts, or while their gradients are finished."""

    test_own_experts_wait_for_every_collective = Row(
        "OVLP-03", ExpertsStep(), judge_hazards, "never waited", when=several_ranks
    )
    """Nor of those that finish the gradients."""


class TestLayers:
    test_layers_touch_nothing_early = Row(
        "OVLP-01", LayerStep(), judge_hazards, "output touched", "output written", when=watched
    )
    """Nor by a whole layer whose shared experts run during the exchange."""

    test_layers_leave_alone_what_is_sent = Row("OVLP-02", LayerStep(), judge_hazards, "sent data changed", when=watched)
    """Nor by a whole layer whose shared experts run during the exchange."""

    test_layers_wait_for_every_collective = Row(
        "OVLP-03", LayerStep(), judge_hazards, "never waited", when=several_ranks
    )
    """Nor of those that run during the shared experts."""


def defers(workload: Workload) -> bool:
    """Whether weight gradients are deferred."""
    return workload.config.overlap.deferred_weights


def defers_several(workload: Workload) -> bool:
    """Whether weight gradients of several microbatches are deferred."""
    return defers(workload) and len(workload.batches) > 1


def defers_and_reduces(workload: Workload) -> bool:
    """Whether weight gradients are deferred, and expert gradients reduced over replicas."""
    return defers(workload) and workload.layout.edp > 1


def is_delayed(workload: Workload) -> bool:
    """Whether what ranks compute and receive comes late."""
    return bool(workload.twist.late) or workload.asynchrony == "poisoned"


def overlaps_microbatches(workload: Workload) -> bool:
    """Whether there are exchanges, and several microbatches to overlap them with."""
    return exchanges(workload.layout) and len(workload.batches) > 1


def calls_once(workload: Workload) -> bool:
    """Whether there are exchanges, and no forward runs again."""
    return exchanges(workload.layout) and not workload.config.overlap.recompute_experts


def has_further_options(workload: Workload) -> bool:
    """Whether something is asked for beside overlap and shared experts."""
    config = workload.config
    plain = {"overlap.layers": config.overlap.layers, "shared.ffn": config.shared.ffn, "variant": config.variant}
    sizes = {name: getattr(config, name) for name in ("experts", "hidden", "ffn")}
    return config != type(config)().changed({**plain, **sizes})


class TestSteps:
    test_tokens_are_those_of_the_sequential_step = Row("OVLP-04", OverlapStep(), judge_step_tokens)
    """Outputs and input gradients have the same bits, whatever ran beside a microbatch."""

    test_gradients_are_those_of_the_sequential_step = Row(
        "OVLP-05", OverlapStep(), judge_step_gradients, "first", finished=True
    )
    """Parameters end with the gradients of the sequential step, after these are finished."""

    test_durations_change_nothing = Row(
        "OVLP-11", OverlapStep(), (judge_step_tokens, judge_step_gradients), "first", finished=False, when=is_delayed
    )
    """Operators and collectives that take longer, on some ranks or on all, change no bit."""

    test_exchanges_are_in_flight_during_other_work = Row(
        "OVLP-12", OverlapStep(), judge_overlapping, when=overlaps_microbatches
    )
    """Products of matrices run while exchanges are in flight: no error is no proof of overlap."""

    test_calls_are_those_of_the_sequential_step = Row("OVLP-14", OverlapStep(), judge_calls, when=calls_once)
    """A rank makes the same collective calls, in any order that the ranks of a group agree on."""

    test_other_options_change_nothing = Row(
        "OVLP-15",
        OverlapStep(),
        (judge_step_tokens, judge_step_gradients),
        "first",
        finished=True,
        when=has_further_options,
    )
    """With each option added to overlap, results are those of the sequential step with that option."""


class TestAcceptedOptions:
    test_every_option_that_is_accepted_changes_nothing = Row("OVLP-15", AcceptedStep(), judge_options)
    """So does each option that a configuration accepts beside overlap, and that can be run."""


class TestDeferredWeights:
    test_deferred_gradients_are_those_computed_at_once = Row(
        "OVLP-06", OverlapStep(), judge_step_gradients, "first", finished=False, when=defers
    )
    """Every parameter has the gradient that it gets when nothing is deferred."""

    test_each_is_computed_once = Row(
        "OVLP-07", OverlapStep(), judge_step_gradients, "first", "second", finished=False, when=defers_several
    )
    """None is left out, repeated, made of another microbatch, or left for the next step."""

    test_they_are_added_to_what_is_there = Row(
        "OVLP-08", OverlapStep(), judge_step_gradients, "second", finished=False, when=defers_several
    )
    """Behind a microbatch that has left gradients, the sum over all of them is found."""

    test_reductions_follow_them = Row(
        "OVLP-09", OverlapStep(), judge_step_gradients, "first", "second", finished=True, when=defers_and_reduces
    )
    """Sums over replicas hold the deferred part of every gradient."""

    test_down_comes_before_gate_and_up = Row("OVLP-10", OverlapStep(), judge_order, when=defers_several)
    """Weight gradients of a layer are computed in the order in which the backward reached them."""


class TestStepHazards:
    test_steps_touch_nothing_early = Row(
        "OVLP-01", OverlapStep(), judge_hazards, "output touched", "output written", when=watched
    )
    """Nor by a step that computes something else meanwhile."""

    test_steps_leave_alone_what_is_sent = Row(
        "OVLP-02", OverlapStep(), judge_hazards, "sent data changed", when=watched
    )
    """Nor by a step that computes something else meanwhile."""

    test_steps_wait_for_every_collective = Row(
        "OVLP-03", OverlapStep(), judge_hazards, "never waited", when=several_ranks
    )
    """Nor of those that a step left in flight for another microbatch."""


class TestChunks:
    test_chunks_give_the_result_of_one_piece = Row(
        "OVLP-13",
        ExchangeStep(option="chunks"),
        (judge_deliveries, judge_outputs, judge_rows_gradients, judge_dx, judge_dweights),
    )
    """Deliveries, outputs and gradients do not depend on the number of chunks."""

    test_every_chunk_is_waited_for = Row(
        "OVLP-03", ExchangeStep(option="chunks"), judge_hazards, "never waited", when=several_ranks
    )
    """No chunk is left without a wait of its own."""
