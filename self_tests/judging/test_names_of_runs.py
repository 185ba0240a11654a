"""The names of equivalent runs, by which the checks of a case share them."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest

from moe_conformance.chapters.determinism import workloads as determinism
from moe_conformance.workloads import laws
from moe_conformance.workloads.twins import Twin
from self_tests.judging.simulated_exchange import workload


class TestNames:
    MADE = (
        *(laws.reordered, laws.relabelled, laws.scaled, laws.strided, laws.spread, laws.packed, laws.among_fewer),
        *(laws.alone, laws.unasked, laws.padding_gradients, laws.shared, laws.recut),
        *(determinism.again, determinism.afresh, determinism.behind_inference, determinism.lifetime),
        *(determinism.twice, determinism.seeded, determinism.behind_draws, determinism.delayed),
    )

    @pytest.mark.parametrize("likened", ["quick", "full"])
    def test_equivalent_runs_of_one_name_are_one_run(self, likened: str) -> None:
        """The checks of a case share a run by its name: it is the same run whichever check asks for it first."""
        work = replace(workload(drop=True), likened=likened)  # type: ignore[arg-type]
        named: dict[str, list[Twin]] = {}
        for twin in chain([determinism.deterministic(work)], *(make(work) for make in self.MADE)):
            named.setdefault(twin.how, []).append(twin)
        assert any(len(same) > 1 for same in named.values())
        for first, *others in named.values():
            for other in others:
                assert run_of(first) == run_of(other)
                assert origins(first) == origins(other)


def run_of(twin: Twin) -> tuple[object, ...]:
    """Return what is run besides the tokens of the original."""
    work = twin.workload
    return (work.config, work.layout, work.schedule, work.lead, work.twist, twin.fresh, twin.numbers_E.tolist())


def origins(twin: Twin) -> list[list[int]]:
    """Return where every token of a twin comes from."""
    return [source for rows in chain(*twin.origin) for source in rows.source_T3.tolist()]
