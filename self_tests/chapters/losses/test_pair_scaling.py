"""What becomes of a loss, worked out twice: attached, averaged over a step, added over layers, reported."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from moe_conformance.reference.losses import balance as first_losses
from moe_conformance.reference.losses import reports as first_reports
from moe_conformance.reference.losses import scaling as first
from moe_conformance.reference.losses import z_loss as first_z
from self_tests.chapters.losses.second import balance as second_losses
from self_tests.chapters.losses.second import scaling as second
from self_tests.chapters.losses.second.balance import Loss, Tokens
from self_tests.chapters.losses.test_pair_refusals import refused
from self_tests.chapters.routing.second.routes import Gate
from self_tests.chapters.routing.test_pair import Case, cases, first_weights
from self_tests.oracles.agreement import assert_close, floats

Floats = NDArray[np.float64]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)


class Step(NamedTuple):
    """Gradients of every microbatch and group, and how many valid tokens each had."""

    gradients: list[list[Floats]]
    valid: list[list[int]]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Any numbers of microbatches and groups; parts, and whole steps, without a valid token."""
    M, dp = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    sizes = draw(st.sampled_from([[0], [0, 2, 7], [5], [3, 11, 13]]))
    valid = [[draw(st.sampled_from(sizes)) for _ in range(dp)] for _ in range(M)]
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    shape = draw(st.sampled_from([(3, 2), (4,), ()]))
    return Step([[np.asarray(random.normal(size=shape)) for _ in range(dp)] for _ in range(M)], valid)


def tensors(table: list[list[Floats]]) -> list[list[Tensor]]:
    """The gradients as the first oracle takes them."""
    return [[floats(gradient) for gradient in row] for row in table]


class TestFinishedGradients:
    @pairs_agree
    @given(steps(), st.sampled_from([1.0, 0.125, -3.0]))
    def test_all_three_conventions_agree(self, step: Step, scale: float) -> None:
        """Mean, scaled sum and division by tokens agree for any step."""
        gradients = tensors(step.gradients)
        assert_close(second.mean(step.gradients), first.mean_gradient(gradients), addend=1.0)
        addend = 12.0 * abs(scale)
        assert_close(
            second.scaled_sum(step.gradients, scale), first.sum_gradient(gradients, scale=scale), addend=addend
        )
        assert_close(
            second.by_tokens(step.gradients, step.valid), first.token_gradient(gradients, step.valid), addend=1.0
        )

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_narrow_gradients_are_widened_first(self, dtype: torch.dtype) -> None:
        """Gradients of fewer bits are taken as exact numbers and added in float64."""
        narrow = [[torch.randn(3, generator=torch.Generator().manual_seed(m)).to(dtype)] for m in range(3)]
        wide, valid = [[row[0].double().numpy()] for row in narrow], [[2], [3], [5]]
        assert_close(second.mean(wide), first.mean_gradient(narrow), addend=1.0)
        assert_close(second.scaled_sum(wide, 0.3), first.sum_gradient(narrow, scale=0.3), addend=1.0)
        assert_close(second.by_tokens(wide, valid), first.token_gradient(narrow, valid), addend=1.0)

    @pytest.mark.parametrize("shapes", [[], [[]], [[], []], [["a"], ["a", "a"]], [["a", "a"], ["a"]], [["a", "b"]]])
    def test_tables_with_holes_are_refused(self, shapes: list[list[str]]) -> None:
        """No entry, another number of groups from one microbatch to the next, gradients of two shapes."""
        table = [[np.zeros({"a": 3, "b": 2}[name]) for name in row] for row in shapes]
        valid = [[1 for _ in row] for row in table]
        assert refused(lambda: first.mean_gradient(tensors(table)))
        assert refused(lambda: second.mean(table))
        assert refused(lambda: first.sum_gradient(tensors(table), scale=1.0))
        assert refused(lambda: second.scaled_sum(table, 1.0))
        assert refused(lambda: first.token_gradient(tensors(table), valid))
        assert refused(lambda: second.by_tokens(table, valid))

    @pytest.mark.parametrize("valid", [[[1, 2]], [[1], [2], [3]], [[1, 1], [1, 1]], [[1], [-1]], []])
    def test_token_numbers_that_do_not_fit_are_refused(self, valid: list[list[int]]) -> None:
        """One number of tokens for each gradient, none of them negative."""
        table = [[np.ones(3)], [np.ones(3)]]
        assert refused(lambda: first.token_gradient(tensors(table), valid))
        assert refused(lambda: second.by_tokens(table, valid))

    def test_by_hand(self) -> None:
        """Gradients 1, 2 and 6 of microbatches with 5, 0 and 3 valid tokens."""
        # mean: 9 / 3 = 3, the empty microbatch counts. sum with s = 1/2: 4.5. tokens: (5*1 + 0*2 + 3*6) / 8 = 23 / 8.
        table, valid = [[np.array([g])] for g in (1.0, 2.0, 6.0)], [[5], [0], [3]]
        assert [3.0] == first.mean_gradient(tensors(table)).tolist()
        assert [4.5] == first.sum_gradient(tensors(table), scale=0.5).tolist()
        assert [2.875] == first.token_gradient(tensors(table), valid).tolist()
        assert [[3.0], [4.5], [2.875]] == [
            pytest.approx(answer.tolist(), rel=1e-14)
            for answer in (second.mean(table), second.scaled_sum(table, 0.5), second.by_tokens(table, valid))
        ]
        # Equal numbers of tokens, whatever the number, make the division by tokens the mean.
        assert [3.0] == pytest.approx(first.token_gradient(tensors(table), [[7], [7], [7]]).tolist(), rel=1e-14)
        assert [0.0] == first.token_gradient(tensors(table), [[0], [0], [0]]).tolist()


