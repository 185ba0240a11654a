"""Lost, doubled, exchanged and corrupt rows, wrong counts and wrong weights, each told in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_conformance.contract.topology import Layout
from moe_conformance.judging.observed.run import read
from moe_conformance.judging.shared.exchange.counts import judge_counts
from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries, judge_rows
from moe_conformance.judging.shared.exchange.row_gradients import judge_out_gradients
from moe_conformance.judging.shared.exchange.weights import judge_weights
from moe_conformance.judging.verdict import CorruptRow, NotOffered, WrongCount, WrongDelivery, WrongForm, WrongWeight
from moe_conformance.scenarios.outcome import Microbatch
from self_tests.judging.breaking import broken, caught, edit_handed, exchange, judged, on, put
from self_tests.judging.simulated_exchange import Sent, workload

# Two ranks, experts 0..3 on rank 0 and 4..7 on rank 1; two rows for expert 5, one each for 0, 1, 4 and 6.
ROUTING = workload(ids=[[[0, 5], [4, 5]], [[1, 6]]])


def _told(microbatches: tuple[Microbatch, ...], *places: str | None) -> tuple[Microbatch, ...]:
    """The microbatches of a rank, with what its exchange tells after each."""
    pairs = zip(microbatches, places, strict=True)
    return tuple(replace(seen, exchange=replace(seen.exchange, weights_at=place)) for seen, place in pairs)


class TestDeliveries:
    def test_a_lost_row_is_named(self) -> None:
        """A row that reached nobody is told by token, slot, expert and rank."""
        fault = caught(judge_deliveries, broken(ROUTING, sent=lambda rank, sent: sent[:-1] if rank == 1 else sent))
        assert isinstance(fault, WrongDelivery)
        assert "dispatch: rank 1 token 0 slot 1 was not delivered to expert 6 on rank 1" == str(fault)
        assert (1,) == fault.ranks

    def test_losses_are_counted(self) -> None:
        """Of many losses one is told and the others are counted."""
        fault = caught(judge_deliveries, broken(ROUTING, sent=lambda rank, sent: [] if rank == 1 else sent))
        assert "3 more of the same kind" in str(fault)

    def test_a_row_delivered_twice_is_named(self) -> None:
        """A row too many is not a routing mistake if its pair is there already."""
        fault = caught(judge_deliveries, broken(ROUTING, sent=lambda rank, sent: [*sent[:1], *sent]))
        assert isinstance(fault, WrongDelivery)
        assert "rank 0 token 0 was delivered twice to expert 0 on rank 0 (again as row 1)" in str(fault)
        assert (0, 1) == fault.ranks

    def test_a_row_at_another_expert_is_named_with_both(self) -> None:
        """A row that lies among those of a neighbour is told by where it should be and where it is."""

        def other(rank: int, sent: list[Sent]) -> list[Sent]:
            return [at._replace(expert=2) if at.expert == 1 else at for at in sent]

        fault = caught(judge_deliveries, broken(ROUTING, sent=other))
        assert isinstance(fault, WrongDelivery)
        assert "rank 1 token 0 slot 0 was delivered to expert 2 on rank 0 instead of expert 1 on rank 0" in str(fault)
        assert (0,) == fault.ranks

    def test_two_exchanged_rows_are_named_together(self) -> None:
        """Two rows in each other's place are one fault."""
        fault = caught(judge_deliveries, broken(ROUTING, rows=on(1, exchange(0, 3))))
        assert isinstance(fault, WrongDelivery)
        assert "rank 0 token 1 slot 0 and rank 1 token 0 slot 1 are exchanged" in str(fault)
        assert "the first was delivered to expert 6 on rank 1, the second to expert 4 on rank 1" in str(fault)
        assert "Also" not in str(fault)

    def test_a_row_never_asked_for_is_named(self) -> None:
        """A row of a token that is not routed there is neither lost nor double."""
        stray = Sent(source=1, token=0, slot=0, expert=3)
        fault = caught(judge_deliveries, broken(ROUTING, sent=lambda rank, sent: sent + [stray] * (rank == 0)))
        assert "delivered to rank 0 for expert 3 is rank 1 token 0, which is not routed to this expert" in str(fault)
        assert (0,) == fault.ranks

    def test_a_row_of_another_microbatch_is_named(self) -> None:
        """Rows of the microbatch that runs beside it are told as such, and the missing ones as lost."""
        outcome = broken(workload(microbatches=2))
        rows_RD = outcome.ranks[1].microbatches[1].exchange.handed[0].rows_RD
        fault = caught(
            judge_deliveries,
            edit_handed(outcome, 1, lambda h: replace(h, rows_RD=put(0, lambda _: rows_RD[0])(h.rows_RD))),
        )
        assert (
            "of microbatch 1 instead of a token of microbatch 0; likely cause: rows of two microbatches were mixed"
            in str(fault)
        )
        assert (1,) == fault.ranks

    def test_a_row_beyond_the_counts_is_found(self) -> None:
        """A row in the unspecified tail is lost, and the diagnosis says where it lies."""
        fault = caught(
            judge_deliveries,
            edit_handed(
                broken(ROUTING),
                1,
                lambda handed: replace(handed, ids_RJ=put(-1, lambda _: torch.tensor([-1]))(handed.ids_RJ)),
            ),
        )
        assert "was not delivered to expert" in str(fault)
        assert "beyond the reported counts" in str(fault)

    def test_every_shard_needs_the_row(self) -> None:
        """With expert tensor parallelism a row that reaches one shard of its expert only is lost at the other."""
        work = workload(Layout(2, etp=2))
        fault = caught(judge_deliveries, broken(work, sent=lambda rank, sent: sent[1:] if rank == 1 else sent))
        assert "on rank 1" in str(fault)
        assert (1,) == fault.ranks

    def test_an_expert_that_nobody_holds_is_named(self) -> None:
        """Where the ranks of a group do not hold all experts, the routing cannot be served."""
        outcome = broken(ROUTING)
        ranks = tuple(replace(rank, local_experts=(0, 1, 2, 3)) for rank in outcome.ranks)
        fault = caught(judge_deliveries, replace(outcome, ranks=ranks))
        assert isinstance(fault, WrongDelivery)
        assert "holds expert 5" in str(fault)


