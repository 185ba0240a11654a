"""Microbatches that are mixed up with each other: which were in flight together, and whose routing was used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moe_conformance.judging.shared.exchange.deliveries import judge_deliveries
from moe_conformance.judging.shared.exchange.gradients import judge_dweights, judge_dx
from moe_conformance.judging.shared.exchange.outputs import judge_outputs
from moe_conformance.scenarios.outcome import Grad, Microbatch, Outcome
from moe_conformance.workloads.records.workload import Batch, Workload
from self_tests.judging.breaking import broken, caught, edit
from self_tests.judging.simulated_exchange import workload

WORK = workload(microbatches=2)
ONE_BY_ONE = "F0 B0 F1 B1"
TOGETHER = "microbatches 0 and 1 were in flight at the same time"


def mixed_up(change: Callable[[Batch, Batch], Batch], work: Workload = WORK) -> Outcome:
    """Run microbatch 0 with something of microbatch 1, given (batch of 0, batch of 1) of every rank."""
    first, second = work.batches
    ranks = tuple(change(own, other) for own, other in zip(first, second, strict=True))
    return replace(broken(replace(work, batches=(ranks, second))), workload=work)


def rerouted(own: Batch, other: Batch) -> Batch:
    """Take the other's routing."""
    return replace(own, ids_TK=other.ids_TK, weights_TK=other.weights_TK)


def reweighted(own: Batch, other: Batch) -> Batch:
    """Take the other's weights."""
    return replace(own, weights_TK=other.weights_TK)


def flipped_dweights(seen: Microbatch) -> Microbatch:
    """Turn the gradients of the weights upside down."""
    return replace(seen, dweights_TK=Grad(present(seen.dweights_TK.value).flip(0)))


def present(value: torch.Tensor | None) -> torch.Tensor:
    """Refuse an absent tensor."""
    assert value is not None
    return value


class TestAnothersRouting:
    def test_a_dispatch_by_anothers_routing_is_recognised(self) -> None:
        """Tokens that were delivered as another microbatch's ids say are told by that, not one by one."""
        fault = caught(judge_deliveries, mixed_up(rerouted))
        assert f"{TOGETHER}, of which 1 is correct: " in fault.sentence
        assert "microbatch 0 was dispatched by the routing of microbatch 1" in fault.sentence
        assert (0, 1) == fault.ranks

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (rerouted, "its tokens were routed as those of microbatch 1;"),
            (reweighted, "every {noun} had the weight of microbatch 1 for its slot; it is wrong at"),
            (
                lambda own, other: replace(own, ids_TK=other.ids_TK),
                "its tokens were routed as those of microbatch 1, with their own weights; it is wrong at",
            ),
        ],
    )
    def test_ids_or_weights_of_another_are_recognised(
        self, change: Callable[[Batch, Batch], Batch], words: str
    ) -> None:
        """Outputs and gradients tell whose ids and whose weights were used."""
        outcome = mixed_up(change)
        assert f"is correct: y of microbatch 0 is wrong; likely cause: {words.format(noun='answer')}" in str(
            caught(judge_outputs, outcome)
        )
        assert f"is correct: dx of microbatch 0 is wrong; likely cause: {words.format(noun='gradient')}" in str(
            caught(judge_dx, outcome)
        )

    def test_a_mix_up_in_one_by_one_is_recognised_too(self) -> None:
        """A routing that is kept too long needs no other in flight."""
        fault = caught(judge_outputs, mixed_up(rerouted, replace(WORK, schedule=ONE_BY_ONE)))
        assert "combine" != fault.stage  # the rows were wrong before
        assert (
            "y of microbatch 0 is wrong; likely cause: its tokens were routed as those of microbatch 1"
            in fault.sentence
        )
        assert "in flight" not in fault.sentence


class TestWords:
    def test_microbatches_that_were_in_flight_with_a_right_one_are_named_first(self) -> None:
        """What is wrong in one of them only may be the other's doing."""
        outcome = edit(broken(WORK), 0, lambda seen: replace(seen, y=present(seen.y).flip(0)))
        assert str(caught(judge_outputs, outcome)).startswith(f"combine: {TOGETHER}, of which 1 is correct: y of")

    def test_a_fault_of_all_of_them_is_told_before_the_remark(self) -> None:
        """What is wrong in every microbatch is more likely to be a fault of its own."""
        outcome = broken(WORK)
        for m in range(2):
            outcome = edit(outcome, 0, flipped_dweights, m)
        fault = caught(judge_dweights, outcome)
        assert fault.sentence.startswith("the gradient of the routing weight of rank 0 token")
        assert fault.sentence.endswith(f" ({TOGETHER})")

    def test_one_by_one_nothing_is_said_of_it(self) -> None:
        """Where microbatches follow each other none is in flight with another."""
        outcome = broken(replace(WORK, schedule=ONE_BY_ONE))
        fault = caught(judge_outputs, edit(outcome, 0, lambda seen: replace(seen, y=present(seen.y).flip(0))))
        assert "in flight" not in fault.sentence
