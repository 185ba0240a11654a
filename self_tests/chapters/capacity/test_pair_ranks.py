"""Drops by the capacity of every rank's own tokens, worked out twice."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_conformance.reference.capacity import drops as first_drops
from self_tests.chapters.capacity.second import drops as second_drops
from self_tests.chapters.capacity.second import limits as second
from self_tests.chapters.capacity.second.drops import Policy
from self_tests.chapters.capacity.test_pair import POLICIES, Drop, drops, pairs_agree
from self_tests.oracles.asked_twice import assert_agree


class TestDropsByRank:
    @settings(pairs_agree, max_examples=120)
    @given(st.lists(drops(), min_size=1, max_size=3), st.sampled_from([0.5, 1.0, 1.25, 5 / 3]), st.data())
    def test_verdicts_agree(self, ranks: list[Drop], factor: float, data: st.DataObject) -> None:
        """Both judge every rank by a legal capacity of its own tokens, the same for all its experts."""
        policy: Policy = data.draw(st.sampled_from(POLICIES))
        minimum = data.draw(st.sampled_from([0, 0, 2]))
        tokens = [data.draw(st.sampled_from([None, len(rank.ids_TK), 2])) for rank in ranks]
        own = None if None in tokens else tokens
        kept = []
        for rank, counted in zip(ranks, own or [len(rank.ids_TK) for rank in ranks], strict=True):
            legal = second.capacities(counted, rank.ids_TK.shape[1], 5, factor=factor, minimum=minimum)
            C = legal[-1] if data.draw(st.booleans()) else data.draw(st.integers(0, 3))
            by = "position" if policy == "any" else policy
            kept.append(second_drops.keep(rank.ids_TK, 5, capacity=C, policy=by, weights_TK=rank.weights_TK))
        options: dict[str, Any] = {"factor": factor, "minimum": minimum, "policy": policy, "tokens_by_rank": own}
        options["rounding"] = data.draw(st.sampled_from(["up", "down"]))
        if policy == "weight" or data.draw(st.booleans()):
            options["weights_by_rank"] = [rank.weights_TK for rank in ranks]
            if data.draw(st.booleans()):
                options["errors_by_rank"] = [rank.errors_TK for rank in ranks]
        ids = [rank.ids_TK for rank in ranks]
        found = assert_agree(first_drops.legal_drops_by_rank, second_drops.legal_drops_by_rank, kept, ids, 5, **options)
        for r, alone in enumerate(found):  # another rank's tokens change nothing: also not when it is away
            by_itself = {name: [v[r]] if isinstance(v, list) else v for name, v in options.items()}
            one = second_drops.legal_drops_by_rank([kept[r]], [ids[r]], 5, **by_itself)
            assert [alone] == one

    def test_by_hand(self) -> None:
        """Two experts, factor 1: four tokens give two places, two one; a place more, or a shared mean, is wrong."""
        ids, few = np.array([[0], [0], [0], [1]]), np.array([[0], [0]])
        for kept_four, kept_two, expected in [
            ([1, 1, 0, 1], [1, 0], [True, True]),
            ([1, 1, 1, 1], [1, 0], [False, True]),  # ceil(6 / 2) = 3 of the group's mean
            ([1, 1, 0, 1], [1, 1], [True, False]),
        ]:
            kept = [np.array(column, dtype=bool)[:, None] for column in (kept_four, kept_two)]
            found = assert_agree(
                first_drops.legal_drops_by_rank,
                second_drops.legal_drops_by_rank,
                kept,
                [ids, few],
                2,
                factor=1.0,
                policy="position",
            )
            assert expected == found

    def test_one_capacity_for_all_experts_of_a_rank(self) -> None:
        """With 2 or 3 places legal, two of four for one expert and three of three for another are not one capacity."""
        # K T / E = 6 / 3 = 2 exactly, so 2 or 3. Expert 0 has four slots, expert 1 has two.
        ids_TK = np.array([[0], [0], [0], [0], [1], [1]])
        for kept, expected in [([1, 1, 0, 0, 1, 1], True), ([1, 1, 1, 0, 1, 1], True), ([1, 1, 1, 1, 1, 1], False)]:
            kept_TK = np.array(kept, dtype=bool)[:, None]
            options: dict[str, Any] = {"factor": 1.0, "policy": "any"}
            question = ([kept_TK], [ids_TK], 3)
            found = assert_agree(
                first_drops.legal_drops_by_rank, second_drops.legal_drops_by_rank, *question, **options
            )
            assert [expected] == found
        # Four tokens chose each of two experts of three, of 8: x = 8 / 3 * 9 / 8 = 3, so 3 or 4; never one of each.
        ids_TK = np.array([[0], [0], [0], [0], [1], [1], [1], [1]])
        kept_TK = np.array([1, 1, 1, 0, 1, 1, 1, 1], dtype=bool)[:, None]
        options = {"factor": 9 / 8, "policy": "any"}
        found = assert_agree(
            first_drops.legal_drops_by_rank, second_drops.legal_drops_by_rank, [kept_TK], [ids_TK], 3, **options
        )
        assert [False] == found