class TestRows:
    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda rows: rows[0] + rows[1], "is the sum of rank 0 token 1 and rank 0 token 0"),
            (lambda rows: rows[0] - rows[1], "is the difference of rank 0 token 1 and rank 0 token 0"),
            (lambda rows: (rows[0] + rows[1]) / 2, "is the mean of rank 0 token 1 and rank 0 token 0"),
            (lambda rows: rows[0] * 0.25 + rows[3] * 0.5, "is 0.25 x rank 0 token 1 + 0.5 x rank 1 token 0"),
            (lambda rows: -rows[3], "is -1 x rank 1 token 0"),
            (lambda rows: rows[3].roll(8), "is rank 1 token 0, shifted by 8 columns right"),
            (lambda rows: torch.cat([rows[3][:16], 0 * rows[3][16:]]), "and zero in columns 16..31"),
            (lambda rows: rows[3] * torch.nan, "is not finite in columns 0..31 (uninitialised?)"),
            (lambda rows: torch.cat([rows[3][:5] * 3, rows[3][5:]]), "is rank 1 token 0 except in columns 0..4"),
        ],
    )
    def test_a_corrupt_row_is_told_by_what_it_is_made_of(self, make: object, words: str) -> None:
        """A row that is no token's is searched among sums, differences, shifts and pieces of the tokens."""
        fault = caught(judge_rows, broken(ROUTING, rows=on(1, put(0, make))))  # type: ignore[arg-type]
        assert isinstance(fault, CorruptRow)
        assert "row 0 delivered to rank 1 for expert 4" in str(fault)
        assert words in str(fault).replace("rank 0 token 0 and rank 0 token 1", "rank 0 token 1 and rank 0 token 0")
        assert (1,) == fault.ranks

    def test_a_corrupt_row_leaves_its_pair_lost(self) -> None:
        """The judge of deliveries misses the pair and hints at the corrupt row."""
        fault = caught(judge_deliveries, broken(ROUTING, rows=on(1, put(0, lambda rows: rows[0] + rows[1]))))
        assert "was not delivered to expert" in str(fault)
        assert "1 row of no token" in str(fault)

    def test_a_scaled_row_is_named_with_its_scale(self) -> None:
        """A doubled row is still its token's, and wrong where weights are not applied at the input."""
        fault = caught(judge_rows, broken(ROUTING, rows=on(0, put(0, lambda rows: rows[0] * 2))))
        assert isinstance(fault, CorruptRow)
        assert "row 0 delivered to rank 0 for expert 0 is 2 x rank 0 token 0" in str(fault)
        assert (0,) == fault.ranks

    def test_another_dtype_is_a_wrong_form(self) -> None:
        """Rows come in the dtype of the tokens."""
        outcome = edit_handed(broken(ROUTING), 1, lambda handed: replace(handed, rows_RD=handed.rows_RD.half()))
        fault = caught(judge_rows, outcome)
        assert isinstance(fault, WrongForm)
        assert "rank 1 receives rows of torch.float16 instead of torch.float32, the dtype of the tokens" in str(fault)


