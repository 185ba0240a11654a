"""Padding, worked out twice: the first pads before it computes, the longhand computes real tokens alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from reference import experts, padding_bounds
from reference import packing as first
from self_tests.oracles import layer
from self_tests.oracles import packing as second
from self_tests.oracles.agreement import assert_close, check_refused, floats
from self_tests.oracles.packing_cases import D, assert_gradients, rank_of

Floats = NDArray[np.float64]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)

GROUPS = [[[0], [1], [2], [3]], [[0, 1], [2, 3]], [[2, 0], [3, 1]], [[1], [3, 0, 2]], [[3, 2, 1, 0]]]


@st.composite
def token_counts(draw: st.DrawFn) -> tuple[int, list[int]]:
    """An alignment, and counts of four ranks at and beside its multiples, none among them."""
    A = draw(st.sampled_from([1, 3, 8, 64]))
    near = st.sampled_from([0, 1, A - 1, A, A + 1, 2 * A, 2 * A + 1])
    return A, [draw(near) for _ in range(4)]


class TestCommonCounts:
    @pairs_agree
    @given(token_counts(), st.sampled_from(GROUPS), st.booleans())
    def test_padded_counts_agree(self, case: tuple[int, list[int]], groups: list[list[int]], kernel: bool) -> None:
        """Every rank pads to the largest count of its own group, rounded up."""
        A, tokens = case
        made = first.padded_counts(tokens, groups, alignment=A, needs_a_row=kernel)
        assert second.common_counts(tokens, groups, A, at_least_one=kernel) == list(made)

    @pairs_agree
    @given(st.integers(0, 200), st.sampled_from([1, 2, 7, 64]))
    def test_rounding_up_agrees(self, count: int, A: int) -> None:
        """A count, or a configured bound, becomes the smallest multiple that holds it."""
        expected = second.next_multiple(count, A)
        assert [expected, expected] == [
            first.aligned(count, alignment=A),
            padding_bounds.bounded_count(count, alignment=A),
        ]

    @pairs_agree
    @given(token_counts(), st.sampled_from(GROUPS), st.integers(-2, 2), st.integers(0, 15))
    def test_legal_refusals_agree(
        self, case: tuple[int, list[int]], groups: list[list[int]], beside: int, answers: int
    ) -> None:
        """For bounds at and beside a rank's count, and any ranks refusing, both say which groups did right."""
        A, tokens = case
        bound = max(0, tokens[0] + beside)
        refused = [bool(answers >> rank & 1) for rank in range(4)]
        made = padding_bounds.legal_refusals(refused, tokens, groups, bound, alignment=A)
        assert second.refusals_are_legal(refused, tokens, groups, bound, A) == list(made)

    @pairs_agree
    @given(st.lists(st.integers(0, 1), min_size=4, max_size=4), st.sampled_from(GROUPS))
    def test_groups_with_unequal_counts_agree(self, tokens: list[int], groups: list[list[int]]) -> None:
        """A group may refuse because of its own counts only."""
        assert second.unequal(tokens, groups) == list(padding_bounds.may_refuse_unequal(tokens, groups))

    @pytest.mark.parametrize(
        ("tokens", "groups", "A"),
        [([3, -1], [[0, 1]], 4), ([3, 1], [[0, 1]], 0), ([3, 1], [[0]], 4), ([3, 1], [[0, 1], [1]], 4),
         ([3], [[0, 1]], 4)],
    )  # fmt: skip
    def test_bad_counts_and_groups_are_refused(self, tokens: list[int], groups: list[list[int]], A: int) -> None:
        """Negative counts, no alignment, ranks in no group, in two, or unknown."""
        check_refused(
            lambda: first.padded_counts(tokens, groups, alignment=A), lambda: second.common_counts(tokens, groups, A)
        )
        refused = [False] * len(tokens)
        check_refused(
            lambda: padding_bounds.legal_refusals(refused, tokens, groups, 5, alignment=A),
            lambda: second.refusals_are_legal(refused, tokens, groups, 5, A),
        )

    def test_answers_of_other_ranks_are_refused(self) -> None:
        """Each rank has one count and one answer."""
        check_refused(
            lambda: padding_bounds.legal_refusals([True], [3, 1], [[0, 1]], 5),
            lambda: second.refusals_are_legal([True], [3, 1], [[0, 1]], 5, 64),
        )


