"""PACK: token counts that differ from rank to rank, padded and cut back; packed sequences with gaps between them."""

from __future__ import annotations

from moe_conformance.judging.counts import judge_counts
from moe_conformance.judging.deliveries import judge_deliveries, judge_rows
from moe_conformance.judging.gradients import judge_dweights, judge_dx
from moe_conformance.judging.masked_router import judge_masked_router
from moe_conformance.judging.outputs import judge_form, judge_outputs
from moe_conformance.judging.own_experts import (
    judge_expert_gradients,
    judge_own_dweights,
    judge_own_dx,
    judge_own_outputs,
)
from moe_conformance.judging.packing import (
    judge_added_rows,
    judge_alignment,
    judge_asked_group,
    judge_broken_bound,
    judge_dispatched_rows,
    judge_nobody_asked,
    judge_padded_counts,
    judge_stated_padding,
)
from moe_conformance.judging.reading import Reading
from moe_conformance.judging.sequences import (
    judge_empty_sequences,
    judge_lengths,
    judge_shares,
    judge_tokens,
)
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.features import exchanges, features, has_lost_tokens
from moe_conformance.workloads.packing import LAID_OUT, WITHOUT_AND_WITH_EMPTY
from moe_conformance.workloads.records import Workload


def padded(workload: Workload) -> bool:
    """Whether token counts are padded to a common size."""
    return workload.config.pad_tokens != "no"


def padded_to_largest(workload: Workload) -> bool:
    """Whether that size is the largest count of the group."""
    return workload.config.pad_tokens == "group_max"


def bounded(workload: Workload) -> bool:
    """Whether that size is a configured bound."""
    return workload.config.pad_tokens == "bound"


def padded_in_turn(workload: Workload) -> bool:
    """Whether several microbatches are padded, each to its own size."""
    return padded(workload) and len(workload.batches) > 1


def unpadded(workload: Workload) -> bool:
    """Whether token counts are left as they are, in the plainest of steps."""
    return not padded(workload) and exchanges(workload.layout) and workload.schedule == "F0 B0"


def uneven(workload: Workload) -> bool:
    """Whether ranks that exchange tokens have more or fewer of them, and nothing is padded."""
    return not padded(workload) and exchanges(workload.layout) and bool(features(workload, "")["uneven_tokens"])


class TestCount:
    @requirement("PACK-01", kind="token_padding", when=padded_to_largest)
    def test_ranks_pad_to_the_largest_count(self, outcome: Outcome, tally: Tally) -> None:
        """Every rank pads to the largest token count of its exchange group, rounded up."""
        judge_padded_counts(outcome, tally)

    @requirement("PACK-11", kind="token_padding", when=bounded)
    def test_ranks_pad_to_the_bound(self, outcome: Outcome, tally: Tally) -> None:
        """Every rank pads to the bound, rounded up."""
        judge_padded_counts(outcome, tally)

    @requirement("PACK-02", kind="token_padding")
    def test_there_is_one_alignment(self, outcome: Outcome, tally: Tally) -> None:
        """The alignment that was asked for is the one that is stated, and every padded count is a multiple of it."""
        judge_alignment(outcome, tally)

    @requirement(
        "PACK-01", kind="probe", when=lambda workload: padded_to_largest(workload) and exchanges(workload.layout)
    )
    def test_the_exchange_group_is_asked(self, reading: Reading, tally: Tally) -> None:
        """The ranks that share rows ask each other for the largest token count, nobody else, and dispatch as many."""
        judge_dispatched_rows(reading, tally)
        judge_asked_group(reading, tally)

    @requirement("PACK-12", kind="exchange", when=bounded)
    def test_a_broken_bound_is_refused_by_all(self, outcome: Outcome, tally: Tally) -> None:
        """Where one rank has more tokens than the bound, all ranks of its group raise, and none waits for another."""
        judge_broken_bound(outcome, tally)


class TestExchange:
    @requirement("PACK-03", kind="probe", when=padded)
    def test_added_rows_route_nowhere(self, reading: Reading, tally: Tally) -> None:
        """Deliveries and counts are those of the real tokens."""
        judge_deliveries(reading, tally)
        judge_rows(reading, tally)
        judge_added_rows(reading, tally)
        judge_counts(reading, tally)

    @requirement("PACK-04", kind="probe", when=padded)
    def test_output_is_cut_back_to_the_own_tokens(self, reading: Reading, tally: Tally) -> None:
        """Every rank gets the answers of its own tokens, in their places and in the shape of the input."""
        judge_form(reading, tally)
        judge_outputs(reading, tally)

    @requirement("PACK-05", kind="probe", when=padded)
    def test_gradients_are_those_without_padding(self, reading: Reading, tally: Tally) -> None:
        """Tokens and weights get the gradients that they get unpadded."""
        judge_dx(reading, tally)
        judge_dweights(reading, tally)

    @requirement("PACK-02", kind="probe", when=padded)
    def test_nothing_depends_on_the_alignment(self, reading: Reading, tally: Tally) -> None:
        """Whatever the alignment, outputs and gradients are bit for bit those of the oracle; the exchange states it."""
        judge_stated_padding(reading, tally)
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)

    @requirement("PACK-06", kind="probe", when=padded_in_turn)
    def test_counts_belong_to_their_microbatch(self, reading: Reading, tally: Tally) -> None:
        """Microbatches of other sizes, in flight together or one by one, are padded and cut back each for itself."""
        judge_deliveries(reading, tally)
        judge_form(reading, tally)
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)

    @requirement("PACK-11", kind="probe", when=bounded)
    def test_a_bound_needs_no_question(self, reading: Reading, tally: Tally) -> None:
        """With a bound nobody is asked for token counts, and outputs and gradients are the same."""
        judge_nobody_asked(reading, tally)
        judge_dispatched_rows(reading, tally)
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)

    @requirement("PACK-13", kind="probe", when=unpadded)
    def test_switched_off_it_does_nothing(self, reading: Reading, tally: Tally) -> None:
        """Without padding nobody is asked, and outputs and gradients are the oracle's bytes, as with it."""
        judge_nobody_asked(reading, tally)
        judge_dispatched_rows(reading, tally)
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)

    @requirement("PACK-14", kind="probe", when=uneven)
    def test_uneven_counts_are_not_taken_for_equal(self, reading: Reading, tally: Tally) -> None:
        """Ranks with more or fewer tokens than others, some with none, get their own answers and gradients."""
        judge_form(reading, tally)
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)

    @requirement("PACK-14", kind="packed")
    def test_packed_counts_are_not_taken_for_equal(self, reading: Reading, tally: Tally) -> None:
        """What is built for packed sequences gives ranks of any T their own answers and gradients."""
        judge_form(reading, tally)
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)


