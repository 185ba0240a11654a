"""What is wrong with y is told by block: dropped, doubled, another's, padding, another weight, one factor of all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_conformance.contract.topology import Layout
from moe_conformance.judging.shared.exchange.outputs import judge_form, judge_inputs, judge_outputs
from moe_conformance.judging.verdict import ChangedInput, WrongForm, WrongOutput
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.workloads.records.workload import Workload
from self_tests.judging.breaking import broken, caught, edit, exchange, judged, on, put
from self_tests.judging.simulated_exchange import workload

ROUTING = workload(ids=[[[0, 5], [4, 5], [-1, 6]], [[1, 6], [-1, -1]]])


def weighted(weights_TK: list[list[float]]) -> Workload:
    """Give the tokens of rank 0, all routed to experts 4 and 5, these weights."""
    work = workload(ids=[[[4, 5]] * len(weights_TK), []])
    batch = replace(work.batches[0][0], weights_TK=torch.tensor(weights_TK))
    return replace(work, batches=((batch, work.batches[0][1]),))


def reweighted(work: Workload, change: Callable[[Tensor], Tensor]) -> Outcome:
    """Run a workload made by `weighted`, with other weights in y than it asks for."""
    own_TK = work.batches[0][0].weights_TK
    factor_TD = (change(own_TK) / own_TK).repeat_interleave(4, 1)
    return broken(
        work,
        outputs=on(0, lambda y: torch.cat([y[:, :16], y[:, 16:24] * factor_TD, y[:, 24:]], 1)),
        weights_at="combine",
    )


class TestOverflow:
    def test_what_the_dtype_cannot_hold_may_be_infinite(self) -> None:
        """A weight of 2^17 overflows float16; infinity is right there, and beside it nothing else may be."""
        work = workload(ids=[[[4, 5]] * 2, []], dtype=torch.float16)
        weights_TK = torch.tensor([[2.0**17, 1.0], [1.0, 1.0]])
        batch = replace(work.batches[0][0], weights_TK=weights_TK)
        work = replace(work, batches=((batch, work.batches[0][1]),))
        outcome = broken(work)
        y = outcome.ranks[0].microbatches[0].y
        assert y is not None
        assert bool(y[0, 16:20].isinf().all())
        assert judged(judge_form, outcome).elements
        spoilt = edit(
            outcome, 0, lambda seen: replace(seen, y=torch.where(torch.arange(2)[:, None] == 1, torch.inf, y))
        )
        with pytest.raises(
            WrongOutput, match=r"not finite at 1 token, although its terms fit torch\.float16; .* token 1 "
        ):
            judged(judge_form, spoilt)


class TestOutputs:
    def test_a_dropped_answer_is_named_by_slot_and_expert(self) -> None:
        """Zeros in an expert's columns are its answer gone."""
        fault = caught(judge_outputs, broken(ROUTING, answers=on(0, put(0, lambda rows: rows[0] * 0))))
        assert isinstance(fault, WrongOutput)
        assert "combine: y of rank 0 token 0, columns 0..3 (slot 0, expert 0), is zero" in str(fault)
        assert "likely cause: the answer of expert 0 was left out" in str(fault)
        assert (0,) == fault.ranks

    def test_the_last_row_of_one_expert_dropped_is_one_fault(self) -> None:
        """The classic off-by-one: all but the last row of an expert come back."""
        work = workload(ids=[[[4, 5], [4, 6], [4, 7]], []])
        fault = caught(judge_outputs, broken(work, answers=on(1, put(2, lambda rows: rows[2] * 0))))
        assert "y of rank 0 token 2, columns 16..19 (slot 0, expert 4), is zero" in str(fault)
        assert "more of the same kind" not in str(fault)

    def test_all_answers_of_one_expert_gone_is_told_once(self) -> None:
        """An expert that is missing everywhere is named, not its tokens."""
        work = workload(ids=[[[4, 5], [4, 6], [4, 7]], []])
        fault = caught(judge_outputs, broken(work, answers=on(1, lambda rows: rows * (torch.arange(6) > 2)[:, None])))
        assert "every answer of expert 4 (held by rank 1) in y is missing: its columns are all zero" in str(fault)

    def test_exchanged_answers_are_named_by_each_other(self) -> None:
        """Combine that puts two answers in each other's place is told by both tokens."""
        fault = caught(judge_outputs, broken(ROUTING, outputs=on(0, exchange(0, 1))))
        assert "y of rank 0 token 0 is that of rank 0 token 1, which has the value of this one" in str(fault)
        assert (0,) == fault.ranks

    def test_the_answer_to_a_padding_row_is_recognised(self) -> None:
        """Padding rows are answered with a large value, and that value in y is told for what it is."""
        fault = caught(judge_outputs, broken(ROUTING, padding=1, answers=on(1, exchange(0, 1))))
        assert "y of rank 0 token 1 holds" in str(fault)
        assert "likely cause: it includes the expert output of a padding row (16384)" in str(fault)

    def test_the_answer_to_a_padding_row_is_told_before_what_it_pushed_out_of_place(self) -> None:
        """What else is wrong is likely to come of the same fault, and is told after it, of earlier tokens too."""
        dropped, padded = put(0, lambda rows: rows[0] * 0), exchange(0, 1)
        outcome = broken(ROUTING, padding=1, answers=lambda rank, rows: (padded if rank else dropped)(rows))
        fault = caught(judge_outputs, outcome)
        assert fault.sentence.startswith("y of rank 0 token 1 holds")
        assert "a padding row (16384). Also: y of rank 0 token 0, columns 0..3 (slot 0, expert 0), is zero" in str(
            fault
        )

    def test_padding_is_found_behind_more_rows_than_are_explained(self) -> None:
        """However much else is wrong, it comes first."""
        noise = torch.Generator().manual_seed(1)
        answer = put(-1, lambda y: y[-1] * 0 + 4096)
        work = workload(tokens=70)
        outcome = broken(work, outputs=lambda rank, y: answer(y) if rank else y + torch.randn(y.shape, generator=noise))
        sentence = caught(judge_outputs, outcome).sentence
        assert sentence.startswith("y of rank 1 token 68 holds 4096; likely cause: it includes the expert output of a")

    def test_a_token_without_slots_is_zero(self) -> None:
        """What appears at a token that is routed nowhere has no right to be there."""
        outcome = broken(ROUTING, outputs=on(1, put(1, lambda y: torch.cat([y[1][:4] + 3, y[1][4:]]))))
        fault = caught(judge_outputs, outcome)
        assert "y of rank 1 token 1, columns 0..3 (expert 0, to which no slot is routed)" in str(fault)
        assert (1,) == fault.ranks

    def test_an_answer_that_was_not_asked_for_is_told_with_its_expert(self) -> None:
        """The token's own row through an expert that it is not routed to is recognised."""
        own = ROUTING.batches[0][1].x_TD[1]
        outcome = broken(ROUTING, outputs=on(1, put(1, lambda y: torch.cat([own[:4] * 0.5, y[1][4:]]))))
        assert "is not zero: it holds 1 x the output of expert 0 for this token" in str(caught(judge_outputs, outcome))

    def test_columns_that_belong_to_no_expert_stay_zero(self) -> None:
        """Where the experts do not divide the hidden size, the rest is watched too."""
        work = workload(hidden=35)
        outcome = broken(work, outputs=on(0, put(0, lambda y: torch.cat([y[0][:34], y[0][34:] + 1]))))
        assert "columns 32..34 (no expert's), is not zero but 0, 0, 1" in str(caught(judge_outputs, outcome))

    @pytest.mark.parametrize(
        ("factor", "words"),
        [
            (2.0, "every element of y is 2.000 x the expected value: ep"),
            (0.0, "every element of y is zero"),
            (0.5, "1/ep"),
        ],
    )
    def test_one_factor_of_all_elements_is_told_once(self, factor: float, words: str) -> None:
        """A scale that all elements share is named by the size that it equals."""
        fault = caught(judge_outputs, broken(workload(Layout(4, ep=2)), outputs=lambda rank, y: y * factor))
        assert factor == fault.ratio
        assert words in str(fault)
        assert (0, 1, 2, 3) == fault.ranks

    def test_the_combine_of_one_rank_zeroed_is_told_by_rank(self) -> None:
        """A factor that only one rank's elements share names that rank."""
        fault = caught(judge_outputs, broken(workload(Layout(4, ep=2)), outputs=on(2, lambda y: y * 0)))
        assert "every element of y on rank 2 is zero" in str(fault)
        assert (2,) == fault.ranks

    def test_a_missing_shard_is_told_by_its_part(self) -> None:
        """Etp shards answer unequal parts, so that one without the other is recognised."""
        work = workload(Layout(4, etp=4))
        fault = caught(judge_outputs, broken(work, answers=on(3, lambda rows: rows * 0)))
        assert "every element of y is 2.000 x the expected value" in str(fault)
        assert "etp shard 3 missing" in str(fault)

    def test_another_slots_weight_is_named(self) -> None:
        """Weights applied at combine in the wrong order are told by slot."""
        work = workload(ids=[[[4, 5], [4, 6]], []])
        first, second = work.batches[0][0].weights_TK[0].tolist()
        factor = second / first
        outcome = broken(work, outputs=on(0, put(0, lambda y: torch.cat([y[0][:20] * factor, y[0][20:]]))))
        fault = caught(judge_outputs, outcome)
        assert f"is multiplied by {second:g} instead of {first:g}" in str(fault)
        assert "the weight of slot 1" in str(fault)

    def test_another_slots_weight_is_not_taken_for_a_factor(self) -> None:
        """A neighbour's weight that happens to be twice the own one is told as a weight if that explains more."""
        work = weighted([[0.25, 0.5], [0.375, 0.125]])
        fault = caught(judge_outputs, reweighted(work, lambda weights_TK: weights_TK.roll(1, 1)))
        assert "is multiplied by 0.5 instead of 0.25; likely cause: the weight of slot 1" in str(fault)
        assert "twice" not in str(fault)

    def test_a_weight_that_all_tokens_of_an_expert_share_is_not_a_factor_of_the_expert(self) -> None:
        """Weights applied twice are told as such, though one expert's answers are all off by one factor."""
        work = weighted([[0.25, 0.5], [0.25, 0.375]])
        fault = caught(judge_outputs, reweighted(work, torch.square))
        assert "is multiplied by 0.0625 instead of 0.25; likely cause: the weight was applied twice" in str(fault)
        assert not any(words in str(fault) for words in ("every answer of expert", "the weight of slot"))

    def test_unapplied_weights_are_told(self) -> None:
        """Answers that come back unweighted are told as such, with the stage that lost the weight."""
        fault = caught(judge_outputs, broken(ROUTING, weights=lambda rank, weights: weights * 0 + 1))
        assert "the weight was not applied" in str(fault)
        assert "dispatch" == fault.stage
        assert "first wrong: the weights at the experts' input (dispatch)" in str(fault)

    def test_an_answer_added_to_another_is_told(self) -> None:
        """Two answers in one place are the token's own plus another's."""
        work = workload(ids=[[[0, 5], [0, 6], [0, 7], [0, 4], [0, 3], [0, 2]], []])
        own = work.batches[0][0].x_TD[:, :4]
        other = next(t for t in range(6) if abs(float(own[t] @ own[0])) < 4)  # not the same signs, nor all opposite
        outcome = broken(work, outputs=on(0, put(0, lambda y: torch.cat([y[0][:4] + y[other][:4], y[0][4:]]))))
        assert f"is its own answer plus that of rank 0 token {other}" in str(caught(judge_outputs, outcome))

    @pytest.mark.parametrize("weights_at", ["input", "expert", "combine"])
    def test_answers_in_another_order_are_told_as_such(self, weights_at: str) -> None:
        """Also where two of them reach one token; not as answers that were left out, for they are all there."""
        work = workload(ids=[[[4, 5], [4, 6], [5, 7], [4, 7]], [[6, 7], [5, 4]]])
        fault = caught(judge_outputs, broken(work, answers=on(1, lambda rows: rows.roll(1, 0)), weights_at=weights_at))
        assert "is the answer for rank" in str(fault)
        assert "; likely cause: rows came back in another order than they were sent" in str(fault)
        assert "left out" not in str(fault)
        assert "Also" not in str(fault)
        assert (0, 1) == fault.ranks

    def test_an_order_does_not_explain_an_answer_that_is_gone(self) -> None:
        """Where one of the answers that moved is lost as well, it is told."""
        work = workload(ids=[[[4, 5], [4, 6], [5, 7], [4, 7]], [[6, 7], [5, 4]]])
        moved = on(1, lambda rows: torch.cat([rows[:1] * 0, rows[1:]]).roll(1, 0))
        fault = caught(judge_outputs, broken(work, answers=moved))
        assert "another order" not in str(fault)
        assert "was left out" in str(fault)

    def test_what_dispatch_lost_is_not_blamed_on_combine(self) -> None:
        """A row that never reached its expert cannot be in y: the stage is dispatch."""
        fault = caught(judge_outputs, broken(ROUTING, sent=lambda rank, sent: sent[1:]))
        assert "dispatch" == fault.stage
        assert "first wrong: the rows at the experts' input (dispatch)" in str(fault)

    def test_a_microbatch_is_named_where_there_are_several(self) -> None:
        """The output of the other microbatch in flight is recognised."""
        outcome = broken(workload(microbatches=2))
        other = outcome.ranks[0].microbatches[1].y
        fault = caught(judge_outputs, edit(outcome, 0, lambda seen: replace(seen, y=other)))
        assert "y of rank 0 token 0 of microbatch 0 is that of rank 0 token 0 of microbatch 1" in str(fault)