class TestPaddingAtTheEnd:
    @pairs_agree
    @given(st.integers(0, 4), st.integers(0, 3), st.integers(0, 10**6))
    def test_padded_inputs_agree(self, T: int, spare: int, seed: int) -> None:
        """Both append rows of zeros with empty slots of weight zero, and nothing where there is no room."""
        rank = rank_of(T, seed)
        x_TD, ids_TK, weights_TK = rank.tokens
        made = first.pad(floats(x_TD), torch.from_numpy(ids_TK), floats(weights_TK), T + spare)
        for expected, actual in zip(second.with_padding(rank.tokens, T + spare), made, strict=True):
            assert (expected.shape, expected.tolist()) == (tuple(actual.shape), actual.tolist())
        assert torch.int64 == made.ids_PK.dtype

    @pairs_agree
    @given(
        st.sampled_from([(), (0,), (1,), (4,), (2, 0), (2, 1), (1, 2, 2)]),
        st.integers(0, 3),
        st.sampled_from(["output", "input"]),
        st.integers(0, 10**6),
    )
    def test_outputs_and_gradients_are_those_without_padding(
        self, lead: tuple[int, ...], spare: int, at: layer.Applied, seed: int
    ) -> None:
        """However many rows are added, y, dx, dweights and the experts' gradients are those of the real rows."""
        T = int(np.prod(lead, dtype=np.int64))
        rank = rank_of(T, seed)
        x_TD, ids_TK, weights_TK, named = rank.leaves()
        x_LD = x_TD.detach().reshape(*lead, D).requires_grad_()
        y_LD = first.padded_forward(x_LD, ids_TK, weights_TK, experts.swiglu_experts(named), T + spare, weights_at=at)
        (expected,) = layer.forward([rank.tokens], rank.experts, at)
        assert_close(expected.reshape(*lead, D), y_LD)
        if y_LD.requires_grad:
            y_LD.backward(floats(rank.dy_TD.reshape(*lead, D)))
        back = layer.backward([rank.tokens], rank.experts, at, [rank.dy_TD])
        leaves = [x_LD, weights_TK, *named.values()]
        assert_gradients(rank, leaves, (back.dx[0], back.dweights[0], back.experts))

    @pairs_agree
    @given(st.sampled_from([(), (0,), (3,), (2, 2), (0, 3), (1, 3)]), st.integers(0, 2), st.integers(0, 10**6))
    def test_cutting_back_agrees(self, lead: tuple[int, ...], spare: int, seed: int) -> None:
        """The first rows are kept, in the input's shape; a row that is cut gets a gradient of zero."""
        P = int(np.prod(lead, dtype=np.int64)) + spare
        random = np.random.default_rng(seed)
        y_PD, dy_LD = random.normal(size=(P, D)), random.normal(size=(*lead, D))
        leaf = floats(y_PD, leaf=True)
        made = first.trim(leaf, lead)
        assert second.cut_back(y_PD, lead).tolist() == made.tolist()
        assert (*lead, D) == tuple(made.shape)
        (grad,) = torch.autograd.grad(made, leaf, floats(dy_LD))
        assert second.restored(dy_LD, P).tolist() == grad.tolist()

    def test_the_longhand_with_padding_is_the_longhand_without(self) -> None:
        """Padded, computed, cut back, by hand and all the way: the bits of not padding."""
        rank = rank_of(3, seed=8)
        (y_PD,) = layer.forward([second.with_padding(rank.tokens, 7)], rank.experts, "output")
        (y_TD,) = layer.forward([rank.tokens], rank.experts, "output")
        assert y_TD.tolist() == second.cut_back(y_PD, (3,)).tolist()

    def test_autograd_of_padding_is_its_derivative(self) -> None:
        """Gradcheck of pad, layer and cut in x, weights and every matrix."""
        x_TD, ids_TK, weights_TK, named = rank_of(3, seed=5).leaves()

        def padded(x: Tensor, w: Tensor, *matrices: Tensor) -> Tensor:
            expert = experts.swiglu_experts(dict(zip(named, matrices, strict=True)))
            return first.padded_forward(x.reshape(1, 3, D), ids_TK, w, expert, 7)

        assert torch.autograd.gradcheck(padded, [x_TD, weights_TK, *named.values()])

    def test_microbatches_of_other_sizes_change_nothing(self) -> None:
        """Forward of 70, 64, 0 and 1 tokens, backward in the opposite order: each as if it were alone."""
        ranks = [rank_of(T, seed) for seed, T in enumerate([70, 64, 0, 1])]
        alone, together = [], []
        for reverse, results in ((False, alone), (True, together)):
            flight = []
            for rank, rows in zip(ranks, [128, 64, 64, 64], strict=True):
                x, ids, w, named = rank.leaves()
                y = first.padded_forward(x, ids, w, experts.swiglu_experts(named), rows)
                flight.append((x, w, y, rank))
            for x, w, y, rank in reversed(flight) if reverse else flight:
                inputs = (
                    torch.autograd.grad(y, [x, w], floats(rank.dy_TD), allow_unused=True) if y.requires_grad else ()
                )
                results.append([tuple(y.shape), y.tolist(), [grad.tolist() for grad in inputs]])
        assert alone == together[::-1]

    def test_bad_sizes_are_refused(self) -> None:
        """Fewer rows than tokens, parts of different length, a cut to more rows than there are."""
        tokens = rank_of(3, seed=1).tokens
        x, ids, w = floats(tokens.x_TD), torch.from_numpy(tokens.ids_TK), floats(tokens.weights_TK)
        check_refused(lambda: first.pad(x, ids, w, 2), lambda: second.with_padding(tokens, 2))
        cut = layer.Tokens(tokens.x_TD, tokens.ids_TK[:2], tokens.weights_TK)
        check_refused(lambda: first.pad(x, ids[:2], w, 4), lambda: second.with_padding(cut, 4))
        cut = layer.Tokens(tokens.x_TD, tokens.ids_TK, tokens.weights_TK[:2])
        check_refused(lambda: first.pad(x, ids, w[:2], 4), lambda: second.with_padding(cut, 4))
        for lead in [(4,), (2, 2), (-1,), (-1, -2)]:
            check_refused(lambda lead=lead: first.trim(x, lead), lambda lead=lead: second.cut_back(tokens.x_TD, lead))


