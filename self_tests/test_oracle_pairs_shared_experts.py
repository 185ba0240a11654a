"""Shared experts, worked out twice: the first with matrices and autograd, the longhand token by token."""

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

from reference import expert_forms, experts, shared_expert_gradients, shared_expert_parts
from reference import layer as first_layer
from reference import shared_experts as first
from self_tests.oracles import layer
from self_tests.oracles import shared_experts as second
from self_tests.oracles.agreement import assert_close, check_refused, floats, ints
from self_tests.oracles.experts import SwiGLU

Floats = NDArray[np.float64]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)

K, E, F, D = 2, 4, 3, 5
# Addends that cancel are as large as this: sums of a few products of normal numbers.
ADDEND = 10.0


class Case(NamedTuple):
    """Tokens of every rank, routed and shared experts, the gate if there is one, and what comes back."""

    batch: list[layer.Tokens]
    routed: list[SwiGLU]
    shared: list[second.Shared]
    v_D: Floats | None
    upstream: list[Floats]

    def parameters(self) -> dict[tuple[str, int], Tensor]:
        """Routed experts as the first oracle takes them."""
        return {
            (name, e): floats(matrix)
            for e, expert in enumerate(self.routed)
            for name, matrix in zip(("gate", "up", "down"), expert, strict=True)
        }

    def batches(self) -> list[first_layer.Batch]:
        """Tokens as the first oracle takes them."""
        return [
            first_layer.Batch(floats(x), torch.from_numpy(ids), floats(w), floats(dy))
            for (x, ids, w), dy in zip(self.batch, self.upstream, strict=True)
        ]


def shared_of(expert: second.Shared, *, leaf: bool = False) -> first.SharedExpert:
    """One shared expert as the first oracle takes it."""
    bias_D = None if expert.bias_D is None else floats(expert.bias_D, leaf=leaf)
    return first.SharedExpert(*(floats(matrix, leaf=leaf) for matrix in expert.matrices), bias_D)


def gate_of(case: Case) -> Tensor | None:
    """The gate as the first oracle takes it."""
    return None if case.v_D is None else floats(case.v_D)


def drawn_shared(random: np.random.Generator, units: int, biased: bool) -> second.Shared:
    """A shared expert of this width."""
    matrices = SwiGLU(*(random.normal(size=size) for size in [(units, D), (units, D), (D, units)]))
    return second.Shared(matrices, random.normal(size=D) if biased else None)


@st.composite
def cases(draw: st.DrawFn, ranks: int = 3) -> Case:
    """Absent tokens, empty slots, an idle expert; no, one or several shared experts of any width, biased or not."""
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    batch, upstream = [], []
    for _ in range(draw(st.integers(1, ranks))):
        T = draw(st.integers(0, 3))
        ids_TK = random.integers(-1, E - 1, size=(T, K)) if draw(st.integers(0, 4)) else np.full((T, K), -1)
        batch.append(layer.Tokens(random.normal(size=(T, D)), ids_TK, random.normal(size=(T, K))))
        upstream.append(random.normal(size=(T, D)))
    routed = [SwiGLU(*(random.normal(size=size) for size in [(F, D), (F, D), (D, F)])) for _ in range(E)]
    shared = [
        drawn_shared(random, draw(st.sampled_from([1, 2, 4, 0])), draw(st.booleans()))
        for _ in range(draw(st.integers(0, 3)))
    ]
    v_D = draw(st.sampled_from([None, 0.0, 1.0, 30.0]))
    return Case(batch, routed, shared, None if v_D is None else v_D * random.normal(size=D), upstream)


def assert_shared(expected: second.Shared, actual: first.SharedExpert) -> None:
    """The same matrices, and the same bias or none."""
    for matrix, tensor in zip(expected.matrices, actual[:3], strict=True):
        assert_close(matrix, tensor, addend=ADDEND)
    assert (expected.bias_D is None) == (actual.bias_D is None)
    if expected.bias_D is not None and actual.bias_D is not None:
        assert_close(expected.bias_D, actual.bias_D, addend=ADDEND)