class TestAttachedGradient:
    @pairs_agree
    @given(cases(ties=False, most_tokens=5), st.sampled_from([0.0, 1.0, 0.25, -3.0]), st.integers(0, 3))
    def test_attached_gradients_agree(self, case: Case, scale: float, number: int) -> None:
        """The weights' gradient once, and `scale` times that of each of no, one, two or three losses."""
        gate, ids_TK = case.gate, second_losses.own_choices("sigmoid", case.logits_TE, case.gate.slots)
        ids, batch = torch.from_numpy(ids_TK), Tokens(case.logits_TE, ids_TK)
        options = {"score": "softmax", "coefficient": 1.7}
        losses = [
            lambda logits: first_losses.auxiliary_loss(logits, ids, **options),
            lambda logits: first_z.z_loss(logits, coefficient=0.3),
            lambda logits: first_losses.auxiliary_loss(logits, ids, score="sigmoid", coefficient=0.9),
        ][:number]
        by_hand = [
            second_losses.auxiliary(batch, "softmax", 1.7),
            second_losses.z(case.logits_TE, 0.3),
            second_losses.auxiliary(batch, "sigmoid", 0.9),
        ][:number]
        actual = first.attached_gradient(
            floats(case.logits_TE),
            lambda logits: first_weights(logits, ids_TK, gate),
            floats(case.upstream_TK),
            losses,
            scale=scale,
        )
        expected = second.attached(case.logits_TE, ids_TK, gate, case.upstream_TK, by_hand, scale)
        assert_close(expected, actual, addend=50.0)

    def test_the_upstream_gradient_scales_its_own_term_alone(self) -> None:
        """With u = 0 what remains is s grad L; doubling u doubles the rest; s = 0 leaves u's term bit for bit."""
        random = np.random.default_rng(3)
        logits_TE, upstream_TK = random.normal(size=(4, 5)), random.normal(size=(4, 2))
        ids_TK = second_losses.own_choices("softmax", logits_TE, 2)
        gate, by_hand = Gate(2, normalise=True), second_losses.z(logits_TE, 1.3)

        def attached(times: float, scale: float) -> Floats:
            """Gradient with the upstream gradient taken so many times."""
            gradient_TE = first.attached_gradient(
                floats(logits_TE),
                lambda logits: first_weights(logits, ids_TK, gate),
                floats(times * upstream_TK),
                [lambda logits: first_z.z_loss(logits, coefficient=1.3)],
                scale=scale,
            )
            return gradient_TE.numpy()

        np.testing.assert_allclose(attached(0.0, 0.25), 0.25 * by_hand.gradient_TE, rtol=1e-13)
        np.testing.assert_allclose(
            attached(2.0, 0.25) - attached(1.0, 0.25), attached(1.0, 0.0), rtol=1e-12, atol=1e-14
        )
        leaf = floats(logits_TE, leaf=True)
        first_weights(leaf, ids_TK, gate).backward(floats(upstream_TK))
        assert leaf.grad is not None
        assert leaf.grad.tolist() == attached(1.0, 0.0).tolist()

    def test_losses_add_each_with_its_own_coefficient(self) -> None:
        """By hand: one token of two experts at l = 0, u = 0, s = 1/2, z-losses of 1 and 3."""
        # Z = log 2, dL/dl_e = 2 c Z / 2 = c log 2. Times s, c = 1 and 3 together: 2 log 2.
        zeros, nothing = np.zeros((1, 2)), Loss(0.0, np.zeros((1, 2)))
        losses = [lambda logits, c=c: first_z.z_loss(logits, coefficient=c) for c in (1.0, 3.0)]
        actual = first.attached_gradient(
            floats(zeros), lambda logits: logits[:, :1].softmax(dim=1), floats(zeros[:, :1]), losses, scale=0.5
        )
        expected = [[2 * math.log(2)] * 2]
        np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-14)
        by_hand = [second_losses.z(zeros, 1.0), nothing, second_losses.z(zeros, 3.0)]
        np.testing.assert_allclose(
            second.attached(zeros, np.array([[0]]), Gate(1, "softmax_topk"), zeros[:, :1], by_hand, 0.5),
            expected,
            rtol=1e-14,
        )


