"""Configurations that differ from the plain one in one option, each on every layout."""

from __future__ import annotations

from moe_conformance.judging.shared.exchange.gradients import judge_dweights, judge_dx
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.runs import ExchangeStep


class TestOneKnob:
    test_outputs_do_not_depend_on_the_knob = Row("EXCH-05", ExchangeStep(option="any"), judge_outputs)
    """Outputs are the weighted sums of the experts, with each option."""

    test_gradients_of_tokens_do_not_depend_on_the_knob = Row("GRAD-02", ExchangeStep(option="any"), judge_dx)
    """The gradient of a token is the sum over its slots, with each option."""

    test_gradients_of_weights_do_not_depend_on_the_knob = Row("GRAD-03", ExchangeStep(option="any"), judge_dweights)
    """The gradient of a weight is that of its own slot, with each option."""
