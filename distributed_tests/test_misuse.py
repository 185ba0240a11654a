"""EXCH: wrong input, which is refused where it is detected and leaves no rank waiting."""

from __future__ import annotations

from moe_conformance.judging.observed.script import judge_arguments
from moe_conformance.judging.shared.exchange.misuse import (
    judge_wrong_answers,
    judge_wrong_input,
    wrong_answers,
    wrong_input,
)
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ON_EXCHANGE


class TestWrongUse:
    @requirement("EXCH-44", run=ON_EXCHANGE, when=wrong_input)
    def test_wrong_input_is_refused_by_every_rank(self, outcome: Outcome, tally: Tally) -> None:
        """Input that cannot be routed raises on every rank of the exchange group, and the next step works."""
        judge_wrong_input(outcome, tally)

    @requirement("EXCH-45", run=ON_EXCHANGE, when=wrong_answers)
    def test_answers_that_do_not_fit_are_refused(self, outcome: Outcome, tally: Tally) -> None:
        """A combine with another dispatch's handle, or another width, raises on its rank, and no other rank waits."""
        judge_wrong_answers(outcome, tally)

    @requirement("EXCH-08", run=ON_EXCHANGE)
    def test_what_is_wrong_is_not_put_right_in_place(self, outcome: Outcome, tally: Tally) -> None:
        """Arguments of a step that is refused hold the bytes that were given."""
        judge_arguments(outcome, tally)