class TestLayerPair:
    @pairs_agree
    @given(cases(ranks=1), st.sampled_from(["output", "input"]))
    def test_outputs_agree(self, case: Case, at: layer.Applied) -> None:
        """Every token gets its routed part and the whole shared part once."""
        (batch,) = case.batches()
        shared, expert = [shared_of(each) for each in case.shared], experts.swiglu_experts(case.parameters())
        y_TD = first.forward(*batch[:3], expert, shared, gate_D=gate_of(case), weights_at=at)
        (expected,) = second.forward(case.batch, case.routed, case.shared, case.v_D, at)
        assert_close(expected, y_TD, addend=ADDEND)
        part = np.array([second.added(x, case.shared, case.v_D) for x in case.batch[0].x_TD]).reshape(-1, D)
        assert_close(part, first.shared_part(batch.x_TD, shared, gate_of(case)), addend=ADDEND)
        factors = np.array([second.factor(x, case.v_D) for x in case.batch[0].x_TD])
        assert_close(factors, first.gate_factors(batch.x_TD, gate_of(case)))

    @pairs_agree
    @given(cases(ranks=1), st.sampled_from(["output", "input"]))
    def test_gradients_agree(self, case: Case, at: layer.Applied) -> None:
        """Autograd through the sum gives what the formulas give, zeros for what nothing reached included."""
        self.assert_gradients(case, at, 1)

    @pairs_agree
    @given(cases(), st.sampled_from([1, 2, 3]))
    def test_gradients_over_ranks_agree(self, case: Case, divisor: int) -> None:
        """Parameters, routed, shared and gate, get the sum over all ranks' tokens, divided by dp * cp or by one."""
        self.assert_gradients(case, "output", divisor)

    def assert_gradients(self, case: Case, at: layer.Applied, divisor: int) -> None:
        """All gradients of all ranks, side by side."""
        back = second.backward(case.batch, case.routed, case.shared, case.v_D, case.upstream, at, divisor)
        shared = [shared_of(each) for each in case.shared]
        made = shared_expert_gradients.global_gradients(
            case.batches(), experts.swiglu_experts, case.parameters(), shared,
            gate_D=gate_of(case), weights_at=at, divisor=divisor,
        )  # fmt: skip
        for expected, actual in [(back.y, made.y_TD), (back.dx, made.dx_TD), (back.dweights, made.dweights_TK)]:
            assert_close(np.concatenate(expected), actual, addend=ADDEND)
        for e, routed in enumerate(back.routed):
            for name, matrix in zip(("gate", "up", "down"), routed, strict=True):
                assert_close(matrix, made.parameters[name, e], addend=ADDEND)
        assert len(back.shared) == len(made.shared)
        for d_expert, d_tensors in zip(back.shared, made.shared, strict=True):
            assert_shared(d_expert, d_tensors)
        assert (back.gate_D is None) == (made.gate_D is None)
        if back.gate_D is not None and made.gate_D is not None:
            assert_close(back.gate_D, made.gate_D, addend=ADDEND)

    def test_autograd_of_the_layer_is_its_derivative(self) -> None:
        """Gradcheck in x, weights, every matrix, the bias and the gate, with two shared experts."""
        random = np.random.default_rng(2)
        ids, case = ints([[1, 0], [-1, -1], [0, -1]]), [drawn_shared(random, 2, True), drawn_shared(random, 4, False)]
        x, w, v = (floats(random.normal(size=size), leaf=True) for size in [(3, D), (3, K), (D,)])
        routed = {
            (name, e): floats(random.normal(size=size), leaf=True)
            for e in range(2) for name, size in {"gate": (F, D), "up": (F, D), "down": (D, F)}.items()
        }  # fmt: skip
        leaves = [value for each in case for value in shared_of(each, leaf=True) if value is not None]

        def layer_of(x: Tensor, w: Tensor, v: Tensor, *rest: Tensor) -> Tensor:
            shared = [first.SharedExpert(*rest[:4]), first.SharedExpert(*rest[4:7])]
            expert = experts.swiglu_experts(dict(zip(routed, rest[7:], strict=True)))
            return first.forward(x, ids, w, expert, shared, gate_D=v)

        assert torch.autograd.gradcheck(layer_of, [x, w, v, *leaves, *routed.values()])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_narrow_parameters_are_widened_first(self, dtype: torch.dtype) -> None:
        """Rows, gate, matrices and bias of fewer bits are taken as exact numbers and computed in float64."""
        random = torch.Generator().manual_seed(5)
        x, v, gate, up, down, bias = (
            torch.randn(size, generator=random).to(dtype) for size in [(3, D), (D,), (F, D), (F, D), (D, F), (D,)]
        )
        made = first.shared_part(x, [first.SharedExpert(gate, up, down, bias)], v)
        wide = [value.double().numpy() for value in (gate, up, down, bias)]
        expert = second.Shared(SwiGLU(*wide[:3]), wide[3])
        expected = [second.added(row, [expert], v.double().numpy()) for row in x.double().numpy()]
        assert_close(np.array(expected), made, addend=ADDEND)

    def test_bad_gates_ranks_and_divisors_are_refused(self) -> None:
        """A gate of another size or per expert, no rank, no divisor."""
        x_TD = np.ones((2, D))
        check_refused(
            lambda: first.gate_factors(floats(x_TD), torch.ones(D + 1)), lambda: second.factor(x_TD[0], np.ones(D + 1))
        )
        with pytest.raises(ValueError, match="gate"):
            first.gate_factors(floats(x_TD), torch.ones(1, D))
        batch = first_layer.Batch(torch.ones(1, D), ints([[-1]]), torch.ones(1, 1), torch.ones(1, D))
        for batches, divisor in [([], 1), ([batch], 0)]:
            with pytest.raises(ValueError, match=f"divisor {divisor}"):
                shared_expert_gradients.global_gradients(batches, experts.swiglu_experts, {}, [], divisor=divisor)


