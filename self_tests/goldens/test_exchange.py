"""The goldens of the exchange are what the longhand makes of the stored inputs, too."""

from __future__ import annotations

from typing import Any

from self_tests.chapters.exchange.second import deliveries
from self_tests.chapters.exchange.second.deliveries import Placement
from self_tests.goldens.golden_twins import assert_twins, given, stored, told

PLACEMENTS = {
    "ep2-edp2": Placement([[0, 1], [2, 3]], [[0, 1, 2], [3, 4, 5], [0, 1, 2], [3, 4, 5]]),
    "ep2-etp2": Placement([[0, 1, 2, 3]], [[0, 1, 2], [0, 1, 2], [3, 4, 5], [3, 4, 5]]),
    "ep4-uneven": Placement([[0, 1, 2, 3]], [[4], [0, 5], [1, 2], [3]]),
}


class TestGolden:
    def test_the_longhand_answers_likewise(self):
        """Every stored delivery, count and split."""
        values = stored("exchange")
        answers: dict[str, Any] = {}
        for case, placement in PLACEMENTS.items():
            own = given(values, case)
            ids = [own[f"ids_TK-{rank}"] for rank in range(4)]
            pairs = deliveries.deliveries(ids, placement)
            rows = [[pair.source, pair.token, pair.slot, pair.expert, pair.destination] for pair in pairs]
            counts = {f"counts-{rank}": n for rank, n in enumerate(deliveries.counts(ids, placement))}
            answers |= told(case, {"deliveries": rows, "splits_WW": deliveries.splits(ids, placement)} | counts)
        assert_twins("exchange", answers)
