"""The contract's own conversions and refusals."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from moe_conformance.contract import (
    Delivery,
    Malformed,
    Routing,
    Unsupported,
    refusals,
    whole,
)


class TestRefusals:
    def test_the_expected_refusal_becomes_unsupported(self) -> None:
        """A library's own error that matches is its proved refusal, and stays its cause."""
        with pytest.raises(Unsupported, match="same batch") as caught, refusals(ValueError, match="same batch"):
            raise ValueError("ranks need the same batch")
        assert "library" == caught.value.by
        assert isinstance(caught.value.__cause__, ValueError)

    def test_any_other_error_passes_through(self) -> None:
        """An unexpected message or type is no refusal."""
        with pytest.raises(ValueError, match="other"), refusals(ValueError, match="same batch"):
            raise ValueError("something other")
        with pytest.raises(KeyError, match="batch"), refusals(ValueError, match="same batch"):
            raise KeyError("same batch")


class TestRouting:
    def routing(self) -> Routing:
        """Three tokens: two slots routed, one, none."""
        ids_TK = torch.tensor([[2, 0], [-1, 1], [-1, -1]])
        weights_TK = torch.tensor([[0.5, 0.25], [9.0, 0.125], [9.0, 9.0]], requires_grad=True)
        return Routing(ids_TK, weights_TK, 3)

    def test_dense_keeps_weights_and_drops_empty_slots(self) -> None:
        """The map holds the routed experts, the weights theirs, and an empty slot is nowhere."""
        weights_TE, map_TE = self.routing().dense()
        assert [[0.25, 0.0, 0.5], [0.0, 0.125, 0.0], [0.0, 0.0, 0.0]] == weights_TE.tolist()
        assert [[True, False, True], [False, True, False], [False, False, False]] == map_TE.tolist()

    def test_the_gradient_comes_back_to_its_slot(self) -> None:
        """Dense weights are differentiable; an empty slot gets zero."""
        routing = self.routing()
        weights_TE, _ = routing.dense()
        weights_TE.backward(torch.arange(9.0).reshape(3, 3))
        assert routing.weights_TK.grad is not None
        assert [[2.0, 0.0], [0.0, 4.0], [0.0, 0.0]] == routing.weights_TK.grad.tolist()

    def test_an_expert_twice_has_no_dense_form(self) -> None:
        """A map has no place for an expert that is named twice."""
        with pytest.raises(Unsupported, match="twice"):
            Routing(torch.tensor([[1, 1]]), torch.ones(1, 2), 3).dense()

    def test_from_dense_is_the_way_back(self) -> None:
        """Dense and back gives the same experts with the same weights, in some slot order."""
        back = Routing.from_dense(*self.routing().dense())
        pairs = [
            {(e, w) for e, w in zip(ids, weights, strict=True) if e >= 0}
            for ids, weights in zip(back.ids_TK.tolist(), back.weights_TK.tolist(), strict=True)
        ]
        assert [{(2, 0.5), (0, 0.25)}, {(1, 0.125)}, set()] == pairs

    def test_no_tokens_have_no_slots(self) -> None:
        """An empty map gives K = 0."""
        assert (0, 0) == tuple(Routing.from_dense(torch.zeros(0, 3), torch.zeros(0, 3).bool()).ids_TK.shape)


class TestDelivery:
    def test_grouped_counts_become_ids_and_the_tail_none(self) -> None:
        """Rows take the expert of their group; rows beyond the counts belong to nobody."""
        delivery = Delivery.grouped(torch.zeros(6, 2), [2, 0, 3], torch.arange(6.0))
        assert [0, 0, 2, 2, 2, -1] == delivery.ids_RJ[:, 0].tolist()
        assert [2, 0, 3] == (delivery.counts_N.tolist() if delivery.counts_N is not None else None)

    def test_batched_fills_places_by_count(self) -> None:
        """The first places of each expert are filled, the others empty; without counts all are filled."""
        rows_NCD = torch.zeros(2, 3, 5)
        assert [0, 0, -1, 1, -1, -1] == Delivery.batched(rows_NCD, [2, 1]).ids_RJ[:, 0].tolist()
        assert [0, 0, 0, 1, 1, 1] == Delivery.batched(rows_NCD).ids_RJ[:, 0].tolist()
        assert (2, 3, 5) == Delivery.batched(rows_NCD).shape

    def test_listed_takes_ids_as_given(self) -> None:
        """Listed rows bring their own ids."""
        ids_RJ = torch.tensor([[0, -1], [1, 0]], dtype=torch.int32)
        assert [[0, -1], [1, 0]] == Delivery.listed(torch.zeros(2, 3), ids_RJ).ids_RJ.tolist()

    def test_rows_for_nobody_are_padding_unless_said_otherwise(self) -> None:
        """Only a listed delivery may want zero for a row with no id."""
        rows, ids_RJ = torch.zeros(2, 3), torch.tensor([[0], [-1]])
        assert {"padding"} == {each.unrouted for each in (Delivery.listed(rows, ids_RJ), Delivery.grouped(rows, [1]))}
        assert "zero" == Delivery.listed(rows, ids_RJ, unrouted="zero").unrouted

    @pytest.mark.parametrize(
        "claim",
        [
            lambda: Delivery.grouped(torch.zeros(3, 2), [2, 2]),
            lambda: Delivery.grouped(torch.zeros(3, 2), [4, -1]),
            lambda: Delivery.batched(torch.zeros(2, 3, 2), [4, 0]),
            lambda: Delivery.batched(torch.zeros(2, 3, 2), [-1, 0]),
        ],
    )
    def test_counts_that_cannot_be_are_malformed(self, claim: Callable[[], Delivery]) -> None:
        """Counts beyond the rows, or below zero, contradict the rows and are judged as a failure."""
        with pytest.raises(Malformed, match="counts"):
            claim()


class TestWhole:
    def test_halves_make_an_exchange(self) -> None:
        """The two halves and the expert between them are one call."""

        class Halves:
            local_experts = (0,)
            resolved: dict[str, str] = {}  # noqa: RUF012  # a test double

            def dispatch(self, x: torch.Tensor, routing: Routing) -> tuple[Delivery, int]:
                return Delivery.grouped(x, [x.shape[0]]), 5

            def combine(self, rows: torch.Tensor, handle: int) -> torch.Tensor:
                return rows + handle

        routing = Routing(torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 1)
        y = whole(Halves())(torch.ones(2, 3), routing, lambda delivery: delivery.rows_RD * 2)
        assert [[7.0] * 3] * 2 == y.tolist()
