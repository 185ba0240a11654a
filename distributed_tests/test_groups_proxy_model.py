"""GROUP: a small model with the backend's MoE layers, in every division over ranks and pipeline stages."""

from __future__ import annotations

from moe_conformance.chapters.groups.judge.proxy_model import judge_proxy_gradients, judge_proxy_tokens
from moe_conformance.chapters.groups.workloads.proxy_model import ProxyModelStep
from moe_conformance.judging.observed.run import Reading
from moe_conformance.judging.verdict import Tally
from moe_conformance.spec import requirement


class TestModel:
    @requirement("GROUP-07", run=ProxyModelStep())
    def test_a_divided_model_is_the_model(self, reading: Reading, tally: Tally) -> None:
        """Outputs and all gradients are those of the same model on one device."""
        judge_proxy_tokens(reading, tally)
        judge_proxy_gradients(reading, tally)
