"""Second derivatives, worked out twice: by forward derivatives of tensors, and by the product rule; and their judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.chapters.gradients import scenario
from moe_conformance.chapters.gradients.judge.second_derivatives import differentiated_twice, judge_second_derivatives
from moe_conformance.judging.shared.equivalence.runs import Ran
from moe_conformance.judging.verdict import Hung, NotOffered, Raised, Tally, WrongGradient
from moe_conformance.reference.exchange.layer import Batch
from moe_conformance.reference.experts import swiglu, tagged_experts
from moe_conformance.reference.gradients import second_derivatives as first
from moe_conformance.scenarios.outcome import Grad, Outcome
from moe_conformance.workloads.records import tags
from self_tests.chapters.gradients import second
from self_tests.judging.simulated_exchange import simulate
from self_tests.judging.simulated_exchange import workload as drawn
from self_tests.oracles.by_hand import by_hand, rows

Floats = NDArray[np.float64]
pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)


def by_tensors(
    x: Any, ids: Any, weights: Any, upstream: Any, v: Any, experts: Sequence[Sequence[Any]], weights_at: Any = "output"
) -> tuple[Any, Any]:
    """Ask the first oracle as the second is asked."""
    matrices = [[torch.as_tensor(matrix) for matrix in expert] for expert in experts]
    found = first.second_derivatives(
        Batch(x, ids, weights, upstream), v, lambda rows, e: swiglu(rows, *matrices[e]), weights_at=weights_at
    )
    return found.upstream_TD, found.weights_TK


def answers(x_TD: Floats, weights_TK: Floats, ids_TK: NDArray[np.int64], experts: Sequence[Any]) -> Floats:
    """Return the weighted sums of the experts' outputs, in NumPy."""
    y_TD = np.zeros_like(x_TD)
    for t, k in np.ndindex(*ids_TK.shape):
        if ids_TK[t, k] >= 0:
            gate_FD, up_FD, down_DF = experts[int(ids_TK[t, k])]
            a_F = gate_FD @ x_TD[t]
            y_TD[t] += weights_TK[t, k] * (down_DF @ (a_F / (1 + np.exp(-a_F)) * (up_FD @ x_TD[t])))
    return y_TD


def case(seed: int, T: int) -> tuple[Any, ...]:
    """Return three experts, and tokens with two slots, some of them empty and some with one expert twice."""
    made = np.random.default_rng(seed)
    D, F = 3, 4
    experts = [tuple(made.normal(size=size) for size in ((F, D), (F, D), (D, F))) for _ in range(3)]
    x_TD, upstream_TD, v_TD = (made.normal(size=(T, D)) for _ in range(3))
    return x_TD, made.integers(-1, 3, size=(T, 2)), made.normal(size=(T, 2)), upstream_TD, v_TD, experts


# One hidden unit behind one gate: f(x) = (1, 3) x_0 sigmoid(x_0) 4 x_1.
FLAT = (np.array([[1.0, 0.0]]), np.array([[0.0, 4.0]]), np.array([[1.0], [3.0]]))
# Where x_0 is 3, sigmoid is 1 up to rounding: f(x) = (1, 2) 40 x_0 x_0.
STEEP = (np.array([[40.0, 0.0]]), np.array([[1.0, 0.0]]), np.array([[1.0], [2.0]]))


def one(x: Any, v: Any, weight: float = 0.5, id: int = 0) -> tuple[Any, ...]:
    """Return one token with one slot, and the upstream gradient (1, 2)."""
    return (
        np.array([x], float), np.array([[id]]), np.array([[weight]]), np.array([[1.0, 2.0]]), np.array([v], float),
        [FLAT, STEEP],
    )  # fmt: skip


