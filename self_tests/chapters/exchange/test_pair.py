"""The exchange, worked out twice: reference.exchange.deliveries from the senders, the longhand from the receivers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moe_conformance.reference.exchange import deliveries as first
from self_tests.chapters.exchange.second import deliveries as second
from self_tests.chapters.exchange.second.deliveries import Placement

pairs_agree = settings(max_examples=60, deadline=None, derandomize=True)


# (ep, etp, edp)
EXCHANGES = [(1, 1, 1), (2, 1, 1), (3, 1, 1), (4, 1, 1), (1, 3, 1), (2, 2, 1), (2, 1, 2)]


class Case(NamedTuple):
    """Global ids of every rank's slots, and who holds what in which group."""

    ids: list[NDArray[np.int64]]
    placement: Placement


def first_pairs(case: Case) -> list[second.Pair]:
    """The first oracle's deliveries, in its own order, with their fields by name."""
    made = first.deliveries([torch.from_numpy(ids) for ids in case.ids], *case.placement)
    return [second.Pair(p.source, p.token, p.slot, p.destination, p.expert) for p in made]


@st.composite
def cases(draw: st.DrawFn, *, shuffled: bool = True) -> Case:
    """Uneven, possibly absent tokens; empty and repeated slots; experts dealt out in runs or in any way."""
    ep, etp, edp = draw(st.sampled_from(EXCHANGES))
    world, experts = ep * etp * edp, ep * draw(st.integers(1, 3))
    placement = second.contiguous(world, experts, ep, etp)
    if shuffled:
        order = draw(st.permutations(range(experts)))
        dealt = [[order[e] for e in held] for held in placement.held]
        placement = Placement(placement.exchange_groups, dealt)
    slots = draw(st.integers(0, 3))
    ids = []
    for _ in range(world):
        tokens = draw(st.integers(0, 4))
        row = st.lists(st.integers(-1, experts - 1), min_size=slots, max_size=slots)
        drawn = draw(st.lists(row, min_size=tokens, max_size=tokens))
        ids.append(np.array(drawn, dtype=np.int64).reshape(tokens, slots))
    return Case(ids, placement)


class TestPair:
    @pairs_agree
    @given(cases())
    def test_deliveries_agree(self, case: Case) -> None:
        """Both oracles list the same pairs, in the order of source, token, slot and destination."""
        assert second.deliveries(*case) == first_pairs(case)


class TestWorkedExamples:
    def test_shards_of_an_expert_each_get_the_row(self) -> None:
        """ep2 etp2: every row goes to both shards of its expert, and an empty slot to nobody."""
        # Ranks 0 and 1 shard experts 0 and 1; ranks 2 and 3 shard experts 2 and 3.
        # Rank 0 routes token 0 to experts 3 and 0; rank 2 routes token 0 to expert 1, token 1 to 1 and 1.
        ids = [np.array([[3, 0]]), np.zeros((0, 2), int), np.array([[-1, 1], [1, 1]]), np.zeros((0, 2), int)]
        case = Case(ids, second.contiguous(4, 4, ep=2, etp=2))
        expected = [
            (0, 0, 0, 2, 3), (0, 0, 0, 3, 3), (0, 0, 1, 0, 0), (0, 0, 1, 1, 0),
            (2, 0, 1, 0, 1), (2, 0, 1, 1, 1),
            (2, 1, 0, 0, 1), (2, 1, 0, 1, 1), (2, 1, 1, 0, 1), (2, 1, 1, 1, 1),
        ]  # fmt: skip
        assert expected == first_pairs(case)
        assert expected == second.deliveries(*case)

    def test_replicas_serve_their_own_group(self) -> None:
        """ep2 edp2: for expert 0, rank 3 asks rank 2 of its own group, never the replica on rank 0."""
        ids = [np.array([[0]]), np.array([[0]]), np.array([[1]]), np.array([[0]])]
        case = Case(ids, second.contiguous(4, 2, ep=2, etp=1))
        expected = [(0, 0, 0, 0, 0), (1, 0, 0, 0, 0), (2, 0, 0, 3, 1), (3, 0, 0, 2, 0)]
        assert expected == first_pairs(case)
        assert expected == second.deliveries(*case)

    def test_a_group_has_no_order(self) -> None:
        """However a group lists its ranks, a row goes to the holders in ascending order."""
        ids = [torch.tensor([[0]]), torch.tensor([[-1]]), torch.tensor([[-1]])]
        pairs = first.deliveries(ids, [[2, 0, 1]], [[0], [], [0]])
        assert [0, 2] == [pair.destination for pair in pairs]


class TestRefusals:
    """Holders and groups that leave a row's destination open have no answer."""

    def test_an_expert_nobody_holds(self) -> None:
        """An id that no rank of the group holds has nowhere to go, even where another group's rank holds it."""
        with pytest.raises(ValueError, match="expert 1"):
            first.deliveries([torch.tensor([[1]]), torch.tensor([[1]])], [[0], [1]], [[0], [1]])

    def test_an_expert_listed_twice(self) -> None:
        """One rank cannot hold an expert twice: the row would arrive twice."""
        with pytest.raises(ValueError, match="twice"):
            first.deliveries([torch.tensor([[0]])], [[0]], [[0, 0]])

    @pytest.mark.parametrize("groups", [[[0]], [[0, 1], [1]]])
    def test_a_rank_without_its_one_group(self, groups: list[list[int]]) -> None:
        """Every rank is in exactly one exchange group."""
        with pytest.raises(ValueError, match="rank 1"):
            first.deliveries([torch.tensor([[0]]), torch.tensor([[1]])], groups, [[0, 1], [0, 1]])
