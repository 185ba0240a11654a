"""Bounds: honest low-precision arithmetic stays within them, wrong arithmetic does not, and they are not loose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_conformance.judging import bounds
from moe_conformance.judging.bounded import Worst, compare, factor
from moe_conformance.judging.own_expected import batch_of, parameters_of
from moe_conformance.judging.own_experts import expected_of as experts_expected
from moe_conformance.judging.reading import read
from moe_conformance.judging.verdict import Tally
from moe_conformance.topology import Layout
from reference import layer, routing
from reference.experts import Parameters
from reference.magnitudes import magnitudes, swiglu_measured
from reference.routing_magnitudes import gradients_measured
from self_tests.bounds_compared import (
    change_an_expert,
    double_a_slot,
    drop_a_slot,
    experts_compared,
    present,
    router_compared,
    share_found,
    worst_of,
)
from self_tests.simulated_experts import Arithmetic, own_workload, simulate_experts
from self_tests.simulated_routers import Formula, route_workload, simulate_routers, weigh

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
FOUR = Layout(4, ep=2)  # two replicas of every expert


class TestUnits:
    def test_gamma_grows_faster_than_its_roundings(self) -> None:
        """Three roundings may err by more than three times one, and by less than twice that."""
        one, three = bounds.gamma(1, 2**-8), bounds.gamma(3, 2**-8)
        assert 3 * one < three < 6 * one

    def test_gamma_refuses_sums_that_leave_no_digit(self) -> None:
        """256 roundings of bfloat16 say nothing any more."""
        with pytest.raises(ValueError, match="leave no digit"):
            bounds.gamma(256, 2**-8)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_no_addends_allow_no_error(self, dtype: torch.dtype) -> None:
        """Where every addend is zero the result must be exactly zero."""
        assert [0.0, True] == [
            float(bounds.allowed(torch.zeros(()), dtype, length=9)),
            bool(bounds.allowed(torch.ones(()), dtype, length=9) > 0),
        ]

    def test_narrow_dtypes_accumulate_wider(self) -> None:
        """A long sum costs float32 much and bfloat16 next to nothing, as it accumulates in float32 too."""
        costs = {
            dtype: bounds.operation(dtype, length=1000) / bounds.operation(dtype, length=1) for dtype in DTYPES[::2]
        }
        assert costs[torch.bfloat16] < 1.1
        assert costs[torch.float32] > 400


class TestComparison:
    def test_the_worst_element_is_found_and_counted(self) -> None:
        """The location and the ratio are those of the element that comes nearest to its own bound."""
        expected, allowed = torch.zeros(2, 3).double(), torch.tensor([[1.0, 1.0, 9.0], [1.0, 0.5, 1.0]])
        actual = torch.tensor([[0.1, 0.2, 3.0], [0.0, 0.25, 0.0]])
        tally = Tally()
        assert Worst(0.5, (1, 1), 0.25, 0.0, 0.5) == compare(actual, expected, allowed, tally, 7)
        assert (6, {7}, 0.5) == (tally.elements, tally.ranks, tally.worst)

    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_what_is_not_finite_never_holds(self, bad: float) -> None:
        """NaN and infinity fail, even where an infinite error is allowed, and nothing is counted."""
        tally = Tally()
        one = torch.ones(2, dtype=torch.float64)
        worst = compare(torch.tensor([1.0, bad]), one, torch.tensor([1.0, torch.inf]), tally)
        assert (False, (1,), True) == (worst.holds, worst.at, tally.vacuous)

    def test_an_exact_zero_is_allowed_no_error(self) -> None:
        """With no allowance equality holds and everything else fails."""
        zero = torch.zeros(1, dtype=torch.float64)
        assert [True, False] == [compare(torch.tensor([value]), zero, zero).holds for value in (0.0, 1e-30)]

    def test_shapes_are_never_broadcast(self) -> None:
        """A row does not compare with a matrix."""
        with pytest.raises(ValueError, match="cannot compare"):
            compare(torch.ones(3), torch.ones(2, 3), torch.ones(2, 3))

    def test_no_elements_count_nothing(self) -> None:
        """An empty comparison holds and leaves the tally vacuous."""
        tally, empty = Tally(), torch.empty(0, 4)
        assert (True, True) == (compare(empty, empty, empty, tally, 0).holds, tally.vacuous)

    @pytest.mark.parametrize(("times", "found"), [(2.0, 2.0), (0.5, 0.5), (-1.0, -1.0), (0.0, 0.0), (1.0, None)])
    def test_a_factor_is_named_exactly_in_spite_of_rounding(self, times: float, found: float | None) -> None:
        """A factor that has a name is returned without its rounding error, and a factor of one is none."""
        expected = torch.linspace(-1, 1, 50).double()
        actual = times * expected * (1 + 1e-3 * torch.linspace(-1, 1, 50).cos())
        allowed = torch.full_like(expected, 5e-3)
        assert found == factor(actual, expected, allowed, {"ep": 2.0, "1/ep": 0.5})

    def test_a_factor_without_a_name_is_fitted(self) -> None:
        """Any other common factor is found by least squares, and none where there is none."""
        expected = torch.linspace(-1, 1, 50).double()
        allowed = torch.full_like(expected, 1e-6)
        assert 0.3 == pytest.approx(factor(0.3 * expected, expected, allowed, {}))
        assert factor(expected.abs(), expected, allowed, {}) is None


class TestMagnitudesChargeFourTimes:
    """What `bounds` rests on: one rounding more of all addends costs at most a fourth of the magnitude."""

    @pytest.mark.parametrize("weights_at", ["output", "input"])
    def test_of_the_layer(self, weights_at: layer.WeightsAt) -> None:
        """The absolute addends of y, dx, dweights and parameter gradients fit four times into their magnitudes."""
        work = own_workload(Layout(1), tokens=40, dtype=torch.float64)
        batch, parameters = batch_of(work, [(0, 0)]), parameters_of(work)
        sizes = magnitudes(*batch, swiglu_measured, parameters, weights_at=weights_at)
        tokens = {"y": sizes.y_TD, "dx": sizes.dx_TD, "dweights": sizes.dweights_TK}
        found: dict[object, Tensor] = {**tokens, **sizes.parameters}
        addends = absolute_addends(batch, parameters, weights_at)
        assert addends.keys() == found.keys()
        assert [] == [key for key, size in found.items() if bool((size < 4 * addends[key]).any())]

    @pytest.mark.parametrize("score", ["softmax", "softmax_topk", "sigmoid", "sqrtsoftplus"])
    @pytest.mark.parametrize("normalise", [False, True])
    def test_of_the_router_gradient(self, score: routing.Score, normalise: bool) -> None:
        """The absolute addends of the router's gradient fit four times into its magnitude."""
        work = route_workload(Layout(1), tokens=40, dtype=torch.float64)
        x_TD, router_ED = work.batches[0][0].x_TD, work.parameters["router", None]
        logits_TE = (x_TD @ router_ED.T).requires_grad_()
        ids_TK = logits_TE.topk(2, 1).indices
        dw_TK = work.batches[0][0].upstream.gather(1, ids_TK)
        weights_TK = routing.weights(logits_TE, ids_TK, score=score, normalise=normalise)
        (dlogits_TE,) = torch.autograd.grad(weights_TK, logits_TE, dw_TK)
        addends_ED = dlogits_TE.abs().T @ x_TD.abs()
        _, drouter = gradients_measured(x_TD, router_ED, ids_TK, dw_TK, score=score, normalise=normalise)
        assert bool((drouter.magnitude >= 4 * addends_ED).all())


