"""Gradients are judged at four places: combine's backward, the experts and dispatch's backward are told apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_conformance.contract.topology import Layout
from moe_conformance.judging.shared.exchange.gradients import judge_dweights, judge_dx
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.shared.exchange.row_gradients import judge_out_gradients, judge_rows_gradients
from moe_conformance.judging.verdict import AbsentGradient, WrongForm, WrongGradient
from moe_conformance.scenarios.outcome import Grad, Handed
from self_tests.judging.breaking import broken, caught, edit, edit_handed, exchange, judged, on, put
from self_tests.judging.simulated_exchange import workload

ROUTING = workload(ids=[[[0, 5], [4, 5], [-1, 6]], [[1, 6], [-1, -1]]])


class Scaled(torch.autograd.Function):
    """Identity forward; the gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: object, value: torch.Tensor, factor: float) -> torch.Tensor:
        """Pass the value on."""
        ctx.factor = factor  # type: ignore[attr-defined]
        return value.view_as(value)

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Scale the gradient."""
        return grads[0] * ctx.factor, None  # type: ignore[attr-defined]


def backward_times(factor: float) -> object:
    """A change that shows in the gradient alone."""
    return lambda rank, tensor: Scaled.apply(tensor, factor)  # type: ignore[no-untyped-call]


class TestOutGradients:
    def test_combines_backward_too_large_is_told_with_the_factor(self) -> None:
        """A gradient that is ep times too large at the experts' output while y is right is combine's backward."""
        outcome = broken(workload(Layout(4, ep=2)), answers=backward_times(2.0))
        judged(judge_outputs, outcome)
        fault = caught(judge_out_gradients, outcome)
        assert isinstance(fault, WrongGradient)
        sentence = "backward of combine: every element of the gradients at the experts' output"
        assert f"{sentence} is 2.000 x the expected value: ep" in str(fault)
        assert 2.0 == fault.ratio
        assert (0, 1, 2, 3) == fault.ranks

    def test_the_gradient_of_another_token_is_named(self) -> None:
        """Gradients in the wrong order are told by the token whose upstream gradient they are."""

        def swapped(handed: object) -> object:
            return replace(handed, out_grad_RD=exchange(0, 3)(handed.out_grad_RD))  # type: ignore[attr-defined,type-var]

        fault = caught(judge_out_gradients, edit_handed(broken(ROUTING), 1, swapped))  # type: ignore[arg-type]
        assert (
            "rank 0 token 1 slot 0 (expert 4 on rank 1, row 0), in terms of upstream gradients: rank 0 token 2"
            in str(fault)
        )
        assert "expected: rank 0 token 1" in str(fault)
        assert (1,) == fault.ranks

    def test_gradients_in_another_order_are_told_as_such(self) -> None:
        """Where all are there; not where one is another's as well, and not where they are of the token's other slot."""
        cause = "; likely cause: gradients came back in another order than the rows were sent"

        def told(change: Callable[[Tensor], Tensor]) -> str:
            def changed(handed: Handed) -> Handed:
                assert handed.out_grad_RD is not None
                return replace(handed, out_grad_RD=change(handed.out_grad_RD))

            return str(caught(judge_out_gradients, edit_handed(broken(ROUTING), 1, changed)))

        assert cause in told(exchange(0, 3))
        assert cause in told(lambda grad_RD: grad_RD.roll(1, 0))
        assert cause not in told(lambda grad_RD: grad_RD[:1].expand_as(grad_RD))
        assert cause not in told(lambda grad_RD: grad_RD * torch.arange(2, len(grad_RD) + 2)[:, None])

    def test_weights_applied_at_combine_are_in_its_backward(self) -> None:
        """A backward that forgets the weight of combine is told by the missing factor."""
        outcome = broken(ROUTING, weights_at="combine")
        ranks = tuple(replace(rank, weights_at="expert") for rank in outcome.ranks)
        judged(judge_out_gradients, outcome)
        assert "in terms of upstream gradients" in str(caught(judge_out_gradients, replace(outcome, ranks=ranks)))

    def test_no_gradient_is_not_a_gradient_of_zero(self) -> None:
        """Answers that combine detached have no gradient at all, and the ranks are named."""
        fault = caught(judge_out_gradients, broken(ROUTING, answers=on(1, torch.Tensor.detach)))
        assert isinstance(fault, AbsentGradient)
        assert "on rank 1 reached the experts' output; likely cause: combine detached it" in str(fault)
        assert (1,) == fault.ranks

    def test_the_gradient_at_padding_is_free_but_finite(self) -> None:
        """Any finite gradient may reach the answer to a padding row; NaN may not."""

        def padded(value: float) -> object:
            return lambda h: replace(h, out_grad_RD=put(1, lambda rows: rows[1] * 0 + value)(h.out_grad_RD))

        outcome = broken(ROUTING, padding=1)
        judged(judge_out_gradients, edit_handed(outcome, 1, padded(7.0)))  # type: ignore[arg-type]
        fault = caught(judge_out_gradients, edit_handed(outcome, 1, padded(torch.nan)))  # type: ignore[arg-type]
        assert "a padding row, is not finite" in str(fault)

    def test_a_microbatch_that_never_goes_backward_is_not_judged(self) -> None:
        """A schedule without a backward leaves nothing to compare."""
        work = replace(workload(), schedule="F0")
        outcome = broken(work)
        for judge in (judge_out_gradients, judge_rows_gradients, judge_dx, judge_dweights):
            assert judged(judge, outcome).vacuous


class TestRowsGradients:
    def test_rows_handed_over_detached_are_told(self) -> None:
        """Rows without a way back to x have no gradient."""
        fault = caught(judge_rows_gradients, broken(ROUTING, rows=on(0, torch.Tensor.detach)))
        assert isinstance(fault, AbsentGradient)
        assert (
            "on rank 0 reached the experts' input; first wrong: the delivered rows are detached from x (dispatch)"
            in str(fault)
        )
        assert (0,) == fault.ranks

    def test_what_combines_backward_broke_is_not_blamed_on_the_experts(self) -> None:
        """A gradient that came wrong to the experts leaves them wrong, and the place before them is named."""
        fault = caught(judge_rows_gradients, broken(ROUTING, answers=backward_times(0.0)))
        assert "the gradients at the experts' input is zero" in str(fault)
        assert "first wrong: the gradient at the experts' output (backward of combine)" in str(fault)
        detached = caught(judge_rows_gradients, broken(ROUTING, answers=on(1, torch.Tensor.detach)))
        assert isinstance(detached, AbsentGradient)
        assert "first wrong: the experts' output has no gradient (combine detached it)" in str(detached)

    def test_a_gradient_that_went_wrong_in_the_experts_is_told_apart(self) -> None:
        """Right at the experts' output and wrong at their input."""

        def doubled(handed: Handed) -> Handed:
            assert handed.rows_grad_RD is not None
            return replace(handed, rows_grad_RD=2 * handed.rows_grad_RD)

        fault = caught(judge_rows_gradients, edit_handed(broken(ROUTING), 1, doubled))
        assert (
            "first wrong: the gradient at the experts' input, correct at their output (backward of the experts)"
            in str(fault)
        )

    def test_a_wrong_weight_shows_in_what_left_the_experts(self) -> None:
        """The gradient at the input holds the weight that the expert applied."""
        fault = caught(judge_rows_gradients, broken(ROUTING, weights=on(1, exchange(0, 3))))
        assert isinstance(fault, WrongGradient)
        assert "the gradients at the experts' input" in str(fault)

    def test_etp_shards_give_their_parts(self) -> None:
        """With partial answers each shard's gradient is its part of the whole."""
        assert judged(judge_rows_gradients, broken(workload(Layout(2, etp=2)))).pairs > 0