@st.composite
def partitions(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """Hidden units dealt out to tp ranks in any way, some ranks getting none."""
    units, tp = draw(st.integers(0, 5)), draw(st.integers(1, 3))
    rows: list[list[int]] = [[] for _ in range(tp)]
    for unit in draw(st.permutations(range(units))):
        rows[draw(st.integers(0, tp - 1))].append(unit)
    return units, rows


class TestParts:
    @pairs_agree
    @given(partitions(), st.booleans(), st.integers(0, 10**6))
    def test_shards_agree_and_add_up(self, case: tuple[int, list[list[int]]], biased: bool, seed: int) -> None:
        """Both cut the same matrices; the shards' answers add up to the whole expert's, the bias once."""
        units, rows = case
        random = np.random.default_rng(seed)
        whole, x_TD = drawn_shared(random, units, biased), random.normal(size=(2, D))
        made, expected = shared_expert_parts.tp_shards(shared_of(whole), rows), second.shards(whole, rows)
        for by_hand, shard in zip(expected, made, strict=True):
            assert shard.bias_D is None
            for matrix, tensor in zip(by_hand, shard[:3], strict=True):
                assert (matrix.shape, matrix.tolist()) == (tuple(tensor.shape), tensor.tolist())
        bias_D = None if whole.bias_D is None else floats(whole.bias_D)
        total = shared_expert_parts.sum_of_shards(floats(x_TD), made, bias_D)
        assert_close(second.summed(x_TD, expected, whole.bias_D), total, addend=ADDEND)
        assert_close(np.array([second.answer(whole, x_D) for x_D in x_TD]), total, addend=ADDEND)

    @pairs_agree
    @given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=3), st.integers(0, 10**6))
    def test_fused_experts_agree(self, widths: list[tuple[int, bool]], seed: int) -> None:
        """Both lie unit after unit in one order; the wide one answers the sum, and its gradient falls apart again."""
        random = np.random.default_rng(seed)
        parts, x_TD, dy_TD = (
            [drawn_shared(random, *width) for width in widths],
            random.normal(size=(2, D)),
            random.normal(size=(2, D)),
        )
        wide, by_hand = shared_expert_parts.fuse([shared_of(part) for part in parts]), second.fused(parts)
        assert_shared(by_hand, wide)
        expected = np.array([second.added(x_D, parts, None) for x_D in x_TD])
        assert_close(expected, first.shared_expert(floats(x_TD), wide), addend=ADDEND)
        # The gradient of the wide expert, cut by widths, is the gradient of each part by itself.
        tokens = [layer.Tokens(x_TD, np.full((2, K), -1), np.zeros((2, K)))]
        d_wide = second.backward(tokens, [], [by_hand], None, [dy_TD]).shared[0]
        d_parts = second.backward(tokens, [], parts, None, [dy_TD]).shared
        sizes = [units for units, _ in widths]
        made = shared_expert_parts.fused_parts(shared_of(d_wide), sizes)
        for d_part, cut, whole in zip(second.parts_of_fused(d_wide, sizes), made, d_parts, strict=True):
            assert_shared(d_part, cut)
            assert_shared(whole, cut if whole.bias_D is not None else cut._replace(bias_D=None))

    def test_no_parts_make_up_no_units(self) -> None:
        """An expert without units falls apart into no part, as it does into one that is empty."""
        nothing = first.SharedExpert(torch.zeros(0, D), torch.zeros(0, D), torch.zeros(D, 0))
        assert [0, 1] == [len(shared_expert_parts.fused_parts(nothing, sizes)) for sizes in ([], [0])]

    def test_bad_parts_are_refused(self) -> None:
        """Units lost, twice or unknown; shards with a bias, or none; widths that do not add up."""
        whole = drawn_shared(np.random.default_rng(1), 3, True)
        tensors = shared_of(whole)
        for rows in ([[0, 1]], [[0, 1], [1, 2]], [[0, 1], [2, 3]], [[0, 1, 2], [-1]], []):
            check_refused(
                lambda rows=rows: shared_expert_parts.tp_shards(tensors, rows),
                lambda rows=rows: second.shards(whole, rows),
            )
        for sizes in ([1, 1], [4], [4, -1], []):
            check_refused(
                lambda sizes=sizes: shared_expert_parts.fused_parts(tensors, sizes),
                lambda sizes=sizes: second.parts_of_fused(whole, sizes),
            )
        check_refused(lambda: shared_expert_parts.fuse([]), lambda: second.fused([]))
        for shards in ([], [tensors]):
            with pytest.raises(ValueError, match="bias"):
                shared_expert_parts.sum_of_shards(torch.ones(1, D), shards)