class TestSequences:
    @requirement("PACK-07", kind="packing", when=lambda workload: workload.name in LAID_OUT)
    def test_sums_are_those_of_lengths_and_of_their_multiples(self, outcome: Outcome, tally: Tally) -> None:
        """Lengths stay as they are, and every padded one is a multiple of what parallelism divides it by."""
        judge_lengths(outcome, tally)

    @requirement("PACK-10", kind="packing", when=lambda workload: workload.name in WITHOUT_AND_WITH_EMPTY)
    def test_empty_sequences_change_nothing_else(self, outcome: Outcome, tally: Tally) -> None:
        """Sequences of length zero stand in the lists as equal neighbours, and move no other."""
        judge_empty_sequences(outcome, tally)

    @requirement("PACK-08", kind="packing", when=lambda workload: workload.name == "packed-tokens")
    def test_gaps_are_told_from_tokens(self, outcome: Outcome, tally: Tally) -> None:
        """The first rows of every sequence are its tokens, and nothing else is one."""
        judge_tokens(outcome, tally)

    @requirement("PACK-15", kind="packing", when=lambda workload: workload.name == "packed-shares")
    def test_context_ranks_share_every_row(self, outcome: Outcome, tally: Tally) -> None:
        """Every row of a pack is on one cp rank, that of its chunk, and in its order."""
        judge_shares(outcome, tally)

    @requirement("PACK-08", "ROUTE-22", kind="masked_router")
    def test_padding_changes_no_route_and_no_load(self, outcome: Outcome, tally: Tally) -> None:
        """Tokens have the experts and weights that are theirs without the gaps, and gaps are not counted."""
        judge_masked_router(outcome, tally)

    @requirement("PACK-08", kind="probe", when=has_lost_tokens)
    def test_gaps_are_routed_nowhere(self, reading: Reading, tally: Tally) -> None:
        """No row of a gap is delivered; its output and its gradients are zero, and those of tokens their own."""
        judge_deliveries(reading, tally)
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)

    @requirement("PACK-08", kind="packed", when=has_lost_tokens)
    def test_gaps_of_packed_sequences_are_routed_nowhere(self, reading: Reading, tally: Tally) -> None:
        """Behind an exchange that is built for packed sequences too, gaps yield zeros, and tokens what is theirs."""
        judge_deliveries(reading, tally)
        judge_outputs(reading, tally)
        judge_dx(reading, tally)
        judge_dweights(reading, tally)

    @requirement("PACK-15", kind="probe", when=lambda workload: workload.layout.cp > 1 and has_lost_tokens(workload))
    def test_outputs_return_to_the_rank_of_their_share(self, reading: Reading, tally: Tally) -> None:
        """Each rank of a context group gets the outputs of the rows that it holds, in their places."""
        judge_deliveries(reading, tally)
        judge_outputs(reading, tally)


class TestOwnExperts:
    @requirement("PACK-08", kind="experts", when=has_lost_tokens)
    def test_gaps_give_nothing_to_experts(self, reading: Reading, tally: Tally) -> None:
        """Behind the backend's own experts, outputs and all gradients are those of the tokens alone."""
        judge_own_outputs(reading, tally)
        judge_own_dx(reading, tally)
        judge_own_dweights(reading, tally)
        judge_expert_gradients(reading, tally)

    @requirement("PACK-04", kind="experts", when=padded)
    def test_output_is_cut_back_to_the_own_tokens(self, reading: Reading, tally: Tally) -> None:
        """Behind the backend's own experts too, every rank gets the answers of its own tokens."""
        judge_form(reading, tally)
        judge_own_outputs(reading, tally)

    @requirement("PACK-05", kind="experts", when=padded)
    def test_gradients_are_those_without_padding(self, reading: Reading, tally: Tally) -> None:
        """Tokens, weights and experts get the gradients that they get unpadded."""
        judge_own_dx(reading, tally)
        judge_own_dweights(reading, tally)
        judge_expert_gradients(reading, tally)
