"""FAST: counters of the shortcuts of a backend's own experts."""

from __future__ import annotations

from moe_conformance.chapters.fast_paths.judge.shortcut_counters import judge_counts, judge_unchanged
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.runs import ON_COUNTED_EXPERTS


class TestCounters:
    test_every_decision_is_counted_once = Row("FAST-16", ON_COUNTED_EXPERTS, judge_counts)
    """Counters are off at first; on, a call is one decision and one look-up: a miss behind a change, else a hit."""

    test_counting_changes_nothing = Row("FAST-16", ON_COUNTED_EXPERTS, judge_unchanged)
    """Outputs and gradients have the same bits with counters on as with counters off."""
