"""FAST: shortcuts and libraries that a backend can do without."""

from __future__ import annotations

from moe_conformance.chapters.fast_paths.judge.optional import judge_optional_named
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.experts.experts import (
    judge_expert_gradients,
    judge_own_dweights,
    judge_own_dx,
    judge_own_outputs,
)
from moe_conformance.judging.verdict import Tally
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ExpertsStep


class TestOptional:
    @requirement("FAST-15", run=ExpertsStep(option="optional"))
    def test_results_are_the_same_without_what_is_optional(self, reading: Reading, tally: Tally) -> None:
        """With what is optional and without it, outputs and gradients are right, and what is used is named."""
        judge_own_outputs(reading, tally)
        judge_own_dx(reading, tally)
        judge_own_dweights(reading, tally)
        judge_expert_gradients(reading, tally)
        judge_optional_named(reading, tally)
