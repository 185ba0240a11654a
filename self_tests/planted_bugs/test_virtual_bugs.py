"""Virtual ranks find bugs that show on many ranks only."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from moe_conformance.contract.topology import Layout
from moe_conformance.engine import Engine
from moe_conformance.judging.verdict import Mismatch, Tally
from moe_conformance.scenarios.moe_step import moe_step
from moe_conformance.scenarios.outcome import Outcome
from moe_conformance.spec.checks import by_requirement
from moe_conformance.workloads import virtual
from self_tests.checks import judge
from self_tests.planted_bugs import Expectation, Plant, plants_of_many_ranks

EP8 = Layout(8, ep=8)
EXPECTED = [(plant, expected) for plant in plants_of_many_ranks() for expected in plant.expects]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """One engine for all planted bugs."""
    with Engine(virtual=True, preload=("moe_conformance.scenarios.moe_step", "self_tests.planted_bugs")) as engine:
        yield engine


def run(engine: Engine, backend: str, layout: Layout, workload: str) -> Outcome:
    """Run a workload of the virtual corpus."""
    (drawn,) = [each for each in virtual.corpus("alltoall", layout) if each.name == workload]
    return moe_step(engine, backend, drawn)


@cache
def check_native_passes(engine: Engine, requirement: str, layout: Layout, workload: str) -> None:
    """Require that native passes."""
    for verdict in verdicts(run(engine, "native", layout, workload), requirement):
        assert isinstance(verdict, Tally), verdict
        assert not verdict.vacuous


def verdicts(outcome: Outcome, requirement: str) -> list[Mismatch | Tally]:
    """What every check of a requirement makes of a run."""
    return [judge(check, outcome=outcome) for check in by_requirement()[requirement] if check.reads(outcome.workload)]


class TestDetection:
    @pytest.mark.parametrize(("plant", "expected"), EXPECTED, ids=[f"{p.name}-{e.requirement}" for p, e in EXPECTED])
    def test_a_bug_of_many_ranks_is_detected_and_named(
        self, engine: Engine, plant: Plant, expected: Expectation
    ) -> None:
        """The check of its own requirement fails, in words that name the cause; native passes there."""
        outcome = run(engine, plant.backend, plant.layout, expected.workload)
        found = [v for v in verdicts(outcome, expected.requirement) if isinstance(v, Mismatch)]
        told = [(mismatch.stage, mismatch.sentence) for mismatch in found]
        assert any(
            expected.stage == stage and all(words in sentence for words in expected.words) for stage, sentence in told
        ), told
        check_native_passes(engine, expected.requirement, plant.layout, expected.workload)

    @pytest.mark.parametrize("plant", plants_of_many_ranks(), ids=lambda plant: plant.name)
    def test_it_does_not_show_on_8_ranks(self, engine: Engine, plant: Plant) -> None:
        """So nothing but the number of ranks makes it detectable."""
        outcome = run(engine, plant.backend, EP8, "many-ranks-uneven")
        for requirement in ("EXCH-01", "EXCH-05", "GRAD-02"):
            assert all(isinstance(verdict, Tally) for verdict in verdicts(outcome, requirement))