class TestCounts:
    @pytest.mark.parametrize("form", ["grouped", "batched"])
    def test_a_claim_beyond_the_rows_is_told_with_both_numbers(self, form: str) -> None:
        """A claim of more rows than are handed over is wrong."""
        outcome = edit_handed(
            broken(ROUTING, form=form), 1, lambda handed: replace(handed, counts_N=torch.tensor([1, 3, 1, 0]))
        )
        fault = caught(judge_counts, outcome)
        assert isinstance(fault, WrongCount)
        assert "rank 1 reports 3 rows for expert 5 and delivers 2" in str(fault)
        assert (1,) == fault.ranks

    def test_a_claim_of_other_rows_than_are_routed_is_told(self) -> None:
        """A claim that agrees with the rows can still disagree with the routing."""
        fault = caught(judge_counts, broken(ROUTING, sent=lambda rank, sent: sent[1:] if rank == 1 else sent))
        assert "rank 1 reports 0 rows for expert 4; expected: 1 routed pair" in str(fault)

    def test_a_rank_that_claims_nothing_is_told_where_others_claim(self) -> None:
        """Silence of one rank does not excuse it."""
        outcome = edit_handed(broken(ROUTING), 1, lambda handed: replace(handed, counts_N=None))
        fault = caught(judge_counts, outcome)
        assert isinstance(fault, WrongCount)
        assert "rank 1 reports no tokens per expert, but other calls or ranks do" in str(fault)
        assert (1,) == fault.ranks

    def test_padding_may_be_counted(self) -> None:
        """A claim may include rows of zeros, all of them or none."""
        padded = broken(ROUTING, padding=3)
        assert [4, 5, 4, 3] == padded.ranks[1].microbatches[0].exchange.handed[0].counts_N.tolist()
        assert 8 == judged(judge_counts, padded).elements

    def test_rows_of_zeros_in_the_place_of_tokens_are_told(self) -> None:
        """A claim that agrees with the routing does not hold if a row came as zeros."""
        fault = caught(judge_counts, broken(ROUTING, rows=on(1, put(1, lambda rows: rows[1] * 0))))
        assert "rank 1 reports 2 rows for expert 5, of which 1 holds only zeros; expected: 2 routed pairs" in str(fault)

    def test_rows_of_garbage_may_not_be_counted(self) -> None:
        """Padding that is not zero is no padding."""
        outcome = broken(ROUTING, padding=1, rows=on(1, put(1, lambda rows: rows[0] * 0 + 3)))
        assert "rank 1 reports 2 rows for expert 4; expected: 1 routed pair" in str(caught(judge_counts, outcome))

    def test_a_claim_for_too_few_experts_is_told(self) -> None:
        """There is one number per local expert."""
        outcome = edit_handed(broken(ROUTING), 0, lambda handed: replace(handed, counts_N=torch.tensor([1, 1])))
        assert "rank 0 reports tokens per expert for 2 experts instead of 4" in str(caught(judge_counts, outcome))