class TestByHand:
    def test_the_laws_own_numbers(self) -> None:
        """Alignment 64 is the default: 0, 1, 64, 65 and 70 become 0, 64, 64, 128 and 128."""
        expected = [0, 64, 64, 128, 128]
        assert expected == [first.aligned(count) for count in (0, 1, 64, 65, 70)]
        assert expected == [second.next_multiple(count, 64) for count in (0, 1, 64, 65, 70)]

    def test_two_groups_pad_by_themselves(self) -> None:
        """Counts 70, 0, 3 and 64 in groups {0, 1} and {2, 3}: 128 rows on ranks 0 and 1, 64 on 2 and 3."""
        assert (128, 128, 64, 64) == first.padded_counts([70, 0, 3, 64], [[0, 1], [2, 3]])
        assert [128, 128, 64, 64] == second.common_counts([70, 0, 3, 64], [[0, 1], [2, 3]], 64)

    def test_a_bound_of_five_with_room_for_eight(self) -> None:
        """B = 5, A = 8: 5 tokens may not be refused, 6 to 8 may, by all or nobody, and 9 must be."""
        verdicts = {}
        for largest in (5, 6, 8, 9):
            for refused in ([False, False], [True, False], [True, True]):
                made = padding_bounds.legal_refusals(refused, [2, largest], [[0, 1]], 5, alignment=8)
                assert second.refusals_are_legal(refused, [2, largest], [[0, 1]], 5, 8) == list(made)
                verdicts[largest, sum(refused)] = made[0]
        legal = {(5, 0), (6, 0), (6, 2), (8, 0), (8, 2), (9, 2)}
        assert legal == {case for case, verdict in verdicts.items() if verdict}
