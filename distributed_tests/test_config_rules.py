"""RULE: configurations that must be built, and those that may be refused."""

from __future__ import annotations

from moe_conformance.judging.exchange.deliveries import judge_deliveries
from moe_conformance.judging.exchange.outputs import judge_form, judge_outputs
from moe_conformance.judging.groups.config_rules import judge_packed
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import Tally
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec import requirement
from moe_conformance.workloads.corpus import config_rules
from moe_conformance.workloads.records.runs import ON_SESSION, ExchangeStep


class TestPackedSequences:
    @requirement("RULE-25", run=ON_SESSION, when=lambda workload: workload.name == config_rules.BUILT)
    def test_all_gathers_alone_may_refuse_them(self, outcome: Outcome, tally: Tally) -> None:
        """An all-to-all and a fused exchange build with packed sequences; others build or raise on every rank."""
        judge_packed(outcome, tally)

    @requirement("RULE-25", run=ExchangeStep(option="packing"))
    def test_who_takes_them_exchanges_them_right(self, reading: Reading, tally: Tally) -> None:
        """With packed sequences each pair is delivered once and outputs are correct, with any T on each rank."""
        judge_deliveries(reading, tally)
        judge_form(reading, tally)
        judge_outputs(reading, tally)
