"""The suite against bugs that are known to be there: it must find each of them, and say what it is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_conformance.backends import registry
from moe_conformance.contract.topology import Layout
from moe_conformance.judging.verdict import Mismatch, NotOffered
from moe_conformance.spec import load, places
from self_tests.checked_runs import EXPECTED, NATIVE, CheckedRuns, opened, variant_for
from self_tests.checks import unsized
from self_tests.lying_backends import lying, lying_costs, lying_routers, lying_rules
from self_tests.lying_backends.expected import LIARS
from self_tests.planted_bugs import Expectation, Plant, plants, plants_of_many_ranks
from self_tests.planted_bugs.plant import EP2_EDP2
from self_tests.plugin import plugin_runs

PLACES = sorted({(e.requirement, p.variant, p.layout.name, p.layout, e.workload) for p, e in EXPECTED}, key=str)
# There the bug is a claim, without which the requirement does not apply to native.
CLAIMED = ("COST-04", "alltoall")


@pytest.fixture(scope="module")
def checked(request: pytest.FixtureRequest) -> Iterator[CheckedRuns]:
    """The ranks for all tests of this module."""
    yield from opened(request)


class TestDetection:
    @pytest.mark.parametrize(("plant", "expected"), EXPECTED, ids=[f"{p.name}-{e.requirement}" for p, e in EXPECTED])
    def test_a_planted_bug_is_detected_and_named(
        self, checked: CheckedRuns, plant: Plant, expected: Expectation
    ) -> None:
        """The checks of the requirement fail at the right stage, in words that name the cause."""
        variant = variant_for(plant, expected)
        verdicts = checked.verdicts(plant.backend, expected.requirement, variant, plant.layout, expected.workload)
        (mismatch,) = [verdict for verdict in verdicts if isinstance(verdict, Mismatch)]
        assert expected.stage == mismatch.stage, mismatch.sentence
        missing = [words for words in expected.words if words not in mismatch.sentence]
        assert not missing, f"not in: {mismatch.sentence}"
        assert [] == unsized(mismatch)

    @pytest.mark.parametrize(
        ("requirement", "variant", "layout", "workload"),
        [(requirement, variant, layout, workload) for requirement, variant, _, layout, workload in PLACES],
        ids=[f"{requirement}-{variant}-{name}-{workload}" for requirement, variant, name, _, workload in PLACES],
    )
    def test_native_passes_where_its_planted_bugs_are_detected(
        self, checked: CheckedRuns, requirement: str, variant: str, layout: Layout, workload: str
    ) -> None:
        """The same checks on the same workload pass without the bug, and have compared something."""
        if (requirement, variant) == CLAIMED:
            with pytest.raises(NotOffered):
                checked.verdicts(NATIVE, requirement, variant, layout, workload)
        else:
            checked.check_passes(NATIVE, requirement, variant, layout, workload)

    def test_what_a_backend_keeps_from_another_layout_is_detected(self, checked: CheckedRuns) -> None:
        """A backend that returns the session of its first layout passes there, and fails on the next."""
        backend = "self_tests.chapters.groups.plants:FirstSessionForAll"
        checked.check_passes(backend, "EXCH-01", "alltoall", Layout(4, ep=4), "even")
        (mismatch,) = checked.verdicts(backend, "EXCH-01", "alltoall", EP2_EDP2, "even")
        assert isinstance(mismatch, Mismatch)
        assert "rank 0 token 0 slot" in mismatch.sentence

    @pytest.mark.parametrize(
        ("liar", "requirement", "layout", "workload", "words"),
        LIARS,
        ids=lambda value: value.__name__ if isinstance(value, type) else None,
    )
    def test_a_liar_is_detected(
        self, checked: CheckedRuns, liar: type, requirement: str, layout: Layout, workload: str, words: str
    ) -> None:
        """What an adapter reports wrongly of a correct computation is detected as well."""
        backend = f"{liar.__module__}:{liar.__name__}"
        verdicts = checked.verdicts(backend, requirement, "alltoall", layout, workload)
        (mismatch,) = [verdict for verdict in verdicts if isinstance(verdict, Mismatch)]
        assert words in mismatch.sentence


RUNS = {  # plant: requirement, workload, words
    "swapped-sources": ("EXCH-01", "even", "rank 0 token 0 slot 1 and rank 1 token 1 slot 1 are exchanged"),
    "expert-gradients-times-ep": ("GRAD-05", "own-even", "every expert gradient is 2.000 x the expected value"),
    "early-return-without-tokens": ("EXCH-09", "rank-without-tokens", "rank 1 hung: returned while rank 0 waited"),
    "unweighted": ("EXCH-05", "even", "EXCH-05: fail in combine"),
}


class TestCommandLine:
    def test_a_planted_bug_fails_the_run(self) -> None:
        """`moe-conformance run --plant NAME` exits with 1 and prints the sentence."""
        started = {
            name: subprocess.Popen(
                [
                    *(sys.executable, "-m", "moe_conformance.cli", "run", "--ranks", "2"),
                    *("--plant", name, "--only", requirement, "--", "-k", f"alltoall-ep2-{workload}]"),
                ],
                cwd=Path(__file__).parents[2],
                env={**plugin_runs.environment(), "COLUMNS": "200"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name, (requirement, workload, _) in RUNS.items()
        }
        for name, process in started.items():
            output, _ = process.communicate(timeout=plugin_runs.LIMIT_S)
            assert f"native with the planted bug {name}" in output
            assert RUNS[name][2] in output
            assert 1 == process.returncode


class TestCollection:
    def test_every_requirement_is_violated_by_a_plant(self) -> None:
        """A requirement that nothing has ever violated is not yet trusted."""
        checked = {id: load()[id].profile for id in places.checked()}
        of_many_ranks = {each.requirement for plant in plants_of_many_ranks() for each in plant.expects}
        assert {name for name, profile in checked.items() if profile == "virtual"} <= of_many_ranks
        assert {name for name, profile in checked.items() if profile != "virtual"} == {
            expected.requirement for _, expected in EXPECTED
        }

    def test_every_plant_expects_something(self) -> None:
        """A plant that nobody looks for shows nothing."""
        assert [] == [plant.name for plant in plants() if not plant.expects]

    def test_every_liar_is_tried(self) -> None:
        """None of the lying backends is left out."""
        named = [each for module in (lying, lying_costs, lying_routers, lying_rules) for each in vars(module).values()]
        shipped = {each for each in named if isinstance(each, type) and issubclass(each, lying.Liar)}
        assert shipped - {lying.Liar} == {liar for liar, *_ in LIARS}

    def test_names_are_unique(self) -> None:
        """A name on the command line means one plant."""
        names = [plant.name for plant in plants()]
        assert sorted(set(names)) == sorted(names)

    @pytest.mark.parametrize("plant", plants(), ids=lambda plant: plant.name)
    def test_a_plant_can_be_loaded_and_says_what_it_is(self, plant: Plant) -> None:
        """Its path leads to a backend of its name, and it has a mechanism in words."""
        backend = registry.load(plant.backend)
        assert plant.mechanism.endswith(".")
        assert isinstance(backend, plant.native)