class TestRouterGradients:
    @pairs_agree
    @given(st.integers(0, 5), st.integers(1, 4), st.integers(1, 6), st.integers(0, 10**6))
    def test_gradients_of_input_and_weight_agree(self, T: int, E: int, D: int, seed: int) -> None:
        """Both carry the logits' gradient on alike, and as autograd does through l = x W^T."""
        random = np.random.default_rng(seed)
        x_TD, router_ED, dlogits_TE = (random.normal(size=size) for size in [(T, D), (E, D), (T, E)])
        dx_TD, drouter_ED = second.through_router(x_TD, router_ED, dlogits_TE)
        first_dx, first_drouter = first.router_gradients(floats(x_TD), floats(router_ED), floats(dlogits_TE))
        assert_close(dx_TD, first_dx, addend=10.0)
        assert_close(drouter_ED, first_drouter, addend=10.0)
        leaves = floats(x_TD, leaf=True), floats(router_ED, leaf=True)
        (leaves[0] @ leaves[1].T).backward(floats(dlogits_TE))
        assert leaves[0].grad is not None
        assert leaves[1].grad is not None
        assert_close(dx_TD, leaves[0].grad, addend=10.0)
        assert_close(drouter_ED, leaves[1].grad, addend=10.0)

    @pytest.mark.parametrize(
        ("x", "router", "dlogits"),
        [((2, 3), (5, 4), (2, 5)), ((2, 3), (5, 3), (1, 5)), ((2, 3), (5, 3), (2, 1)), ((2, 3), (5, 3), (5, 2))],
    )
    def test_shapes_that_do_not_fit_are_refused(
        self, x: tuple[int, int], router: tuple[int, int], dlogits: tuple[int, int]
    ) -> None:
        """Also those that a library would spread over the others."""
        arrays = [np.ones(size) for size in (x, router, dlogits)]
        assert refused(lambda: first.router_gradients(*map(floats, arrays)))
        assert refused(lambda: second.through_router(*arrays))


