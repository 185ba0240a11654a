"""What becomes of a loss, worked out twice: attached, averaged over a step, added over layers, reported."""

from __future__ import annotations

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
from self_tests.chapters.losses.second.balance import Tokens
from self_tests.chapters.routing.test_pair import Case, cases, first_weights
from self_tests.oracles.agreement import assert_close, floats
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

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


class TestAttachedGradient:
    @pairs_agree
    @given(cases(ties=False, most_tokens=5), st.sampled_from([0.0, 1.0, 0.25, -3.0]), st.integers(0, 3))
    def test_attached_gradients_agree(self, case: Case, scale: float, number: int) -> None:
        """The weights' gradient once, and `scale` times that of each of no, one, two or three losses."""
        gate, ids_TK = case.gate, second_losses.own_choices("sigmoid", case.logits_TE, case.gate.slots)
        ids, batch = torch.from_numpy(ids_TK), Tokens(case.logits_TE, ids_TK)
        options = {"score": "softmax", "coefficient": 1.7}
        losses = [
            lambda logits: first_losses.auxiliary_loss(logits, ids, **options),  # type: ignore[arg-type]
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

    @pairs_agree
    @given(st.lists(st.sampled_from(["training", "recomputed", "evaluation", "no_grad", "test"]), max_size=6))
    def test_forwards_that_count_agree(self, kinds: list[str]) -> None:
        """Both count the same forwards, and refuse the same histories."""
        try:
            expected = second.counted_forwards(kinds)
        except ValueError:
            with pytest.raises(ValueError, match=r"."):
                first_reports.training_forwards(kinds)  # type: ignore[arg-type]
        else:
            assert expected == list(first_reports.training_forwards(kinds))  # type: ignore[arg-type]


ONE, TWO = np.ones(3), np.ones(2)
STEP = [[np.array([g])] for g in (1.0, 2.0, 6.0)]  # three microbatches of one group
HOLES = [
    ("no microbatch", []),
    ("no group", [[]]),
    ("no group in two microbatches", [[], []]),
    ("one group, then two", [[ONE], [ONE, ONE]]),
    ("two groups, then one", [[ONE, ONE], [ONE]]),
    ("gradients of two shapes", [[ONE, TWO]]),
]
# Layers 1 and 3 of 4 have a router; two microbatches, two groups. Sum 24, over M dp Y = 8.
LAYERS = [None, np.array([[1.0, 2.0], [3.0, 6.0]]), None, np.array([[0.0, 4.0], [0.0, 8.0]])]
TRAINED = ["training", "evaluation", "recomputed", "no_grad", "training", "recomputed", "recomputed"]

test_by_hand = by_hand(
    *rows(first.mean_gradient, second.mean,
        ("an empty microbatch counts: 9 / 3", (STEP,), [3.0]),
        *((f"mean of {name}", (table,), REFUSED) for name, table in HOLES),
    ),
    *rows(lambda table, scale: first.sum_gradient(table, scale=scale), second.scaled_sum,
        ("9 / 2", (STEP, 0.5), [4.5]),
        *((f"sum of {name}", (table, 1.0), REFUSED) for name, table in HOLES),
    ),
    *rows(first.token_gradient, second.by_tokens,
        ("(5*1 + 0*2 + 3*6) / 8", (STEP, [[5], [0], [3]]), [2.875]),
        ("equal numbers of tokens make it the mean", (STEP, [[7], [7], [7]]), [3.0]),
        ("no token at all", (STEP, [[0], [0], [0]]), [0.0]),
        *((f"tokens of {name}", (table, [[1 for _ in row] for row in table]), REFUSED) for name, table in HOLES),  # type: ignore[attr-defined]
        *(
            (f"numbers of tokens {valid} for two gradients", ([[ONE], [ONE]], valid), REFUSED)
            for valid in [[[1, 2]], [[1], [2], [3]], [[1, 1], [1, 1]], [[1], [-1]], []]
        ),
    ),
    *rows(first.router_gradients, second.through_router,
        *(
            (f"shapes {x}, {router}, {dlogits}", (np.ones(x), np.ones(router), np.ones(dlogits)), REFUSED)
            for x, router, dlogits in [
                ((2, 3), (5, 4), (2, 5)), ((2, 3), (5, 3), (1, 5)), ((2, 3), (5, 3), (2, 1)), ((2, 3), (5, 3), (5, 2)),
            ]
        ),
    ),
    *rows(lambda layers, coefficient=None: first_reports.reported(layers, coefficient=coefficient), second.report,
        ("layers without a router are in no mean", (LAYERS,), 3.0),
        ("divided by the coefficient", (LAYERS, 0.5), 6.0),
        ("a coefficient of 0", ([np.ones((2, 3))], 0.0), REFUSED),
        ("no layer", ([],), REFUSED),
        ("no layer with a router", ([None, None],), REFUSED),
        ("no group", ([np.ones((2, 0))],), REFUSED),
        ("layers that differ", ([np.ones((2, 3)), None, np.ones((3, 2))],), REFUSED),
    ),
    *rows(first_reports.training_forwards, second.counted_forwards,
        ("a forward that runs twice is one", (TRAINED,), [0, 4]),
    ),
)  # fmt: skip