class TestForm:
    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"y_dtype": torch.float64}, "has the dtype torch.float64 instead of torch.float32, the dtype of x"),
            ({"y_shape": (3, 1, 32)}, "has the shape (3, 1, 32) instead of (3, 32), the shape of x"),
            ({"y": None}, "is None"),
        ],
    )
    def test_another_shape_or_dtype_is_told(self, fields: dict[str, Any], words: str) -> None:
        """The output has the form of x."""
        fault = caught(judge_form, edit(broken(ROUTING), 0, lambda seen: replace(seen, **fields)))
        assert isinstance(fault, WrongForm)
        assert words in str(fault)
        assert (0,) == fault.ranks

    def test_leading_dimensions_come_back(self) -> None:
        """X in two leading dimensions means y in two leading dimensions."""
        work = workload(Layout(1), tokens=6)
        outcome = broken(replace(work, lead="two_dims"))
        assert "has the shape (6, 32) instead of (3, 2, 32), the shape of x" in str(caught(judge_form, outcome))
        judged(judge_form, edit(outcome, 0, lambda seen: replace(seen, y_shape=(3, 2, 32))))

    def test_not_a_number_is_told(self) -> None:
        """NaN in an output of the right form is a wrong output, to either judge."""
        outcome = broken(ROUTING, outputs=on(1, lambda y: y * torch.nan))
        assert "y of rank 1 is not finite at 2 tokens, although" in str(caught(judge_form, outcome))
        only = broken(ROUTING, outputs=on(1, put(0, lambda y: y[0] * torch.nan)))
        assert "y of rank 1 is not finite at 1 token, although its terms fit torch.float32; the first" in str(
            caught(judge_form, only)
        )
        fault = caught(judge_outputs, outcome)
        assert isinstance(fault, WrongOutput)
        assert "y of rank 1 token 0 is not finite" in str(fault)

    def test_outputs_of_another_shape_are_not_compared(self) -> None:
        """An output with a row too few is a wrong form before it is a wrong output."""
        outcome = broken(ROUTING)
        short = outcome.ranks[0].microbatches[0].y[1:]
        assert isinstance(caught(judge_outputs, edit(outcome, 0, lambda seen: replace(seen, y=short))), WrongForm)


class TestInputs:
    def test_a_changed_input_is_named(self) -> None:
        """An input that the backend changed is named, with the rank."""
        fault = caught(judge_inputs, edit(broken(ROUTING), 1, lambda seen: replace(seen, inputs_changed=("x",))))
        assert isinstance(fault, ChangedInput)
        assert "the backend changed its input x on rank 1" in str(fault)
        assert (1,) == fault.ranks