class TestReports:
    @pairs_agree
    @given(
        st.lists(st.booleans(), min_size=1, max_size=5).filter(any),
        st.integers(0, 3),
        st.integers(1, 3),
        st.sampled_from([None, 0.01, 2.0, -1.0]),
    )
    def test_reports_agree(self, pattern: list[bool], M: int, dp: int, coefficient: float | None) -> None:
        """The mean covers microbatches, groups and the layers that have a router, and no others."""
        random = np.random.default_rng(len(pattern) + M)
        layers = [random.normal(size=(M, dp)) if routed else None for routed in pattern]
        tables = [None if layer is None else floats(layer) for layer in layers]
        expected = second.report(layers, coefficient)
        assert_close(np.array(expected), first_reports.reported(tables, coefficient=coefficient), addend=100.0)

    @pairs_agree
    @given(st.lists(st.one_of(st.none(), st.floats(-3.0, 3.0)), max_size=6))
    def test_sums_over_layers_agree(self, losses: list[float | None]) -> None:
        """What trains the model is the sum over layers with a router; without any it is 0."""
        total = first_reports.model_loss([None if loss is None else floats(np.array(loss)) for loss in losses])
        assert_close(np.array(second.of_model(losses)), total, addend=10.0)

    def test_by_hand(self) -> None:
        """Layers 1 and 3 of 4 have a router; two microbatches, two groups."""
        # Layer 1: 1, 2, 3, 6; layer 3: 0, 4, 0, 8. Sum 24, over M dp Y = 8: 3. Without a coefficient of 1/2: 6.
        layers = [None, np.array([[1.0, 2.0], [3.0, 6.0]]), None, np.array([[0.0, 4.0], [0.0, 8.0]])]
        tables = [None if layer is None else floats(layer) for layer in layers]
        assert (3.0, 6.0) == (
            first_reports.reported(tables).item(),
            first_reports.reported(tables, coefficient=0.5).item(),
        )
        assert (3.0, 6.0) == (second.report(layers), second.report(layers, 0.5))
        assert (3.0, 3.0) == (first_reports.reported(tables[:2]).item(), second.report(layers[:2]))

    @pytest.mark.parametrize(
        ("shapes", "coefficient"),
        [([], None), ([None, None], None), ([(2, 0)], None), ([(2, 3)], 0.0), ([(2, 3), None, (3, 2)], None)],
    )
    def test_reports_of_nothing_are_refused(
        self, shapes: list[tuple[int, int] | None], coefficient: float | None
    ) -> None:
        """No layer with a router, no group, a coefficient to divide by that is 0, layers that differ."""
        layers = [None if shape is None else np.ones(shape) for shape in shapes]
        tables = [None if layer is None else floats(layer) for layer in layers]
        assert refused(lambda: first_reports.reported(tables, coefficient=coefficient))
        assert refused(lambda: second.report(layers, coefficient))

    @pairs_agree
    @given(st.lists(st.sampled_from(["training", "recomputed", "evaluation", "no_grad", "test"]), max_size=6))
    def test_forwards_that_count_agree(self, kinds: list[str]) -> None:
        """Both count the same forwards, and refuse the same histories."""
        refusals = (
            refused(lambda: first_reports.training_forwards(kinds)),
            refused(lambda: second.counted_forwards(kinds)),
        )
        assert refusals in [(True, True), (False, False)]
        if not any(refusals):
            assert second.counted_forwards(kinds) == list(first_reports.training_forwards(kinds))

    def test_a_forward_that_runs_twice_is_one(self) -> None:
        """Of training, its recomputation, evaluation, a forward without gradients and training: two count."""
        kinds = ["training", "evaluation", "recomputed", "no_grad", "training", "recomputed", "recomputed"]
        assert [0, 4] == list(first_reports.training_forwards(kinds))
        assert [0, 4] == second.counted_forwards(kinds)
