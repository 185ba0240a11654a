"""Redundant experts: which replica stands for a pair, and what is lost or too much."""

from __future__ import annotations

import torch

from moe_conformance.contract.topology import Layout
from moe_conformance.judging.observed.replicas import Rows, numbered

EP2, EP2_ETP2 = Layout(2, ep=2), Layout(4, ep=2, etp=2)
HELD = [(0, 1, 2), (2, 3, 0)]  # of four experts 0 and 2 are on both ranks: n * 4 + e is the id of e on the n-th


class TestNumbered:
    def test_a_pair_is_of_the_replica_that_has_its_row(self) -> None:
        """Ids are those of the places where rows are; of an empty slot -1."""
        ids = [torch.tensor([[0, 2], [0, -1]]), torch.tensor([[3, 2]])]
        rows = Rows({(1, 0, 0, 0): 1, (0, 0, 0, 2): 1, (0, 0, 1, 0): 1, (1, 1, 0, 3): 1, (1, 1, 0, 2): 1})
        found = numbered(EP2, 4, ids, HELD, rows)
        assert [[[4, 2], [0, -1]], [[7, 6]]] == [ids_TK.tolist() for ids_TK in found.ids]
        assert ((0, 1, 2), (6, 7, 4)) == found.held

    def test_a_pair_without_a_row_is_of_the_first_replica(self) -> None:
        """There it is lost."""
        found = numbered(EP2, 4, [torch.tensor([[2]]), torch.empty(0, 1, dtype=torch.int64)], HELD, Rows())
        assert [[[2]], []] == [ids_TK.tolist() for ids_TK in found.ids]

    def test_two_slots_of_one_expert_take_a_row_each(self) -> None:
        """On one replica or on two."""
        ids = [torch.tensor([[0, 0]]), torch.empty(0, 2, dtype=torch.int64)]
        apart = numbered(EP2, 4, ids, HELD, Rows({(0, 0, 0, 0): 1, (1, 0, 0, 0): 1}))
        together = numbered(EP2, 4, ids, HELD, Rows({(1, 0, 0, 0): 2}))
        assert [[[0, 4]], [[4, 4]]] == [apart.ids[0].tolist(), together.ids[0].tolist()]

    def test_shards_of_a_replica_are_one_place(self) -> None:
        """Every rank of an etp group has the row, and the same id."""
        held = [(0, 1), (0, 1), (1, 0), (1, 0)]
        ids = [torch.tensor([[1]]), *[torch.empty(0, 1, dtype=torch.int64)] * 3]
        found = numbered(EP2_ETP2, 2, ids, held, Rows({(2, 0, 0, 1): 1, (3, 0, 0, 1): 1}))
        assert [[3]] == found.ids[0].tolist()
        assert ((0, 1), (0, 1), (3, 2), (3, 2)) == found.held
