"""Configurations that differ from the plain one in one option, each on every layout."""

from __future__ import annotations

from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.shared.exchange.gradients import judge_dweights, judge_dx
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.judging.verdict import Tally
from moe_conformance.spec import requirement
from moe_conformance.workloads.records.runs import ExchangeStep


class TestOneKnob:
    @requirement("EXCH-05", run=ExchangeStep(option="any"))
    def test_outputs_do_not_depend_on_the_knob(self, reading: Reading, tally: Tally) -> None:
        """Outputs are the weighted sums of the experts, with each option."""
        judge_outputs(reading, tally)

    @requirement("GRAD-02", run=ExchangeStep(option="any"))
    def test_gradients_of_tokens_do_not_depend_on_the_knob(self, reading: Reading, tally: Tally) -> None:
        """The gradient of a token is the sum over its slots, with each option."""
        judge_dx(reading, tally)

    @requirement("GRAD-03", run=ExchangeStep(option="any"))
    def test_gradients_of_weights_do_not_depend_on_the_knob(self, reading: Reading, tally: Tally) -> None:
        """The gradient of a weight is that of its own slot, with each option."""
        judge_dweights(reading, tally)
