"""Bounds: honest low-precision arithmetic stays within them, wrong arithmetic does not, and they are not loose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch

from moe_conformance.contract.topology import Layout
from moe_conformance.judging.compare import bounds
from moe_conformance.judging.compare.bounded import Worst, compare, factor
from moe_conformance.judging.observed.run import read
from moe_conformance.judging.shared.experts.experts import expected_of as experts_expected
from moe_conformance.judging.verdict import Tally
from moe_conformance.reference.rounding.errors import Rounding, exact, partial
from moe_conformance.workloads.records.workload import Batch
from self_tests.judging.bounds_compared import (
    change_an_expert,
    double_a_slot,
    drop_a_slot,
    experts_compared,
    present,
    router_compared,
    share_found,
    worst_of,
)
from self_tests.judging.simulated_experts import Arithmetic, own_workload, simulate_experts
from self_tests.judging.simulated_routers import Formula, route_workload, simulate_routers, weigh

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
FOUR = Layout(4, ep=2)  # two replicas of every expert


class TestUnits:
    def test_gamma_grows_faster_than_its_roundings(self) -> None:
        """Three roundings may err by more than three times one, and by less than twice that."""
        one, three = bounds.gamma(1, 2**-8), bounds.gamma(3, 2**-8)
        assert 3 * one < three < 6 * one

    def test_gamma_refuses_sums_that_leave_no_digit(self) -> None:
        """256 roundings of bfloat16 say nothing any more."""
        with pytest.raises(ValueError, match="leave no significant digit"):
            bounds.gamma(256, 2**-8)

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_no_addends_allow_no_error(self, dtype: torch.dtype) -> None:
        """Where every addend is zero the result must be exactly zero."""
        none, some = (float(bounds.allowed(torch.tensor(error).double(), dtype, addends=9)) for error in (0.0, 1.0))
        assert none == 0 < some

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_the_second_order_is_provided_for(self, dtype: torch.dtype) -> None:
        """What is allowed is more than the first order, by a tenth at the most."""
        assert 1 < float(bounds.allowed(torch.ones(()).double(), dtype, addends=9)) < 1.1


class TestRounding:
    """The rules of `reference.rounding.errors` against arithmetic that is as bad as it may be."""

    @pytest.mark.parametrize("n", [1, 2, 16, 17, 1000])
    def test_neither_bound_is_ever_far_above_the_other(self, n: int) -> None:
        """Few roundings are bounded by the worst case and many by 7 spreads; the two meet at 49 / 3 of equal size."""
        ones = exact(torch.ones(n))
        off = Rounding(1.0, 0.0).stored(ones)
        of = Rounding(0.0, 0.0).products("i,i->", off, ones)
        assert min(n, 7 * (n / 3) ** 0.5) == pytest.approx(of.error.item())

    @pytest.mark.parametrize("n", [1, 10, 16, 17, 4096])
    def test_even_errors_of_either_sign_stay_within(self, n: int) -> None:
        """Addends that are off by anything between -u and u of themselves are within in 20,000 sums."""
        generator = torch.Generator().manual_seed(n)
        a_N, b_N = torch.randn(2, n, generator=generator).double()
        even = 2 * torch.rand(20_000, n, generator=generator, dtype=torch.float64) - 1
        error = (even * 0.01 * a_N * b_N).sum(1).abs().max().item()
        off = Rounding(0.01, 0.0).stored(exact(a_N))
        allowed = Rounding(0.0, 0.0).products("i,i->", off, exact(b_N)).error.item()
        assert allowed / 4 < error <= allowed

    def test_errors_of_one_sign_are_outside(self) -> None:
        """A sum of 1000 whose addends are all too large by half of what each is allowed is not honest arithmetic."""
        a_N = torch.linspace(1, 2, 1000).double()
        off = Rounding(0.01, 0.0).stored(exact(a_N))
        allowed = Rounding(0.0, 0.0).products("i,i->", off, exact(torch.ones(1000))).error
        assert 0.005 * a_N.sum() > allowed

    def test_numbers_whose_squares_vanish_keep_their_error(self) -> None:
        """A probability of 1e-170 may be off by a part of itself, though its variance is 0 in float64."""
        a = Rounding(0.5, 0.0).stored(exact(torch.tensor(1e-170, dtype=torch.float64)))
        assert (0.0, 5e-171) == (a.spread.item(), a.error.item())

    def test_no_partial_sum_is_larger_than_its_bound(self) -> None:
        """Whatever the order of 6 parts, no partial sum exceeds the bound, and one reaches it."""
        parts_N = torch.tensor([3.0, -5.0, 2.0, 0.5, -1.0, 4.0])
        sums = [sum(each) for n in range(7) for each in combinations(parts_N.tolist(), n)]
        assert max(map(abs, sums)) == partial(parts_N.sum(), parts_N.abs().sum()).item()


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
    "softmax-normalised-scaled": {"routing.normalise": True, "routing.scale": 2.5},
    "softmax-topk": {"routing.score": "softmax_topk", "routing.scale": 2.5},
    "sigmoid-normalised": {"routing.score": "sigmoid", "routing.normalise": True},
    "sqrtsoftplus-normalised": {"routing.score": "sqrtsoftplus", "routing.normalise": True, "top_k": 4},
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

    @pytest.mark.parametrize("change", [drop_a_slot, double_a_slot, change_an_expert])
    def test_of_one_slot_of_eight_in_wide_tokens(self, change: Callable[[Batch], Batch]) -> None:
        """At D = 1024 in bfloat16, one wrong slot of eight shows in every token, though its weight may be 1/16."""
        work = own_workload(Layout(1), tokens=50, dtype=torch.bfloat16, hidden=1024, ffn=64, top_k=8)
        wrong = replace(work, batches=tuple(tuple(map(change, ranks)) for ranks in work.batches))
        outcome = replace(simulate_experts(wrong), workload=work)
        assert 1 == share_found(experts_compared(outcome), "y")

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
