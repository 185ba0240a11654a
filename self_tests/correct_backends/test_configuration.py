"""Correct backends that resolve settings in other ways pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moe_conformance.chapters.config_rules.workloads.accepted import NAME
from moe_conformance.chapters.config_rules.workloads.settings import LATER, RULES, SHOWN, UNKNOWN, workload_of
from moe_conformance.judging.verdict import NotOffered
from self_tests.checked_runs import CheckedRuns, opened
from self_tests.planted_bugs.plant import EP2, SINGLE

HONOURED = {f"RULE-{number:02}" for number in (8, 9, 10, 11, 12, 13, 14, 16, 17, 18, 20, 21, 22)}


@pytest.fixture(scope="module")
def checked(request: pytest.FixtureRequest) -> Iterator[CheckedRuns]:
    """The ranks for all tests of this module."""
    yield from opened(request)


def path_of(backend: str) -> str:
    """Return the dotted path of a backend."""
    return f"self_tests.correct_backends.unusual_configuration:{backend}"


class TestWaysToResolve:
    @pytest.mark.parametrize("backend", ["Honouring", "Replacing", "Refusing"])
    def test_every_rule_leaves_a_choice(self, checked: CheckedRuns, backend: str) -> None:
        """What may be honoured may be refused, and what may be changed too, one way or another."""
        for rule in RULES:
            if backend == "Honouring" and rule in HONOURED:
                with pytest.raises(NotOffered, match="is accepted, which is judged where it runs, and not here"):
                    checked.verdicts(path_of(backend), rule, "alltoall", SINGLE, workload_of(rule))
            else:
                checked.check_passes(path_of(backend), rule, "alltoall", SINGLE, workload_of(rule))
        for requirement, workload in (("RULE-02", SHOWN), ("RULE-04", UNKNOWN), ("RULE-05", LATER)):
            checked.check_passes(path_of(backend), requirement, "alltoall", SINGLE, workload)

    @pytest.mark.parametrize("rule", ["RULE-09", "RULE-10", "RULE-11", "RULE-14", "RULE-15", "RULE-20"])
    def test_what_is_honoured_is_run(self, checked: CheckedRuns, rule: str) -> None:
        """Other dtypes, recomputation and deferral without overlap give the oracle's values, and show."""
        checked.check_passes(path_of("Honouring"), rule, "alltoall", EP2, NAME)

    @pytest.mark.parametrize(
        ("rule", "why"),
        [
            ("RULE-08", "native runs no step with dispatcher='allgather'"),
            ("RULE-17", "no step with capture=('attention', 'moe')"),
        ],
    )
    def test_what_is_accepted_and_not_run_is_no_pass(self, checked: CheckedRuns, rule: str, why: str) -> None:
        """That the library takes a configuration says nothing of what it computes."""
        with pytest.raises(NotOffered, match="is accepted, which is not judged: ") as told:
            checked.verdicts(path_of("Honouring"), rule, "alltoall", EP2, NAME)
        assert why in str(told.value)

    @pytest.mark.parametrize("rule", ["RULE-06", "RULE-07", "RULE-15", "RULE-23"])
    def test_changes_may_be_logged(self, checked: CheckedRuns, rule: str) -> None:
        """A warning need not be one of the module `warnings`, and others may be given with it."""
        checked.check_passes(path_of("Replacing"), "RULE-03", "alltoall", EP2, workload_of(rule))

    def test_nothing_need_be_changed(self, checked: CheckedRuns) -> None:
        """A backend that refuses everything instead has no changes to judge."""
        with pytest.raises(NotOffered, match="no option runs with another value"):
            checked.verdicts(path_of("Refusing"), "RULE-03", "alltoall", SINGLE, workload_of("RULE-15"))

    def test_layers_may_be_fixed(self, checked: CheckedRuns) -> None:
        """A backend that refuses every change passes; and versions need not be assumed to be others."""
        checked.check_passes(path_of("Fixed"), "RULE-05", "alltoall", SINGLE, LATER)
        with pytest.raises(NotOffered, match="the versions that are installed count"):
            checked.verdicts(path_of("Fixed"), "RULE-19", "alltoall", SINGLE, workload_of("RULE-19"))