class TestLaws:
    """SHARE-02, -05, -08: what the shared part does not depend on."""

    @pairs_agree
    @given(cases(ranks=1), st.sampled_from([0.0, 1.0, -2.5]), st.integers(0, 10**6))
    def test_routing_scale_and_drops_leave_the_shared_part(self, case: Case, scale: float, seed: int) -> None:
        """Output minus routed output is the same for every scale, every weight and every set of dropped pairs."""
        (batch,) = case.batches()
        expert, shared = experts.swiglu_experts(case.parameters()), [shared_of(each) for each in case.shared]
        dropped = torch.from_numpy(np.random.default_rng(seed).random(batch.ids_TK.shape) < 0.5)
        ids, weights = torch.where(dropped, -1, batch.ids_TK), scale * batch.weights_TK
        y_TD = first.forward(batch.x_TD, ids, weights, expert, shared, gate_D=gate_of(case))
        left = y_TD - first_layer.forward(batch.x_TD, ids, weights, expert)
        expected = np.array([second.added(x, case.shared, case.v_D) for x in case.batch[0].x_TD]).reshape(-1, D)
        assert_close(expected, left, addend=100 * ADDEND)

    @pairs_agree
    @given(cases(), st.integers(0, 9))
    def test_how_tokens_are_cut_into_ranks_changes_no_gradient(self, case: Case, cut: int) -> None:
        """The same tokens in one batch, or cut anywhere into two ranks: the same parameter gradients."""
        whole = first_layer.global_batch(case.batches())
        halves = [
            first_layer.Batch(*(part[:cut] for part in whole)),
            first_layer.Batch(*(part[cut:] for part in whole)),
        ]
        shared = [shared_of(each) for each in case.shared]
        alone, split = (
            shared_expert_gradients.global_gradients(
                batches, experts.swiglu_experts, case.parameters(), shared, gate_D=gate_of(case), divisor=2
            )
            for batches in ([whole], halves)
        )
        for one, two in zip(alone.shared, split.shared, strict=True):
            for expected, actual in zip(one, two, strict=True):
                assert (expected is None and actual is None) or torch.equal(expected, actual)

    @pytest.mark.parametrize("how", ["halves", "interleaved"])
    def test_a_fused_gate_and_up_fall_apart_into_the_parts(self, how: expert_forms.Fused) -> None:
        """Fused over experts first, then gate with up: split and cut again, every part is what it was."""
        random = np.random.default_rng(6)
        parts = [shared_of(drawn_shared(random, units, False)) for units in (2, 3)]
        wide = shared_expert_parts.fuse(parts)
        gate, up = expert_forms.split_gate_up(expert_forms.fuse_gate_up(wide.gate_FD, wide.up_FD, how), how)
        again = shared_expert_parts.fused_parts(first.SharedExpert(gate, up, wide.down_DF), [2, 3])
        for part, found in zip(parts, again, strict=True):
            assert all(torch.equal(expected, actual) for expected, actual in zip(part[:3], found[:3], strict=True))


