"""Correct backends that report forced routing, or rely on it, in other ways pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_conformance.judging.verdict import NotOffered
from moe_conformance.reproducing.examining import refusal_of
from self_tests.checked_runs import CheckedRuns, opened
from self_tests.planted_bugs.plant import EP2
from self_tests.trial_runs import Run

_HERE = "self_tests.correct_backends.unusual_forcing"


@pytest.fixture(scope="module")
def checked(request: pytest.FixtureRequest) -> Iterator[CheckedRuns]:
    """The ranks for all tests of this module."""
    yield from opened(request)


class TestReports:
    @pytest.mark.parametrize("workload", ["forced-round-robin-groups", "forced-biased-groups", "hot-rank-by-ratio"])
    def test_a_warning_is_a_report(self, checked: CheckedRuns, workload: str) -> None:
        """A router that warns of strategy and parameter while it is built need not show them as well."""
        checked.check_passes(f"{_HERE}:Warned", "FORCE-23", "alltoall", EP2, workload)

    def test_a_warning_need_not_be_the_strategy_in_force(self, checked: CheckedRuns) -> None:
        """Whether what is shown is in force is not asked where nothing is shown."""
        with pytest.raises(NotOffered, match="reports no strategy"):
            checked.verdicts(f"{_HERE}:Warned", "FORCE-20", "alltoall", EP2, "forced-round-robin-groups")


class TestRefusals:
    def test_an_exchange_may_refuse_other_routes(self, checked: CheckedRuns) -> None:
        """An exchange that relies on a round robin may refuse what an unforced router selects, and nothing else."""
        run = Run(f"{_HERE}:Refusing", "alltoall", EP2, "routed-round-robin-exchange-alone")
        assert refusal_of(checked.runs.outcome(run, alone=False)) is not None
        checked.check_passes(f"{_HERE}:Refusing", "FORCE-20", "alltoall", EP2, "routed-round-robin")
