"""Designs that differ from the default pass if they are claimed; unclaimed, or claimed and not kept, they are named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_conformance.contract.topology import Layout
from moe_conformance.judging.verdict import Mismatch, NotOffered
from self_tests.checked_runs import CheckedRuns, opened
from self_tests.planted_bugs.plant import EP2, EP2_EDP2, SINGLE

WRONG = "self_tests.correct_backends.wrong_designs"


@pytest.fixture(scope="module")
def checked(request: pytest.FixtureRequest) -> Iterator[CheckedRuns]:
    """The ranks for all tests of this module."""
    yield from opened(request)


class TestDesigns:
    @pytest.mark.parametrize(
        ("backend", "requirement", "layout", "workload"),
        [
            ("replicated_experts:Replicated", "EXCH-01", EP2, "uneven"),
            ("replicated_experts:Replicated", "EXPT-04", EP2_EDP2, "even"),
            ("replicated_experts:Replicated", "EXPT-02", EP2, "own-even"),
            ("replicated_experts:Replicated", "GRAD-05", EP2_EDP2, "own-even"),
            ("replicated_experts:Replicated", "COST-08", EP2_EDP2, "own-even"),
            ("replicated_experts:Replicated", "COST-03", EP2, "uneven"),
            ("scaled_gradients:Scaled", "GRAD-01", EP2, "uneven"),
            ("scaled_gradients:Scaled", "GRAD-02", EP2, "uneven"),
            ("scaled_gradients:Scaled", "GRAD-05", EP2_EDP2, "own-even"),
            ("all_reduced_outputs:Reduced", "COST-04", EP2, "uneven"),
            ("all_reduced_outputs:Reduced", "EXCH-41", EP2, "spoilt-dropped-even"),
            ("switch_gate:Switch", "ROUTE-02", EP2, "route-top-1-normalised"),
            ("switch_gate:Switch", "ROUTE-05", EP2, "route-top-1-normalised"),
            ("switch_gate:Switch", "ROUTE-07", EP2, "route-top-1-normalised"),
            ("switch_gate:Switch", "ROUTE-08", EP2, "route-top-1-normalised"),
            ("expert_lora:Tuned", "EXPT-01", EP2, "own-even"),
            ("expert_lora:Tuned", "GRAD-18", EP2, "layer-even"),
        ],
    )
    def test_it_passes(
        self, checked: CheckedRuns, backend: str, requirement: str, layout: Layout, workload: str
    ) -> None:
        """A backend of this design, which it claims, passes."""
        path = f"self_tests.correct_backends.{backend}"
        checked.check_passes(path, requirement, "default", layout, workload)

    @pytest.mark.parametrize(
        ("backend", "requirement", "layout", "workload", "words"),
        [
            (
                "ToAllReplicas",
                "EXCH-01",
                EP2,
                "uneven",
                "delivered to the replica of expert 4 on rank 0 too",
            ),
            ("ReplicasUnsaid", "EXPT-04", EP2, "even", "claims placement = 'replicas'"),
            ("ReplicasApart", "GRAD-05", EP2, "own-even", "the gradient of"),
            ("ScaledUnsaid", "GRAD-01", EP2, "uneven", "claims expert_gradients = 'mean_over_ep'"),
            ("NeverUndone", "GRAD-02", EP2, "uneven", "0.500 x the expected value"),
            ("NeverScaled", "GRAD-01", EP2, "uneven", "2.000 x the expected value"),
            ("ReducedUnsaid", "COST-04", EP2, "uneven", "claims combined = 'all_reduced'"),
            ("SaysReduced", "COST-03", EP2, "uneven", "expected wire = 'all'"),
            ("SwitchUnsaid", "ROUTE-02", EP2, "route-top-1-normalised", "the weights were not normalised"),
            ("WeighsOne", "ROUTE-02", EP2, "route-top-1-normalised", "the weights were normalised"),
            ("TunedUnsaid", "GRAD-05", EP2, "own-even", "has no gradient (None)"),
            ("Trains", "GRAD-05", EP2, "own-even", "has a gradient; claimed: frozen = 'experts'"),
        ],
    )
    def test_a_wrong_one_is_named(
        self, checked: CheckedRuns, backend: str, requirement: str, layout: Layout, workload: str, words: str
    ) -> None:
        """What is not claimed, or not kept, fails, with words that name it."""
        verdicts = checked.verdicts(f"{WRONG}:{backend}", requirement, "default", layout, workload)
        found = [str(verdict) for verdict in verdicts if isinstance(verdict, Mismatch)]
        assert any(words in message for message in found), verdicts

    def test_frozen_experts_are_asked_for_no_gradient(self, checked: CheckedRuns) -> None:
        """What requires a gradient of the experts' own weights is not adapted."""
        backend = "self_tests.correct_backends.expert_lora:Tuned"
        with pytest.raises(NotOffered, match="frozen = 'experts'"):
            checked.verdicts(backend, "GRAD-05", "default", EP2, "own-even")

    def test_experts_may_need_counts(self, checked: CheckedRuns) -> None:
        """Experts that fail without the counts which their exchange delivers are no failure."""
        backend = "self_tests.correct_backends.padded_blocks:Padded"
        with pytest.raises(NotOffered, match="take no delivery without counts"):
            checked.verdicts(backend, "FAST-12", "default", SINGLE, "experts-counts-unknown")