class TestSecondDerivativePair:
    @pairs_agree
    @given(st.integers(0, 2**16), st.integers(0, 4), st.sampled_from(["output", "input"]))
    def test_derivatives_agree(self, seed: int, T: int, weights_at: str) -> None:
        """Both have the same derivatives by upstream gradients, and by weights that are applied to outputs."""
        x_TD, ids_TK, weights_TK, upstream_TD, v_TD, experts = case(seed, T)
        x, ids, weights, upstream, v = map(torch.as_tensor, (x_TD, ids_TK, weights_TK, upstream_TD, v_TD))
        by_upstream, by_weights = second.second_derivatives(
            x_TD, ids_TK, weights_TK, upstream_TD, v_TD, experts, weights_at
        )
        found = by_tensors(x, ids, weights, upstream, v, experts, weights_at)
        assert by_upstream == pytest.approx(found[0].numpy(), rel=1e-9, abs=1e-9)
        assert (by_weights is None) == (found[1] is None)
        if by_weights is not None:
            assert by_weights == pytest.approx(found[1].numpy(), rel=1e-9, abs=1e-9)

    @pairs_agree
    @given(st.integers(0, 2**16), st.integers(1, 4))
    def test_outputs_change_as_they_say(self, seed: int, T: int) -> None:
        """The derivative by the upstream gradient is the central difference of y along v."""
        x_TD, ids_TK, weights_TK, upstream_TD, v_TD, experts = case(seed, T)
        h = 2.0**-17
        there, back = (answers(x_TD + step * v_TD, weights_TK, ids_TK, experts) for step in (h, -h))
        by_upstream, _ = second.second_derivatives(x_TD, ids_TK, weights_TK, upstream_TD, v_TD, experts)
        assert by_upstream == pytest.approx((there - back) / (2 * h), rel=1e-6, abs=1e-6)

    @pairs_agree
    @given(st.integers(0, 2**16), st.integers(1, 4))
    def test_both_derivatives_have_the_products_of_the_spec(self, seed: int, T: int) -> None:
        """<ds/du_t, u_t> = sum_k w_tk ds/dw_tk for every token."""
        x_TD, ids_TK, weights_TK, upstream_TD, v_TD, experts = case(seed, T)
        by_upstream, by_weights = second.second_derivatives(x_TD, ids_TK, weights_TK, upstream_TD, v_TD, experts)
        assert by_weights is not None
        assert (by_upstream * upstream_TD).sum(1) == pytest.approx((weights_TK * by_weights).sum(1), abs=1e-9)

    test_examples = staticmethod(
        by_hand(
            *rows(
                by_tensors,
                second.second_derivatives,
                (
                    "where the gate is at zero its derivative is one half",
                    one([0, 1], [2, 0]),
                    ([[2.0, 6.0]], [[28.0]]),  # 2 x 1/2 x 4 = 4, times 1, 3, and times the weight
                ),
                ("along what the gate closes nothing changes", one([0, 1], [0, 5]), ([[0.0, 0.0]], [[0.0]])),
                (
                    "behind an open gate the square changes by twice the row",
                    one([3, 1], [1, 7], 0.25, 1),
                    ([[60.0, 120.0]], [[1200.0]]),  # 40 x 2 x 3 = 240, times 1, 2
                ),
                ("an empty slot has the derivative zero", one([3, 1], [1, 7], 9.0, -1), ([[0.0, 0.0]], [[0.0]])),
                (
                    "weights at the input move the row",
                    one([3, 1], [1, 7], 0.5, 1),
                    {"weights_at": "input"},
                    ([[60.0, 120.0]], None),  # 0.5 x 40 x 2 x 1.5
                ),
            )
        )
    )


# ---- the judge ---------------------------------------------------------------------------------------------------

WORK = drawn()
Change = Callable[[scenario.SecondSeen], scenario.SecondSeen]


def judged(*outcomes: Outcome) -> Tally:
    """Judge the twins of the simulated workload that have these outcomes."""
    tally, twins = Tally(), differentiated_twice(WORK)
    judge_second_derivatives([Ran(*pair) for pair in zip(twins, outcomes, strict=False)], tally)
    return tally