class TestDx:
    def test_dispatchs_backward_is_told_apart(self) -> None:
        """A gradient that left the experts right and reached x wrong is dispatch's backward."""
        outcome = broken(workload(Layout(4, ep=2)), rows=backward_times(0.5))
        fault = caught(judge_dx, outcome)
        assert isinstance(fault, WrongGradient)
        assert "every element of dx is 0.500 x the expected value: 1/ep" in str(fault)
        assert "first wrong: dL/dx, since the gradient at the experts' input is correct (backward of dispatch)" in str(
            fault
        )
        judged(judge_rows_gradients, outcome)

    def test_combines_backward_is_told_apart(self) -> None:
        """A gradient that reached the experts' output wrong is combine's backward."""
        fault = caught(judge_dx, broken(ROUTING, answers=backward_times(2.0)))
        assert "first wrong: the gradient at the experts' output (backward of combine)" in str(fault)

    def test_wrong_rows_are_told_apart(self) -> None:
        """What was delivered wrong cannot have right gradients."""
        fault = caught(judge_dx, broken(ROUTING, sent=lambda rank, sent: sent[1:]))
        assert "first wrong: the rows at the experts' input (dispatch)" in str(fault)

    def test_exchanged_gradients_are_named_by_each_other(self) -> None:
        """Dx of two tokens in each other's place."""
        outcome = broken(ROUTING)
        grad = outcome.ranks[0].microbatches[0].dx_TD.value
        swapped = Grad(exchange(0, 1)(grad))
        fault = caught(judge_dx, edit(outcome, 0, lambda seen: replace(seen, dx_TD=swapped)))
        assert "dx of rank 0 token 0 is that of rank 0 token 1, which has the value of this one" in str(fault)
        assert (0,) == fault.ranks

    def test_the_gradient_of_one_slot_dropped_is_told_by_expert(self) -> None:
        """One slot's contribution missing leaves its expert's columns zero."""
        fault = caught(judge_dx, broken(ROUTING, rows=on(0, put(0, lambda rows: rows[0].detach()))))
        assert "dx of rank 0 token 0, columns 0..3 (slot 0, expert 0), is zero; likely cause: " in str(fault)
        assert "likely cause: the gradient of expert 0 was left out" in str(fault)
        assert (0,) == fault.ranks

    def test_no_gradient_is_absent(self) -> None:
        """None where there are tokens is a fault of its own; where there are none it is not."""
        outcome = edit(broken(ROUTING), 0, lambda seen: replace(seen, dx_TD=Grad(None)))
        fault = caught(judge_dx, outcome)
        assert isinstance(fault, AbsentGradient)
        sentence = "the gradient of x on rank 0 in microbatch 0 is None; first wrong: dL/dx"
        assert f"{sentence}, since the gradient at the experts' input is correct" in str(fault)
        assert (0,) == fault.ranks
        empty = broken(workload(ids=[[], [[2, 1]]]))
        judged(judge_dx, edit(empty, 0, lambda seen: replace(seen, dx_TD=Grad(None), dweights_TK=Grad(None))))

    def test_a_gradient_of_another_shape_is_a_wrong_form(self) -> None:
        """A gradient that cannot be compared is told by its shapes."""
        outcome = edit(broken(ROUTING), 0, lambda seen: replace(seen, dx_TD=Grad(torch.zeros(1, 32))))
        assert isinstance(caught(judge_dx, outcome), WrongForm)


