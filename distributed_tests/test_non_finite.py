"""EXCH: tokens that are not finite, which change no other token."""

from __future__ import annotations

from moe_conformance.chapters.non_finite.judge import (
    judge_delivered,
    judge_other_experts,
    judge_other_tokens,
    spoilt_without_slot,
    unfilled,
)
from moe_conformance.spec.row import Row
from moe_conformance.workloads.records.runs import ExchangeStep, ExpertsStep


class TestTokensThatAreNotFinite:
    test_they_harm_no_other_in_the_exchange = Row(
        "EXCH-41", ExchangeStep(tokens="not finite"), (judge_delivered, judge_other_tokens)
    )
    """Other tokens have the outputs and gradients that they have among finite tokens, exactly."""

    test_they_harm_no_other_in_the_experts = Row(
        "EXCH-41", ExpertsStep(tokens="not finite"), (judge_delivered, judge_other_tokens)
    )
    """The same with the backend's experts, within rounding."""

    test_they_harm_no_expert_that_they_do_not_reach = Row(
        "EXCH-41", ExpertsStep(tokens="not finite"), judge_other_experts, when=unfilled
    )
    """The gradients of other experts are those of their own tokens alone."""

    test_without_a_slot_they_reach_no_parameter = Row(
        "EXCH-42", ExpertsStep(tokens="not finite"), judge_other_experts, when=spoilt_without_slot
    )
    """The experts' gradients are those of the routed tokens alone."""
