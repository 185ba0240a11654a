"""DeepEP 2's expanded layout against loops over all ranks: rows by expert, sums, weights, a second dispatch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_conformance.engine import Engine
from moe_conformance.stand_ins.elastic import WideElasticBuffer
from self_tests.backends.flex_scene import TOKENS, D, E, K, Scene, on_ranks, values
from self_tests.stand_ins.naive import Arrived, arrivals, by_expert, summed

W = 4
N = E // W


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Ranks for the tests of this file."""
    with Engine(preload=("self_tests.stand_ins.test_expanded",)) as engine:
        yield engine


def with_expansion(scene: Scene) -> tuple[Any, ...]:
    """Dispatch twice without a handle and once with it, and combine; the payload is the alignment."""
    alignment = scene.payload
    x_TD, ids_TK, weights_TK = scene.batch()
    buffer = WideElasticBuffer(
        scene.topology.group("ep_etp"), num_max_tokens_per_rank=max(TOKENS), hidden=D, num_topk=K
    )
    made = [
        buffer.dispatch(x_TD, ids_TK, weights_TK, num_experts=E, expert_alignment=alignment, do_expand=True)
        for _ in range(2)
    ]
    rows_AD, ids, weights_A, handle, _ = made[0]
    assert ids is None
    assert weights_A is not None
    again_AD, _, again_A, _, _ = buffer.dispatch(
        2 * x_TD, topk_weights=3 * weights_TK, handle=handle, do_expand=True, do_zero_padding=True
    )
    plain_RD = buffer.dispatch(x_TD, handle=handle)[0]
    answers_AD = rows_AD.nan_to_num(1e3) + scene.context.rank
    y_TD, back_TK, _ = buffer.combine(answers_AD, handle, topk_weights=weights_A.nan_to_num(1e3))
    ends = [each[3].psum_num_recv_tokens_per_expert.tolist() for each in made]
    dispatched = [(each[0], each[2]) for each in made]
    return (x_TD, ids_TK, weights_TK), dispatched, ends, (again_AD, again_A), plain_RD, (y_TD, back_TK)


def laid_out(here: Arrived, alignment: int, *, backwards: bool) -> tuple[list[Any], list[Any], list[int]]:
    """The rows and weights of the pairs, None being padding, and where the pairs of every expert end, in loops."""
    rows: list[Any] = []
    weights: list[Any] = []
    ends: list[int] = []
    for pairs in by_expert(here, N):
        for row, slot in reversed(pairs) if backwards else pairs:
            rows.append(here.rows[row])
            weights.append(here.weights[row][slot])
        ends.append(len(rows))
        while len(rows) % alignment:
            rows.append(None)
            weights.append(None)
    return rows, weights, ends


def assert_rows(expected: list[Any], found: Tensor, padding: float) -> None:
    """Rows, or weights, are as expected, and the padding has a value throughout."""
    assert len(expected) == len(found)
    filled = torch.full_like(found, padding)
    for place, value in enumerate(expected):
        if value is not None:
            filled[place] = value
    assert torch.allclose(filled, found, rtol=0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("alignment", [1, 4])
class TestExpansion:
    def test_a_pair_has_a_row_and_a_weight(self, engine: Engine, alignment: int) -> None:
        """By expert, in one order in the first dispatch and in another in the second; padding is not written."""
        found = values(on_ranks(engine, with_expansion, payload=alignment))
        x, ids, weights = ([rank[0][part] for rank in found] for part in range(3))
        for rank, here in zip(found, arrivals(x, ids, weights, N), strict=True):
            for number, (rows_AD, weights_A) in enumerate(rank[1]):
                rows, given, ends = laid_out(here, alignment, backwards=number == 1)
                assert_rows(rows, rows_AD, float("nan"))
                assert_rows(given, weights_A, float("nan"))
                assert ends == rank[2][number]

    def test_a_handle_repeats_its_order(self, engine: Engine, alignment: int) -> None:
        """Rows and weights of a dispatch with a handle lie as they did, with zeros as padding where asked for."""
        found = values(on_ranks(engine, with_expansion, payload=alignment))
        for *_, again, plain_RD, _ in found:
            del plain_RD
            assert not bool(again[0].isnan().any())
        for rank in found:
            (rows_AD, weights_A), (again_AD, again_A) = rank[1][0], rank[3]
            assert torch.equal(2 * rows_AD.nan_to_num(0.0), again_AD)
            assert torch.allclose(3 * weights_A, again_A, equal_nan=True)

    def test_a_handle_alone_expands_nothing(self, engine: Engine, alignment: int) -> None:
        """Without the word a dispatch has a row for each token, although the handle was made by an expansion."""
        found = values(on_ranks(engine, with_expansion, payload=alignment))
        x, ids, weights = ([rank[0][part] for rank in found] for part in range(3))
        for rank, here in zip(found, arrivals(x, ids, weights, N), strict=True):
            assert_rows(here.rows, rank[4], 0.0)

    def test_pairs_are_summed_and_weights_come_back(self, engine: Engine, alignment: int) -> None:
        """Every token gets the sum of its rows on all ranks, and every slot its weight; an empty one has 0."""
        found = values(on_ranks(engine, with_expansion, payload=alignment))
        x, ids, weights = ([rank[0][part] for rank in found] for part in range(3))
        arrived = arrivals(x, ids, weights, N)
        answers = [
            [
                sum((row + r for e in there if e >= 0), torch.zeros(D))
                for row, there in zip(here.rows, here.ids, strict=True)
            ]
            for r, here in enumerate(arrived)
        ]
        sums = summed(answers, arrived, [len(part) for part in x], D)
        for rank, expected in zip(found, sums, strict=True):
            y_TD, back_TK = rank[5]
            torch.testing.assert_close(y_TD, expected)
            torch.testing.assert_close(back_TK, torch.where(rank[0][1] >= 0, rank[0][2], 0.0))