def absolute_addends(batch: layer.Batch, parameters: Parameters, weights_at: layer.WeightsAt) -> dict[object, Tensor]:
    """Add up the absolute addends of every result, one (token, slot) after the other."""
    (T, D), K = batch.x_TD.shape, batch.ids_TK.shape[1]
    found: dict[object, Tensor] = {key: torch.zeros_like(value) for key, value in parameters.items()}
    found |= {"y": torch.zeros(T, D).double(), "dx": torch.zeros(T, D).double(), "dweights": torch.zeros(T, K).double()}
    for t in range(T):
        for k in range(K):
            e, w = int(batch.ids_TK[t, k]), batch.weights_TK[t, k].double()
            before, behind = (w, 1.0) if weights_at == "input" else (1.0, w)
            gate_FD, up_FD, down_DF = (parameters[name, e] for name in ("gate", "up", "down"))
            row_D, dout_D = before * batch.x_TD[t], behind * batch.dy_TD[t]
            z_F, up_F = gate_FD @ row_D, up_FD @ row_D
            s_F = z_F.sigmoid()
            hidden_F, dhidden_F = z_F * s_F * up_F, down_DF.T @ dout_D
            dup_F, dz_F = dhidden_F * z_F * s_F, dhidden_F * up_F * (s_F + z_F * s_F * (1 - s_F))
            out_D = down_DF.abs() @ hidden_F.abs()
            drow_D = dz_F.abs() @ gate_FD.abs() + dup_F.abs() @ up_FD.abs()
            found["y"][t] += behind * out_D
            found["dx"][t] += before * drow_D
            inner = batch.x_TD[t].abs() @ drow_D if weights_at == "input" else batch.dy_TD[t].abs() @ out_D
            found["dweights"][t, k] = inner
            found["gate", e] += torch.outer(dz_F.abs(), row_D.abs())
            found["up", e] += torch.outer(dup_F.abs(), row_D.abs())
            found["down", e] += torch.outer(dout_D.abs(), hidden_F.abs())
    return found


