"""Rows in which every two values of two options meet."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, product
from typing import Any

import pytest

from moe_conformance.workloads import router_model_sizes as routers
from moe_conformance.workloads.records.covering import pairwise
from moe_conformance.workloads.records.model_sizes import SIZES, groups_of

AXES = {"a": (1, 2, 3), "b": (False, True), "c": ("x", "y", "z"), "d": (0, 1)}


def pairs(row: Mapping[str, Any]) -> set[object]:
    """Return every two values of a row, under their names."""
    return set(combinations(row.items(), 2))


class TestPairwise:
    @pytest.mark.parametrize("barred", [None, ("a", 3, "b", True)])
    def test_every_allowed_pair_is_met(self, barred: tuple[str, object, str, object] | None) -> None:
        """All pairs of all allowed rows are in some row, and no row is one that is not allowed."""

        def allowed(row: Mapping[str, Any]) -> bool:
            return barred is None or (row[barred[0]], row[barred[2]]) != (barred[1], barred[3])

        whole = [dict(zip(AXES, values, strict=True)) for values in product(*AXES.values())]
        expected = set().union(*(pairs(row) for row in whole if allowed(row)))
        rows = pairwise(AXES, allowed)
        assert expected == set().union(*map(pairs, rows))
        assert all(map(allowed, rows))
        assert len(rows) < len(whole) / 2


class TestRouters:
    def test_every_size_runs_in_the_quick_profile(self) -> None:
        """Each once, or more often."""
        found = {(options["experts"], options["top_k"]) for options in routers.QUICK.values()}
        assert set(SIZES) == found

    def test_names_are_apart(self) -> None:
        """The full profile adds other routers than the quick one has."""
        assert set() == routers.QUICK.keys() & routers.FULL.keys()

    def test_groups_hold_whole_choices(self) -> None:
        """The selected groups have enough experts, and a group is no single expert."""
        for E, K in SIZES:
            groups, selected = groups_of(E, K)
            assert 0 == E % groups
            assert selected < groups
            assert E // groups * selected >= K
            assert E // groups >= 2