class TestByHand:
    def test_a_gated_constant(self) -> None:
        """An expert that answers its bias (5, 7), behind a gate of log 3 at x_0 = 1: 3/4 of it, and the derivative."""
        # <v, x> = log 3, so a = sigmoid(log 3) = 3 / (3 + 1) = 3/4 and a (1 - a) = 3/16. h = bias = (5, 7).
        # y = (15/4, 21/4). With g = (1, 2): <h, g> = 19; dv = 3/16 * 19 * x = 57/16 (1, 2) and dx = 57/16 v.
        # dbias = a g = (3/4, 6/4). The matrices answer 0 (up = 0), so they give dx nothing.
        v, x, g = [math.log(3), 0.0], [1.0, 2.0], [1.0, 2.0]
        gate, up, down, bias = (floats(np.array(value)) for value in ([[1.0, 1]], [[0.0, 0]], [[0.0], [0]], [5.0, 7]))
        batch = first_layer.Batch(*(torch.tensor([value], dtype=torch.float64) for value in (x, [0.0], [0.0], g)))
        batch = batch._replace(ids_TK=ints([[-1]]))
        made = shared_expert_gradients.gradients(
            batch,
            experts.swiglu_experts,
            {},
            [first.SharedExpert(gate, up, down, bias)],
            gate_D=floats(np.array(v)),
        )
        expert = second.Shared(SwiGLU(gate.numpy(), up.numpy(), down.numpy()), bias.numpy())
        tokens = layer.Tokens(np.array([x]), np.array([[-1]]), np.array([[0.0]]))
        back = second.backward([tokens], [], [expert], np.array(v), [np.array([g])])
        for y, dv, dx, dbias in (
            (made.y_TD[0], made.gate_D, made.dx_TD[0], made.shared[0].bias_D),
            (back.y[0][0], back.gate_D, back.dx[0][0], back.shared[0].bias_D),
        ):
            assert [3.75, 5.25] == pytest.approx(np.asarray(y), rel=1e-14)
            assert [57 / 16, 57 / 8] == pytest.approx(np.asarray(dv), rel=1e-14)
            assert [57 / 16 * math.log(3), 0.0] == pytest.approx(np.asarray(dx), rel=1e-14)
            assert [0.75, 1.5] == pytest.approx(np.asarray(dbias), rel=1e-14)

    def test_a_bias_is_added_once_over_three_shards(self) -> None:
        """Down = 0 and a bias: the sum over tp = 3 shards is the bias, bit for bit."""
        bias = [0.1, 0.2, 0.3, 0.4, 0.7]
        whole = second.Shared(SwiGLU(np.ones((3, D)), np.ones((3, D)), np.zeros((D, 3))), np.array(bias))
        shards = shared_expert_parts.tp_shards(shared_of(whole), [[1], [2], [0]])
        x_TD = np.ones((2, D))
        assert [bias, bias] == shared_expert_parts.sum_of_shards(floats(x_TD), shards, floats(np.array(bias))).tolist()
        assert [bias, bias] == second.summed(x_TD, second.shards(whole, [[1], [2], [0]]), np.array(bias)).tolist()

    def test_gradients_are_divided_once_and_inputs_never(self) -> None:
        """Two ranks with upstream (1, 2) and (3, 4), bias alone, divisor 2: dbias = (2, 3), dx = 0, y = bias."""
        expert = second.Shared(SwiGLU(np.zeros((1, 2)), np.zeros((1, 2)), np.zeros((2, 1))), np.array([5.0, 7.0]))
        batches = [
            first_layer.Batch(torch.ones(1, 2), ints([[-1]]), torch.ones(1, 1), torch.tensor([dy]))
            for dy in ([1.0, 2.0], [3.0, 4.0])
        ]
        made = shared_expert_gradients.global_gradients(
            batches, experts.swiglu_experts, {}, [shared_of(expert)], divisor=2
        )
        assert made.shared[0].bias_D is not None
        assert [2.0, 3.0] == made.shared[0].bias_D.tolist()
        assert [[5.0, 7.0], [5.0, 7.0]] == made.y_TD.tolist()