def with_dweights(change: object) -> object:
    """Change the gradient of the weights of rank 0."""
    outcome = broken(ROUTING)
    value = outcome.ranks[0].microbatches[0].dweights_TK.value
    return edit(outcome, 0, lambda seen: replace(seen, dweights_TK=Grad(change(value))))  # type: ignore[operator]


class TestDweights:
    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda g: g.roll(1, 1), "likely cause: the gradients of the token are shifted by 1 slot"),
            (lambda g: g * 0 + 1, "the gradient of every routing weight on rank 0 is 1; expected values that differ"),
            (lambda g: g * 0, "is zero"),
            (
                lambda g: g * 2,
                "is 2.000 x the expected value: ep or K or dp",
            ),
            (exchange(0, 1), "is 1 instead of 2; likely cause: it is the gradient of token 1"),
            (
                put(2, lambda g: g[2] + torch.tensor([0.5, 0.0])),
                "rank 0 token 2 slot 0 is 0.5 instead of 0, since the slot is empty",
            ),
            (put(0, lambda g: g[0] * torch.tensor([0.0, 1.0])), "rank 0 token 0 slot 0 (expert 0) is 0 instead of"),
            (put(0, lambda g: g[0] * torch.nan), "is nan instead of"),
        ],
    )
    def test_what_is_wrong_is_told(self, change: object, words: str) -> None:
        """Shifted, constant, zero, scaled, another token's, at an empty slot, missing and not a number."""
        fault = caught(judge_dweights, with_dweights(change))  # type: ignore[arg-type]
        assert isinstance(fault, WrongGradient)
        assert words in str(fault)
        assert (0,) == fault.ranks

    def test_no_gradient_is_absent(self) -> None:
        """None where slots are routed is a fault of its own."""
        outcome = edit(broken(ROUTING), 1, lambda seen: replace(seen, dweights_TK=Grad(None)))
        fault = caught(judge_dweights, outcome)
        assert isinstance(fault, AbsentGradient)
        assert (1,) == fault.ranks

    def test_weights_applied_but_detached_have_no_gradient(self) -> None:
        """A backend that breaks the graph of the weights is caught through the whole simulation."""
        fault = caught(judge_dweights, broken(ROUTING, weights=lambda rank, weights: weights.detach()))
        assert isinstance(fault, AbsentGradient)
        assert (0, 1) == fault.ranks
