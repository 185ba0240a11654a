"""EXCH-26: the dispatch layout: tokens for each rank and node, counted before anything is sent."""

from __future__ import annotations

from moe_conformance.judging.shared.exchange.dispatch_layout import judge_dispatch_layout
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import Script


class TestDispatchLayout:
    @requirement("EXCH-26", run=Script("dispatch_layout"))
    def test_tokens_are_counted_for_ranks_nodes_and_experts(self, outcome: Outcome, tally: Tally) -> None:
        """A token counts once for each rank and node that it is sent to, and for an expert once per slot."""
        judge_dispatch_layout(outcome, tally)
