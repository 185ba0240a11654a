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
from self_tests.oracles.by_hand import by_hand, rows


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
            one = second_drops.legal_drops_by_rank([kept[r]], [ids[r]], 5, **by_itself)  # type: ignore[arg-type]
            assert [alone] == one


def kept(*ranks: str) -> list[Any]:
    """Of every rank's one slot per token, which are kept."""
    return [np.array([[mark == "+"] for mark in rank]) for rank in ranks]


ALONE, BOTH = np.array([[0], [0], [0], [0], [1], [1]]), np.array([[0], [0], [0], [0], [1], [1], [1], [1]])
FOUR_AND_TWO = [np.array([[0], [0], [0], [1]]), np.array([[0], [0]])]
MEAN: dict[str, Any] = {"factor": 1.0, "policy": "any"}

test_by_hand = by_hand(
    *rows(first_drops.legal_drops_by_rank, second_drops.legal_drops_by_rank,
        # Two experts, factor 1: four tokens give two places, two one.
        ("each rank by its own tokens", (kept("++-+", "+-"), FOUR_AND_TWO, 2), MEAN, [True, True]),
        ("ceil(6 / 2) = 3 of the group's mean", (kept("++++", "+-"), FOUR_AND_TWO, 2), MEAN, [False, True]),
        # K T / E = 6 / 3 = 2 exactly, so 2 or 3.
        ("two of four, and two", (kept("++--++"), [ALONE], 3), MEAN, [True]),
        ("three of four, and two", (kept("+++-++"), [ALONE], 3), MEAN, [True]),
        ("four of four", (kept("++++++"), [ALONE], 3), MEAN, [False]),
        # x = 8 / 3 * 9 / 8 = 3, so 3 or 4; never one of each.
        ("one capacity for all experts", (kept("+++-++++"), [BOTH], 3), {**MEAN, "factor": 9 / 8}, [False]),
    )
)  # fmt: skip
