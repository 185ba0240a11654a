"""The overload factor of a training in miniature follows what is forced."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from itertools import groupby

import pytest

from benchmarks.metered_training import over_ranks
from benchmarks.overload_picture import PHASES, of_steps, off, picture, trained
from moe_conformance.engine import Engine

_FORCED = [phase for phase in PHASES if phase.factor is not None]


class TestTraining:
    def test_the_factor_follows_what_is_forced(self) -> None:
        """In twelve steps every closed form is met, in both blocks, and the loss falls."""
        phases = [PHASES[0], PHASES[0], *(phase for phase in _FORCED for _ in range(2))]
        assert 12 == len(phases)
        with Engine() as engine:
            ranks = trained(engine, phases)
        for block in (0, 1):
            factors = over_ranks(ranks, "avg_overload_factor", block)
            assert [] == off(phases, factors)
            assert all(1.0 < factor < 2.0 for factor in factors[:2])
        first, later = (sum(rank[step].loss for rank in ranks) for step in (0, 8))  # of the same tokens
        assert 0 < later < first

    def test_ranks_that_differ_are_an_error(self) -> None:
        """A factor is that of all ranks of a stage, or there is none."""
        with Engine() as engine:
            ranks = trained(engine, PHASES[:1])
        ranks[0][0].values["moe/avg_overload_factor_layer_0"] += 1
        with pytest.raises(ValueError, match="expected one value"):
            over_ranks(ranks, "avg_overload_factor", 0)


class TestPicture:
    def test_a_step_that_does_not_follow_is_told(self) -> None:
        """Of forced phases every step is held against its closed form; of others none is."""
        phases = [PHASES[0], PHASES[1], PHASES[2]]
        assert ["step 2 (worst rank): factor 1.5000; expected 2.0000"] == off(phases, [1.7, 1.0, 1.5])

    def test_phases_share_the_steps(self) -> None:
        """All phases come in order, each as long as the others up to one step."""
        runs = [(phase, len([*steps])) for phase, steps in groupby(of_steps(500))]
        assert [*PHASES] == [phase for phase, _ in runs]
        assert {55, 56} == {length for _, length in runs}

    def test_it_has_a_point_for_every_step(self) -> None:
        """Lines have as many points as there are steps, the higher the factor the higher up."""
        phases = of_steps(20)
        factors = [1.0 + 0.05 * step for step in range(20)]
        tree = ElementTree.fromstring(picture(phases, [factors, factors]))
        lines = [each for each in tree.iter() if each.tag.endswith("polyline")]
        heights = [float(point.split(",")[1]) for point in lines[0].attrib["points"].split()]
        assert 2 == len(lines)
        assert 20 == len(heights)
        assert sorted(heights, reverse=True) == heights
