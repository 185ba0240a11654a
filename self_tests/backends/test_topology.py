"""Layouts know what fits, and their groups are what their names say."""

from __future__ import annotations

import pytest

from moe_conformance.contract.topology import GROUPS, InvalidLayout, Layout, layouts


class TestProblem:
    @pytest.mark.parametrize(
        ("layout", "words"),
        [
            (Layout(4, tp=3), "tp * cp * pp = 3 does not divide the world of 4 ranks"),
            (Layout(4, ep=8), "etp * ep * pp = 8 does not divide the world of 4 ranks"),
            (Layout(8, ep=0), "ep = 0 is not positive"),
            (Layout(12, tp=2, pp=2, ep=2, etp=4), "etp * ep * pp = 16 does not divide the world of 12 ranks"),
        ],
    )
    def test_says_which_product_does_not_fit(self, layout: Layout, words: str) -> None:
        """A layout that cannot be built says so in one sentence, and making groups of it raises that."""
        assert words == layout.problem
        with pytest.raises(InvalidLayout, match="Layout"):
            layout.groups()

    def test_folding_fits_where_nesting_would_not(self) -> None:
        """tp2 pp2 cp2 with etp2 ep2 fits eight ranks, and 24; not 12."""
        fits = {world: Layout(world, tp=2, cp=2, pp=2, ep=2, etp=2).problem is None for world in (8, 12, 16, 24)}
        assert {8: True, 12: False, 16: True, 24: True} == fits


class TestGroups:
    @pytest.mark.parametrize("world", [1, 2, 4, 8, 12])
    def test_every_name_is_a_partition_of_the_world(self, world: int) -> None:
        """In every valid layout each kind of group holds every rank exactly once."""
        for layout in layouts(world):
            for name, lists in layout.groups().items():
                assert list(range(world)) == sorted(rank for ranks in lists for rank in ranks), (layout, name)

    def test_names_are_complete(self) -> None:
        """Every declared name is made, in the declared order."""
        assert list(GROUPS) == list(Layout(4, tp=2, ep=2).groups())

    def test_axes_cross_where_they_are_folded_apart(self) -> None:
        """With tp 2 and ep 2 on four ranks, tp neighbours are ep neighbours and edp crosses them."""
        groups = Layout(4, tp=2, ep=2).groups()
        assert ((0, 1), (2, 3)) == groups["tp"]
        assert ((0, 1), (2, 3)) == groups["ep"]
        assert ((0, 2), (1, 3)) == groups["edp"]
        assert ((0, 2), (1, 3)) == groups["dp_cp"]

    def test_expert_shards_count_fastest(self) -> None:
        """With ep 2 and etp 2 the shards of an expert are neighbours and ep strides over them."""
        groups = Layout(4, ep=2, etp=2).groups()
        assert ((0, 1), (2, 3)) == groups["etp"]
        assert ((0, 2), (1, 3)) == groups["ep"]
        assert ((0, 1, 2, 3),) == groups["ep_etp"]


class TestNames:
    def test_a_name_lists_the_axes_above_one(self) -> None:
        """Names hold every axis larger than one, leftover replicas of experts too."""
        assert "single" == Layout(1).name
        assert "ep2-edp2" == Layout(4, ep=2).name
        assert "tp2-ep2-etp2" == Layout(4, tp=2, ep=2, etp=2).name
        assert "ep10-edp10" == Layout(100, ep=10).name
