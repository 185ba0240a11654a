"""The fixed places of native's low-latency exchange: as many as the busiest rank could fill, whatever it asks for."""

from __future__ import annotations

import pytest

from moe_conformance.chapters.capacity.workloads import padded_experts
from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.judging.observed.run import read
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.moe_step import moe_step


@pytest.mark.parametrize("name", ["to-capacity-beyond-even", "lossless-minimum", "lossless-by-turns"])
def test_experts_filled_up_beyond_the_tokens_of_a_rank_have_room(name: str) -> None:
    """A capacity, or the least of one, may be more than the tokens that there are."""
    (workload,) = (each for each in padded_experts.padded("lowlatency", Layout(2, ep=2), "full") if each.name == name)
    with Engine(preload=("moe_conformance.scenarios.moe_step",)) as engine:
        outcome = moe_step(engine, "native", workload)
    tally = Tally()
    judge_outputs(read(outcome), tally)
    assert 0 in tally.ranks  # in one of them rank 1 has no tokens
