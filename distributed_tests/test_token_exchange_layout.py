"""EXCH-26: the dispatch layout: tokens for each rank and node, counted before anything is sent."""

from __future__ import annotations

from moe_conformance.judging.shared.exchange.dispatch_layout import judge_dispatch_layout
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.runs import Script


class TestDispatchLayout:
    test_tokens_are_counted_for_ranks_nodes_and_experts = Row(
        "EXCH-26", Script("dispatch_layout"), judge_dispatch_layout
    )
    """A token counts once for each rank and node that it is sent to, and for an expert once per slot."""