HONEST = {
    "plain": Arithmetic(),
    "weights-rounded": Arithmetic(cast=True),
    "weights-inside": Arithmetic(place="hidden", cast=True),
    "weights-first": Arithmetic(place="input", cast=True),
    "silu-in-two-steps": Arithmetic(cast=True, fused=False),
    "averaged": Arithmetic(convention="mean_over_dp"),
}
ROUTERS = {
    "softmax": {},
    "softmax-normalised-scaled": {"normalise": True, "scale": 2.5},
    "softmax-topk": {"score": "softmax_topk", "scale": 2.5},
    "sigmoid-normalised": {"score": "sigmoid", "normalise": True},
    "sqrtsoftplus-normalised": {"score": "sqrtsoftplus", "normalise": True, "top_k": 4},
}


class TestHonestArithmeticIsWithin:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("how", HONEST.values(), ids=HONEST)
    def test_of_experts(self, dtype: torch.dtype, how: Arithmetic) -> None:
        """Storing everything in the dtype exceeds no bound on 10,000 elements, and comes near the nearest."""
        work = own_workload(FOUR, tokens=16, microbatches=2, dtype=dtype)
        worst, elements = worst_of(experts_compared(simulate_experts(work, how)))
        assert elements > 10_000
        assert 0.005 < worst <= 1

    @pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
    @pytest.mark.parametrize("layout", [Layout(4, etp=4), Layout(4, ep=2, etp=2), Layout(4, pp=2, ep=2)], ids=str)
    @pytest.mark.parametrize("top_k", [1, 2, 8])
    def test_of_parts_and_slots(self, dtype: torch.dtype, layout: Layout, top_k: int) -> None:
        """Adding up K slots of etp parts one by one in the dtype exceeds no bound."""
        work = own_workload(layout, tokens=16, dtype=dtype, top_k=top_k)
        worst, _ = worst_of(experts_compared(simulate_experts(work)))
        assert 0.002 < worst <= 1

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("wide", [False, True], ids=["narrow", "wide"])
    @pytest.mark.parametrize("fields", ROUTERS.values(), ids=ROUTERS)
    def test_of_routers(self, dtype: torch.dtype, wide: bool, fields: dict[str, Any]) -> None:
        """Logits, scores and weights may be computed in the tokens' dtype or in float32."""
        work = route_workload(FOUR, tokens=64, microbatches=2, dtype=dtype, **fields)
        worst, elements = worst_of(router_compared(simulate_routers(work, Formula(wide=wide))))
        assert elements > 10_000
        assert worst <= 1
        assert worst > 0.005 or dtype == torch.float64  # in which the oracle takes the same steps


class TestWrongArithmeticIsOutside:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_of_experts(self, dtype: torch.dtype) -> None:
        """A slot that is dropped, doubled or given to another expert shows in nearly all tokens and in all experts."""
        work = own_workload(FOUR, tokens=16, dtype=dtype)
        for change in (drop_a_slot, double_a_slot, change_an_expert):
            wrong = replace(work, batches=tuple(tuple(map(change, ranks)) for ranks in work.batches))
            outcome = replace(simulate_experts(wrong), workload=work)
            assert 1 == share_found(experts_compared(outcome), "y", "gate", "up", "down"), change
            assert share_found(experts_compared(outcome), "dx") > 0.9, change

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_of_one_token_less(self, dtype: torch.dtype) -> None:
        """One token of sixty that is missing from the gradients of its experts shows in each of these."""
        work = own_workload(FOUR, tokens=16, dtype=dtype)
        first = work.batches[0][0]
        missing = replace(first, upstream=first.upstream.index_fill(0, torch.tensor([3]), 0))
        outcome = simulate_experts(replace(work, batches=((missing, *work.batches[0][1:]),)))
        expected = experts_expected(read(replace(outcome, workload=work)))
        for (name, expert), grad in (outcome.ranks[0].grads_final or {}).items():
            if expert is not None and expert in first.ids_TK[3]:
                target = expected.parameter(0, (name, expert))
                assert not compare(present(grad.value), *target).holds, (name, expert)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("fields", ROUTERS.values(), ids=ROUTERS)
    def test_of_routers(self, dtype: torch.dtype, fields: dict[str, Any]) -> None:
        """Weights that lie at each other's slots, and scores of the next expert, show in nearly all tokens."""
        work = route_workload(FOUR, tokens=64, dtype=dtype, **fields)
        rolled = Formula(weigh=lambda scores_TE, ids_TK, config: weigh(scores_TE, ids_TK, config).roll(1, 1))
        others = Formula(weigh=lambda scores_TE, ids_TK, config: weigh(scores_TE.roll(1, 1), ids_TK, config))
        for formula in (rolled, others):
            assert share_found(router_compared(simulate_routers(work, formula)), "weights") > 0.8