def right(at: int = 0, *, rank: int = 0, change: Change = lambda seen: seen) -> Outcome:
    """Return the outcome of a twin with the right derivatives, but for a change on one rank."""
    work = differentiated_twice(WORK)[at].workload
    outcome = simulate(work)
    gains = {("gain", e): torch.tensor(float(tags.gain(e))) for e in range(work.config.experts)}
    found = []
    for each, batch in zip(outcome.ranks, work.batches[0], strict=True):
        expected = first.second_derivatives(
            Batch(batch.x_TD, batch.ids_TK, batch.weights_TK, batch.upstream),
            scenario.direction(work, 0, each.rank),
            tagged_experts(work.config.experts, gains),
        )
        seen = scenario.SecondSeen(True, Grad(expected.upstream_TD.float()), Grad(expected.weights_TK))
        found.append(replace(each, seen={0: change(seen) if each.rank == rank else seen}))
    return replace(outcome, ranks=tuple(found))


def raised(outcome: Outcome, phase: str, ranks: Sequence[int]) -> Outcome:
    """Return the outcome in which some ranks raised in a phase."""
    ended = [
        replace(each, status="raised", reached=phase, error="no second") if each.rank in ranks else each
        for each in outcome.ranks
    ]
    return replace(outcome, ranks=tuple(ended))


class TestJudge:
    def test_right_derivatives_are_counted(self) -> None:
        """Every element of both derivatives of both twins is compared."""
        batches = [batch for twin in differentiated_twice(WORK) for batch in twin.workload.batches[0]]
        expected = sum(batch.upstream.numel() + batch.weights_TK.numel() for batch in batches)
        assert expected == judged(right(), right(1)).elements

    @pytest.mark.parametrize("phase", ["backward:0", "second backward:0"])
    def test_all_ranks_may_refuse(self, phase: str) -> None:
        """An error of every rank in either backward refuses; an error on one rank alone is a failure."""
        with pytest.raises(NotOffered, match="refused on every rank with no second"):
            judged(raised(right(), phase, (0, 1)), raised(right(1), phase, (0, 1)))
        with pytest.raises(Raised, match="run with a second backward, rank 1 raised in"):
            judged(raised(right(), phase, (1,)))

    def test_a_hang_is_given_its_likely_cause(self) -> None:
        """A rank that waits for one that raised is a failure."""
        waiting = [replace(each, status="hung" if each.rank == 0 else "ok") for each in right().ranks]
        with pytest.raises(Hung, match=r"rank 0 hung.*; likely cause: another rank raised"):
            judged(replace(right(), ranks=tuple(waiting)))

    def test_an_error_elsewhere_refuses_nothing(self) -> None:
        """An error of every rank in the forward is a failure."""
        with pytest.raises(Raised, match="rank 0 raised in forward:0"):
            judged(raised(right(), "forward:0", (0, 1)))

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (
                lambda seen: replace(seen, upstream_TD=Grad(None)),
                "by the upstream gradient of rank 0 is None; expected",
            ),
            (
                lambda seen: scenario.SecondSeen(False, Grad(None), Grad(None)),
                "by the routing weights of rank 0 is None, which asks for no gradient",
            ),
            (lambda seen: replace(seen, weights_TK=Grad(0 * seen.weights_TK.value)), "rank 0 is zero; expected"),
            (lambda seen: replace(seen, upstream_TD=Grad(2 * seen.upstream_TD.value)), "instead of"),
            (lambda seen: replace(seen, upstream_TD=Grad(torch.nan * seen.upstream_TD.value)), "is nan instead of"),
        ],
    )
    def test_what_is_wrong_is_named(self, change: Change, words: str) -> None:
        """None, zeros and other values fail, in these words."""
        with pytest.raises(WrongGradient, match=words) as caught:
            judged(right(change=change))
        assert (0,) == caught.value.ranks

    def test_a_rank_without_tokens_may_have_none(self) -> None:
        """Where a rank has no tokens, there is nothing that a derivative could be of."""
        nothing = right(1, rank=1, change=lambda seen: scenario.SecondSeen(True, Grad(None), Grad(None)))
        assert (0,) == tuple(judged(nothing).ranks)
