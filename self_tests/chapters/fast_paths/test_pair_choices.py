"""When shortcuts hold, worked out twice: by their conditions, and by walking the long way."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_conformance.reference.fast_paths import choices as first
from moe_conformance.reference.fast_paths import present
from self_tests.chapters.fast_paths.second import choices as second
from self_tests.chapters.fast_paths.second import present as second_present
from self_tests.oracles.agreement import assert_close, floats
from self_tests.oracles.by_hand import REFUSED, by_hand, rows

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)

# Every (offset, top_k, experts, ep) with up to 8 experts, starting anywhere in the first two rounds.
ROUND_ROBINS = [
    (offset, top_k, held * ep, ep)
    for ep in range(1, 9)
    for held in range(1, 8 // ep + 1)
    for top_k in range(1, held * ep + 1)
    for offset in range(2 * held * ep)
]
SHORTCUTS = [sizes for sizes in ROUND_ROBINS if second.round_robin_shortcut(*sizes)]


def laid_out(rows: Tensor) -> dict[str, Tensor]:
    """The same rows in memory of other strides."""
    wide = torch.zeros(len(rows), 2 * rows.shape[1] + 1, dtype=rows.dtype)
    wide[:, 1::2] = rows
    tall = torch.zeros(3 * len(rows), rows.shape[1], dtype=rows.dtype)
    tall[2::3] = rows
    return {
        "contiguous": rows.clone(),
        "transposed": rows.T.contiguous().T,
        "strided columns": wide[:, 1::2],
        "strided rows": tall[2::3],
        "offset": torch.cat([torch.ones_like(rows), rows])[len(rows) :],
    }


class TestRoundRobinPair:
    def test_the_condition_is_found_by_trying(self) -> None:
        """On every small layout both say alike whether a strided selection is what is sent."""
        assert 300 < len(ROUND_ROBINS)
        for sizes in ROUND_ROBINS:
            assert (sizes in SHORTCUTS) == first.round_robin_shortcut(*sizes), sizes

    @pytest.mark.parametrize("tokens", [0, 1, 7])
    def test_rows_and_gradients_agree(self, tokens: int) -> None:
        """Wherever it holds, every rank is sent the same rows in the same order, and gradients add up over copies."""
        random = np.random.default_rng(tokens)
        x_TD = random.normal(size=(tokens, 2))
        compared = 0
        for offset, top_k, experts, ep in SHORTCUTS:
            for rank in range(ep):
                leaf = floats(x_TD, leaf=True)
                sizes: dict[str, Any] = {"offset": offset, "top_k": top_k, "experts": experts, "ep": ep}
                rows_RD = first.round_robin_rows(leaf, rank, **sizes)
                assert_close(second.round_robin_rows(x_TD, rank, **sizes), rows_RD)
                g_RD = random.normal(size=tuple(rows_RD.shape))
                (dx_TD,) = torch.autograd.grad(rows_RD, leaf, floats(g_RD))
                assert_close(second.round_robin_rows_backward(tokens, g_RD, rank, **sizes), dx_TD)
                compared += 1
        assert compared > 50


class TestBatchPair:
    @pytest.mark.parametrize("held", [0, 1, 3])
    @pytest.mark.parametrize("each", [0, 1, 2])
    def test_strides_do_not_show(self, held: int, each: int) -> None:
        """However the rows lie in memory, both deal them out alike, and gradients come back in the same order."""
        random = np.random.default_rng(held + each)
        rows_RD, g_NnD = random.normal(size=(held * each, 4)), random.normal(size=(held, each, 4))
        expected = second.as_batch(rows_RD, held, each)
        for leaf in laid_out(floats(rows_RD)).values():
            batch_NnD = first.as_batch(leaf.requires_grad_(), held, each)
            assert expected.tolist() == batch_NnD.tolist()
            assert ((held, each, 4), True) == (tuple(batch_NnD.shape), batch_NnD.is_contiguous())
            (d_rows_RD,) = torch.autograd.grad(batch_NnD, leaf, floats(g_NnD))
            assert second.as_batch_backward(g_NnD).tolist() == d_rows_RD.tolist()

    def test_expanded_rows_are_rows(self) -> None:
        """One row laid out six times is six rows."""
        row = torch.tensor([[1.0, 2.0, 3.0]])
        assert [[[1.0, 2.0, 3.0]] * 3] * 2 == first.as_batch(row.expand(6, 3), 2, 3).tolist()


class TestCountsPair:
    @pairs_agree
    @given(st.one_of(st.none(), st.lists(st.integers(0, 2), max_size=4)))
    def test_equal_counts_agree(self, counts: list[int] | None) -> None:
        """Both take the shortcut for the same counts."""
        rows = 4 if counts is None else sum(counts)
        assert second.equal_counts(counts, rows) == first.equal_counts(counts, rows)

    @pairs_agree
    @given(st.lists(st.booleans()))
    def test_decisions_are_counted_alike(self, taken: list[bool]) -> None:
        """Both count each decision once."""
        assert second.decision_counts(taken) == first.decision_counts(taken)

    @pairs_agree
    @given(st.lists(st.sampled_from(["look_up", "look_up", "change", "reset"])))
    def test_look_ups_are_counted_alike(self, events: list[Any]) -> None:
        """Both count the same hits and misses."""
        assert second.look_up_counts(events) == first.look_up_counts(events)


class TestSegments:
    @pairs_agree
    @given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 99)), max_size=6))
    def test_rows_are_those_of_their_experts_in_order(self, held: list[tuple[int, int]]) -> None:
        """For any counts, those of no row and of no expert included."""
        counts, experts = [count for count, _ in held], [expert for _, expert in held]
        assert second_present.expert_of_each_row(counts, experts) == present.segments(counts, experts).tolist()

    @pytest.mark.parametrize(("counts", "experts"), [([1, -1], [0, 1]), ([1], [0, 1])])
    def test_what_counts_no_rows_is_refused(self, counts: list[int], experts: list[int]) -> None:
        """A negative count, and another number of counts than of experts."""
        with pytest.raises(ValueError, match="are no rows of the experts"):
            present.segments(counts, experts)


def of_rank(oracle: Any) -> Any:
    """The rows of a rank: offset, top_k, experts and ep come last."""
    names = ("offset", "top_k", "experts", "ep")
    return lambda x_TD, rank, *sizes: oracle.round_robin_rows(x_TD, rank, **dict(zip(names, sizes, strict=True)))


test_by_hand = by_hand(
    *rows(first.round_robin_shortcut, second.round_robin_shortcut,
        *(
            (f"offset, K, E, ep {sizes} make no round robin", sizes, REFUSED)
            for sizes in [(0, 2, 5, 2), (0, 0, 4, 2), (0, 5, 4, 2), (0, 1, 4, 0), (-2, 2, 4, 2)]
        ),
    ),
    *rows(of_rank(first), of_rank(second),
        ("an odd offset", (np.zeros((3, 2)), 0, 1, 2, 4, 2), REFUSED),
        ("fewer slots than experts of a rank", (np.zeros((3, 2)), 0, 0, 1, 4, 2), REFUSED),
        ("rank 2 of 2", (np.zeros((3, 2)), 2, 0, 2, 4, 2), REFUSED),
        ("rank -1", (np.zeros((3, 2)), -1, 0, 2, 4, 2), REFUSED),
    ),
    *rows(first.as_batch, second.as_batch,
        *(
            (f"{shape} as {held} times {each}", (np.zeros(shape), held, each), REFUSED)
            for shape, held, each in [((6, 2), 2, 2), ((6, 2), 4, 2), ((4, 2), -2, -2), ((6,), 3, 2), ((3, 2, 2), 3, 2)]
        ),
    ),
    *rows(first.equal_counts, second.equal_counts,
        *(
            (f"counts {counts} of {n} rows", (counts, n), REFUSED)
            for counts, n in [([3, 3], 7), ([3, 3], 5), ([], 1), ([2, -2], 0), ([-1, -1], -2)]
        ),
    ),
    *rows(first.look_up_counts, second.look_up_counts,
        ("counters reset leave the cache warm", (["look_up", "change", "look_up", "reset", "look_up"],), (1, 0)),
        ("an unknown event", (["look_up", "drop"],), REFUSED),
    ),
)  # fmt: skip