class TestWeights:
    def test_weights_shifted_by_a_slot_are_told(self) -> None:
        """A weight of the token's other slot is named by that slot."""
        work = workload(ids=[[[4, 5]], []])
        fault = caught(judge_weights, broken(work, weights=on(1, lambda weights: weights.roll(1))))
        first, second = work.batches[0][0].weights_TK[0].tolist()
        assert isinstance(fault, WrongWeight)
        words = f"expert 4 on rank 1 has the weight {second:g} instead of {first:g}; likely cause: the weight of slot 1"
        assert words in str(fault)
        assert (1,) == fault.ranks

    def test_the_weight_of_another_token_is_named_by_it(self) -> None:
        """A weight that only one other pair has is told by that pair."""
        work = workload(ids=[[[4, 0], [5, 1], [6, 2]], []])
        batch = work.batches[0][0]
        weights_TK = torch.tensor([[1, 2], [3, 4], [5, 6]]) / 8
        work = replace(work, batches=((replace(batch, weights_TK=weights_TK), work.batches[0][1]),))
        fault = caught(judge_weights, broken(work, weights=on(1, exchange(0, 2))))
        sentence = "rank 0 token 0 slot 0 at expert 4 on rank 1 has the weight 0.625 instead of 0.125"
        assert f"{sentence}; likely cause: the weight of rank 0 token 2 slot 0" in str(fault)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda w: w * 0 + 1, "instead of 0.1875; likely cause: the weight was not applied"),
            (lambda w: put(0, lambda w: w[0] * 0)(w), "has the weight 0 instead of 0.875"),
        ],
    )
    def test_missing_weights_are_told(self, change: object, words: str) -> None:
        """Ones and zeros in the place of weights have their own words."""
        fault = caught(judge_weights, broken(ROUTING, weights=on(1, change)))  # type: ignore[arg-type]
        assert words in str(fault)

    def test_what_explains_most_weights_is_told_of_all(self) -> None:
        """Another token's weight that happens to be half the own one is told as that token's, like the others."""
        work = workload(ids=[[[4, 5]], [[4, 5], [4, 5]]])
        for rank, weights_TK in enumerate(([[1, 3]], [[1, 2], [3, 4]])):
            batch = replace(work.batches[0][rank], weights_TK=torch.tensor(weights_TK) / 8)
            work = replace(work, batches=((*work.batches[0][:rank], batch, *work.batches[0][rank + 1 :]),))
        fault = caught(judge_weights, broken(work, weights=on(1, lambda weights: weights.roll(1, 0))))
        assert "has the weight 0.5 instead of 0.125; likely cause: the weight of rank 1 token 1 slot 1" in str(fault)
        assert "its own" not in str(fault)

    def test_one_factor_of_all_is_told_once(self) -> None:
        """Weights that are all ep times too large are one fault."""
        fault = caught(judge_weights, broken(workload(Layout(4, ep=2)), weights=lambda rank, weights: weights * 2))
        assert 2.0 == fault.ratio
        assert "every routing weight at the experts is 2.000 x the expected value: ep" in str(fault)

    def test_weights_at_the_input_are_the_scale_of_the_row(self) -> None:
        """A row scaled by another weight than its own is told, and is no corrupt row."""
        outcome = broken(ROUTING, weights_at="input", rows=on(0, put(0, lambda rows: rows[0] * 2)))
        own = float(ROUTING.batches[0][0].weights_TK[0, 0])
        assert f"at expert 0 on rank 0 has the weight {2 * own:g} instead of {own:g}" in str(
            caught(judge_weights, outcome)
        )
        judged(judge_rows, outcome)

    def test_weights_that_travel_against_the_claim_are_told(self) -> None:
        """Where combine applies the weights, none may reach the experts."""
        outcome = broken(ROUTING)
        ranks = tuple(replace(rank, weights_at="combine") for rank in outcome.ranks)
        fault = caught(judge_weights, replace(outcome, ranks=ranks))
        assert isinstance(fault, WrongWeight)
        assert "although weights are applied at combine" in str(fault)

    def test_weights_that_stay_away_against_the_claim_are_told(self) -> None:
        """Where the experts apply the weights, they must be handed over."""
        outcome = broken(ROUTING, weights_at="combine")
        ranks = tuple(replace(rank, weights_at="expert") for rank in outcome.ranks)
        assert "has no routing weight; expected one, since the experts apply it" in str(
            caught(judge_weights, replace(outcome, ranks=ranks))
        )

    def test_weights_asked_for_after_the_experts_may_be_applied_by_them_or_later(self) -> None:
        """`weights_applied="output"` leaves two places, and both are right."""
        work = workload(ids=[[[0, 5]], [[1, 6]]], weights_applied="output")
        outcomes = []
        for place in ("expert", "combine"):
            outcome = broken(work, weights_at=place)
            ranks = tuple(replace(rank, weights_at="combine") for rank in outcome.ranks)
            outcomes.append(replace(outcome, ranks=ranks))
        assert 4 == judged(judge_weights, outcomes[0]).pairs
        with pytest.raises(NotOffered, match="applied in combine and not sent"):
            judged(judge_weights, outcomes[1])

    def test_ones_beside_the_rows_choose_no_place(self) -> None:
        """Experts that take weights are handed ones where combine weighs, and the gradients are those of combine."""
        work = workload(ids=[[[0, 5]], [[1, 6]]], weights_applied="output")
        outcome = broken(work, weights_at="combine")
        for rank in range(2):
            outcome = edit_handed(
                outcome, rank, lambda handed: replace(handed, weights_RJ=torch.ones(handed.ids_RJ.shape))
            )
        assert (("combine",), ("combine",)) == read(outcome).applied
        judged(judge_out_gradients, outcome)

    def test_an_exchange_may_weigh_elsewhere_in_every_microbatch(self) -> None:
        """What it tells after a forward goes before what the session claims, for that microbatch alone."""
        outcome = broken(workload(microbatches=2))
        ranks = [replace(rank, weights_at="combine") for rank in outcome.ranks]
        told = [replace(rank, microbatches=_told(rank.microbatches, "expert", "expert")) for rank in ranks]
        judged(judge_weights, replace(outcome, ranks=tuple(told)))
        half = [replace(rank, microbatches=_told(rank.microbatches, "expert", None)) for rank in ranks]
        words = str(caught(judge_weights, replace(outcome, ranks=tuple(half))))
        assert "although weights are applied at combine" in words

    def test_weights_that_do_not_travel_are_not_counted(self) -> None:
        """Where combine applies the weights there is nothing to compare, and that is neither a pass nor a failure."""
        with pytest.raises(NotOffered, match="weights are applied in combine and not sent"):
            judged(judge_weights, broken(ROUTING, weights_at="combine"))
