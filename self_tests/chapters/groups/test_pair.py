"""Process groups, worked out three ways: reference.groups.members, the longhand and contract.topology."""

from __future__ import annotations

from functools import cache

import pytest

from moe_conformance.contract.topology import InvalidLayout, Layout
from moe_conformance.reference.groups import members as first
from self_tests.chapters.groups.second import members as second
from self_tests.chapters.groups.second.members import Sizes

LARGEST_WORLD = 64
THIRDS = [range(1, 33), range(33, 49), range(49, LARGEST_WORLD + 1)]
WORLDS = pytest.mark.parametrize("worlds", THIRDS, ids=str)


@cache
def valid_sizes(worlds: range) -> list[Sizes]:
    """Every valid layout of these worlds, found by trying all sizes that divide the world."""
    found = []
    for world in worlds:
        divisors = [n for n in range(1, world + 1) if world % n == 0]
        for pp in divisors:
            dense = [(tp, cp) for tp in divisors for cp in divisors if world % (tp * cp * pp) == 0]
            expert = [(ep, etp) for ep in divisors for etp in divisors if world % (ep * etp * pp) == 0]
            found += [Sizes(world, tp, cp, pp, ep, etp) for tp, cp in dense for ep, etp in expert]
    return found


class TestAllThreeAgree:
    @WORLDS
    def test_reference_makes_the_longhand_groups(self, worlds: range) -> None:
        """On every valid layout up to 64 ranks reference.groups.members and the longhand make the same groups."""
        for sizes in valid_sizes(worlds):
            assert second.groups(sizes) == first.groups(*sizes), sizes

    @WORLDS
    def test_topology_makes_the_longhand_groups(self, worlds: range) -> None:
        """On every valid layout up to 64 ranks Layout.groups and the longhand make the same groups."""
        for sizes in valid_sizes(worlds):
            assert second.groups(sizes) == dict(Layout(*sizes).groups()), sizes

    def test_there_are_27642_layouts(self) -> None:
        """The three ranges of worlds hold each of the 27642 valid layouts up to 64 ranks, none twice."""
        assert 27642 == len(set(valid_sizes(range(1, LARGEST_WORLD + 1))))

    def test_validity_is_judged_alike(self) -> None:
        """All three call the same sizes valid, dividing or not, and refuse to build the others."""
        disagreements = []
        for world in range(1, 13):
            for sizes in (
                Sizes(world, tp, cp, pp, ep, etp)
                for tp in range(1, 5)
                for cp in range(1, 4)
                for pp in range(1, 4)
                for ep in range(1, 7)
                for etp in range(1, 4)
            ):
                verdicts = (second.valid(sizes), first.valid(*sizes) is None, Layout(*sizes).problem is None)
                if len(set(verdicts)) > 1:
                    disagreements.append((sizes, verdicts))
        assert [] == disagreements

    def test_invalid_sizes_are_refused_by_all(self) -> None:
        """Sizes that do not fill the world build nothing and are named in the message."""
        sizes = Sizes(12, ep=8)
        with pytest.raises(ValueError, match="12"):
            second.groups(sizes)
        with pytest.raises(ValueError, match="12"):
            first.groups(*sizes)
        with pytest.raises(InvalidLayout, match="12"):
            Layout(*sizes).groups()

    @pytest.mark.parametrize("axis", ["world", "tp", "cp", "pp", "ep", "etp"])
    def test_sizes_below_one_are_refused(self, axis: str) -> None:
        """A size of 0 is refused by its name, not by a division."""
        sizes = Sizes(8)._replace(**{axis: 0})
        with pytest.raises(ValueError, match=f"{axis} = 0"):
            first.groups(*sizes)
        with pytest.raises(InvalidLayout, match=f"{axis} = 0"):
            Layout(*sizes).groups()


class TestWorkedExamples:
    def test_folding_where_ep_does_not_divide_dp(self) -> None:
        """tp2 cp2 pp2 with ep2 etp2 fits 8 ranks: dp = 1 < ep, and pp keeps the halves 0-3 and 4-7 apart."""
        # dense:  rank = tp + 2 cp + 4 pp, dp = 8 / 8 = 1.  expert: rank = etp + 2 ep + 4 pp, edp = 8 / 8 = 1.
        apart = tuple((rank,) for rank in range(8))
        neighbours = ((0, 1), (2, 3), (4, 5), (6, 7))
        strided = ((0, 2), (1, 3), (4, 6), (5, 7))
        expected = {
            "world": ((0, 1, 2, 3, 4, 5, 6, 7),),
            "tp": neighbours,
            "cp": strided,
            "pp": ((0, 4), (1, 5), (2, 6), (3, 7)),
            "dp": apart,
            "dp_cp": strided,
            "ep": strided,
            "etp": neighbours,
            "ep_etp": ((0, 1, 2, 3), (4, 5, 6, 7)),
            "edp": apart,
        }
        sizes = Sizes(8, tp=2, cp=2, pp=2, ep=2, etp=2)
        assert expected == first.groups(*sizes)
        assert expected == dict(Layout(*sizes).groups())
        assert expected == second.groups(sizes)

    @pytest.mark.parametrize(("world", "fits"), [(8, True), (12, False), (16, True), (24, True), (36, False)])
    def test_the_skip_guard_is_divisibility(self, world: int, fits: bool) -> None:
        """tp2 cp2 pp2 ep2 etp2 fits exactly the worlds that 8 divides, 24 among them; it does not need 16."""
        sizes = Sizes(world, 2, 2, 2, 2, 2)
        verdicts = (second.valid(sizes), first.valid(*sizes) is None, Layout(*sizes).problem is None)
        assert (fits, fits, fits) == verdicts
