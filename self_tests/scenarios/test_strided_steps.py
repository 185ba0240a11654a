"""Steps whose inputs lie apart in memory begin on all ranks together."""

from __future__ import annotations

from dataclasses import replace

from moe_conformance.engine import Engine
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.topology import Layout
from moe_conformance.workloads.corpus.equivalence import laws
from moe_conformance.workloads.corpus.recipes import corpus

WORK = next(each for each in corpus("alltoall", Layout(2, ep=2), "quick") if each.name == "even")


class TestBeginning:
    def test_no_rank_is_fed_before_all_have_built(self) -> None:
        """A library may refuse strides at once, and a rank that ends then would take the others' connections along."""
        twin = laws.strided(replace(WORK, likened="quick"))[0]
        with Engine(preload=("moe_conformance.scenarios.moe_step",)) as engine:
            for workload, met in ((twin.workload, ["barrier"]), (WORK, [])):
                for rank in moe_step(engine, "native", workload).ranks:
                    name, before = rank.phases[0]
                    assert "forward:0" == name
                    assert met == [entry.op for entry in rank.ledger[:before]]
