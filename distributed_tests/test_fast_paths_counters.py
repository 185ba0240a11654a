"""FAST: counters of the shortcuts of a backend's own experts."""

from __future__ import annotations

from moe_conformance.chapters.fast_paths.judge.shortcut_counters import judge_counts, judge_unchanged
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ON_COUNTED_EXPERTS


class TestCounters:
    @requirement("FAST-16", run=ON_COUNTED_EXPERTS)
    def test_every_decision_is_counted_once(self, outcome: Outcome, tally: Tally) -> None:
        """Counters are off at first; on, a call is one decision and one look-up: a miss behind a change, else a hit."""
        judge_counts(outcome, tally)

    @requirement("FAST-16", run=ON_COUNTED_EXPERTS)
    def test_counting_changes_nothing(self, outcome: Outcome, tally: Tally) -> None:
        """Outputs and gradients have the same bits with counters on as with counters off."""
        judge_unchanged(outcome, tally)
